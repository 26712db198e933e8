import asyncio

from kvcache.handshake import Identity
from pipelines.node.session import Session
from pipelines.types.frames import Delta, Failure, Outputs
from pronghorn.errors import NodeLost
from pronghorn.ids import Fence, Incarnation, RequestID

PEER = Identity(role="orchestrator", name="orchestrator-1", incarnation="o" * 32, model="m")
FENCE = Fence(RequestID("r"), 1, Incarnation("d" * 32))


def test_what_is_said_between_two_takes_leaves_as_one_frame_in_order() -> None:
    session = Session(PEER)
    session.say(Delta(FENCE, [1]))
    session.say(Delta(FENCE, [2]))
    session.fail(FENCE, NodeLost("gone"))
    assert session.take() == Outputs(
        [Delta(FENCE, [1]), Delta(FENCE, [2])], [Failure(FENCE, NodeLost("gone").record())]
    )
    assert session.take() is None


def test_a_beat_that_was_asked_for_is_taken_once() -> None:
    session = Session(PEER)
    session.ask_beat()
    assert session.take_beat() and not session.take_beat()


async def test_a_reader_that_is_too_slow_loses_its_session() -> None:
    session = Session(PEER, max_waiting=2)
    for token in range(3):
        session.say(Delta(FENCE, [token]))
    async with asyncio.timeout(15.0):
        await session.over()
    assert "too slowly" in str(session.end_reason)


async def test_the_first_reason_for_the_end_is_kept() -> None:
    session = Session(PEER)
    session.end("one")
    session.end("two")
    assert session.end_reason == "one"


async def test_a_writer_wakes_for_what_is_said_and_otherwise_in_time() -> None:
    session = Session(PEER)
    session.say(Delta(FENCE, [1]))
    async with asyncio.timeout(15.0):
        await session.wait(60.0)
    await session.wait(0.0)
