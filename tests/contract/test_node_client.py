"""What every `orchestrator.ports.NodeClient` does, whatever carries its frames."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import numpy as np
import pytest

from kvcache.handshake import Identity
from orchestrator.node_client import GrpcNodeClient
from orchestrator.ports import NodeClient
from pipelines.types.frames import (
    Abort,
    Delta,
    DropPrefixCache,
    Heartbeat,
    NodeFrame,
    OrchestratorFrame,
    Outputs,
    PrefillTarget,
    Submit,
)
from pipelines.types.text_context import TextContext
from pipelines.types.token_buffer import TokenBuffer
from pronghorn.errors import HandshakeRefused, NodeLost, Overloaded
from pronghorn.ids import Fence, Incarnation, NodeName, RequestID
from tests.fakes.grpc_node import GrpcNode, serving
from tests.fakes.memory_node import MODEL, MemoryNode, MemoryNodeClient, record

RECORD = record("decode-1")
FENCE = Fence(RequestID("r"), 1, RECORD.incarnation)
OURS = Identity(role="orchestrator", name="o", incarnation="o-1", model=MODEL, seed_digest="seed")
QUEUE_FRAMES = 64


@dataclass
class Pair:
    """A client, and the same five acts of the node behind it."""

    client: NodeClient
    say: Callable[[NodeFrame], None]
    received: Callable[[], Awaitable[OrchestratorFrame]]
    break_session: Callable[[], Awaitable[None]]
    refuse: Callable[[], None]
    stop_reading: Callable[[], None]


@asynccontextmanager
async def in_memory() -> AsyncIterator[Pair]:
    node = MemoryNode(RECORD, send_queue_frames=QUEUE_FRAMES)
    client = MemoryNodeClient(node)

    async def received() -> OrchestratorFrame:
        return node.received.pop(0)

    async def break_session() -> None:
        node.lose()

    yield Pair(
        client,
        node.say,
        received,
        break_session,
        lambda: setattr(node, "refuses", HandshakeRefused("wrong model")),
        lambda: setattr(node, "reading", False),
    )
    await client.close()


@asynccontextmanager
async def over_grpc() -> AsyncIterator[Pair]:
    async with serving(RECORD) as node:
        client = GrpcNodeClient(node.record, OURS, connect_timeout_s=5.0, send_queue_frames=QUEUE_FRAMES)
        yield Pair(
            client,
            node.say,
            node.received.get,
            node.kill,
            lambda: setattr(node, "refuses", "wrong model"),
            lambda: setattr(node, "reading", False),
        )
        await client.close()


@pytest.fixture(params=[in_memory, over_grpc])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    factory: Callable[[], AbstractAsyncContextManager[Pair]] = request.param
    async with factory() as pair:
        yield pair


def submit(prompt_tokens: int = 4) -> Submit:
    context = TextContext(
        request_id=FENCE.request_id,
        max_length=2 * prompt_tokens,
        tokens=TokenBuffer(np.arange(prompt_tokens, dtype=np.int64)),
        external_block_metadata={"version": 1, "instances": []},
    )
    target = PrefillTarget(NodeName("prefill-1"), "127.0.0.1:9", Incarnation("p"))
    return Submit(FENCE, context, 5.0, [target], only_these=True)


async def test_the_nodes_frames_come_in_order(pair: Pair) -> None:
    await pair.client.connect()
    for token in range(3):
        pair.say(Outputs([Delta(FENCE, [token])]))
    frames = pair.client.frames()
    assert isinstance(await anext(frames), Heartbeat)
    assert [await anext(frames) for _ in range(3)] == [Outputs([Delta(FENCE, [token])]) for token in range(3)]
    await frames.aclose()


async def test_what_is_sent_arrives_whole_and_in_order(pair: Pair) -> None:
    await pair.client.connect()
    sent: list[OrchestratorFrame] = [
        submit(),
        Abort(Fence(RequestID("other"), 1, FENCE.incarnation)),
        DropPrefixCache(),
    ]
    for frame in sent:
        pair.client.send(frame)
    assert [await pair.received() for _ in sent] == sent


async def test_nothing_can_be_sent_before_the_session_is_up(pair: Pair) -> None:
    with pytest.raises(NodeLost):
        pair.client.send(Abort(FENCE))


async def test_a_broken_session_ends_the_frames_with_node_lost_and_then_refuses(pair: Pair) -> None:
    await pair.client.connect()
    frames = pair.client.frames()
    await anext(frames)
    await pair.break_session()
    with pytest.raises(NodeLost):
        async with asyncio.timeout(60.0):
            await anext(frames)
    with pytest.raises(NodeLost):
        pair.client.send(Abort(FENCE))


async def test_a_node_that_does_not_want_us_is_a_refused_handshake(pair: Pair) -> None:
    pair.refuse()
    with pytest.raises(HandshakeRefused, match="wrong model"):
        await pair.client.connect()


async def test_a_node_that_does_not_read_fills_the_queue_and_an_abort_still_goes_in(pair: Pair) -> None:
    pair.stop_reading()
    await pair.client.connect()
    large = submit(prompt_tokens=100_000)
    with pytest.raises(Overloaded, match="decode-1"):
        for _ in range(4 * QUEUE_FRAMES):
            pair.client.send(large)
    pair.client.send(Abort(FENCE))


async def test_a_request_that_is_aborted_before_it_was_written_takes_no_room() -> None:
    """A storm of requests and cancels within one turn, which the socket cannot keep up with."""
    async with serving(RECORD) as node:
        client = grpc_client(node)
        await client.connect()
        for _ in range(4 * QUEUE_FRAMES):
            client.send(submit())
            client.send(Abort(FENCE))
        client.send(DropPrefixCache())
        assert await node.received.get() == DropPrefixCache()
        await client.close()


async def test_closing_ends_the_frames_and_may_be_done_twice(pair: Pair) -> None:
    await pair.client.connect()
    frames = pair.client.frames()
    await anext(frames)
    await pair.client.close()
    await pair.client.close()
    with pytest.raises(NodeLost):
        await anext(frames)
    with pytest.raises(NodeLost):
        pair.client.send(Abort(FENCE))


async def test_closing_ends_a_read_that_waits(pair: Pair) -> None:
    await pair.client.connect()
    frames = pair.client.frames()
    await anext(frames)

    async def read_on() -> None:
        with pytest.raises(NodeLost):
            await anext(frames)

    async with asyncio.timeout(60.0), asyncio.TaskGroup() as tasks:
        tasks.create_task(read_on())
        await asyncio.sleep(0)  # the read is under way
        await pair.client.close()


# --- what only gRPC can do wrong ---


def grpc_client(node: GrpcNode, connect_timeout_s: float = 5.0) -> GrpcNodeClient:
    return GrpcNodeClient(node.record, OURS, connect_timeout_s, QUEUE_FRAMES)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("incarnation", "another-life"),
        ("model", "another-model"),
        ("seed_digest", "another-seed"),
        ("oldest_protocol_version", 99),
    ],
)
async def test_a_hello_that_does_not_fit_is_refused_by_field(field: str, value: object) -> None:
    async with serving(RECORD) as node:
        versions = {"protocol_version": 99} if field == "oldest_protocol_version" else {}
        node.hello = node.identity(**{field: value}, **versions).to_hello().SerializeToString()
        client = grpc_client(node)
        with pytest.raises(HandshakeRefused) as refused:
            await client.connect()
        assert refused.value.param is not None
        assert refused.value.param.removesuffix("_version") in field
        await client.close()


async def test_an_answer_that_is_no_hello_is_refused() -> None:
    async with serving(RECORD) as node:
        node.hello = b"\xff\xff\xff"
        client = grpc_client(node)
        with pytest.raises(HandshakeRefused, match="did not answer with a Hello"):
            await client.connect()
        await client.close()


async def test_connecting_is_bounded() -> None:
    async with serving(RECORD) as node:
        node.silent = True
        client = grpc_client(node, connect_timeout_s=0.1)
        with pytest.raises(NodeLost, match=r"0\.1 s"):
            await client.connect()
        await client.close()


async def test_nobody_at_the_address_is_a_lost_node() -> None:
    async with serving(RECORD) as node:
        gone = node.record
    client = GrpcNodeClient(gone, OURS, 2.0, QUEUE_FRAMES)
    with pytest.raises(NodeLost):
        await client.connect()
    await client.close()


async def test_a_session_that_the_node_ends_in_good_order_is_lost_too() -> None:
    async with serving(RECORD) as node:
        client = grpc_client(node)
        await client.connect()
        node.end()
        with pytest.raises(NodeLost, match="ended the session"):
            async for _ in client.frames():
                pass
        await client.close()


async def test_garbage_breaks_the_session() -> None:
    async with serving(RECORD) as node:
        client = grpc_client(node)
        await client.connect()
        node.say_garbage()
        with pytest.raises(NodeLost, match="no frame"):
            async for _ in client.frames():
                pass
        await client.close()


async def test_many_frames_at_once_share_one_writer() -> None:
    """Concurrent writes on one grpc.aio stream break it."""
    async with serving(RECORD) as node:
        client = grpc_client(node)
        await client.connect()
        for _ in range(QUEUE_FRAMES):
            client.send(Abort(FENCE))
        for _ in range(QUEUE_FRAMES):
            assert await node.received.get() == Abort(FENCE)
        await client.close()
