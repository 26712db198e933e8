"""One hand-over against a prefill node that the test plays, frame by frame."""

import asyncio
from collections.abc import Iterable

import msgspec
import pytest

from decode_nodes.pull import pull
from kvcache import transfer
from kvcache.handshake import Identity
from pipelines.types import wire
from pipelines.types.frames import PrefillTarget
from pipelines.types.handover import NOT_BEGUN, FirstToken, HandOverMessage, Progress, Refusal, Welcome
from pronghorn.errors import HandshakeRefused, NodeLost, Overloaded, PronghornError, TransferFailed
from pronghorn.ids import Incarnation, NodeName

BLOCK_BYTES = 64
OURS = Identity(role="decode", name="decode-1", incarnation="d" * 32, model="m", layout={"dtype": "float32"})
THEIRS = msgspec.structs.replace(OURS, role="prefill", name="prefill-1", incarnation="p" * 32)
TARGET = PrefillTarget(NodeName("prefill-1"), "127.0.0.1:1", Incarnation(THEIRS.incarnation))
BLOCKS = {1: bytes([1]) * BLOCK_BYTES, 2: bytes([2]) * BLOCK_BYTES}


class Script:
    """A stream that says these frames and then ends, or falls silent."""

    def __init__(self, frames: Iterable[bytes], silent: bool = False) -> None:
        self._frames = iter(frames)
        self._silent = silent

    async def read(self) -> transfer.Frame | None:
        frame = next(self._frames, None)
        if frame is None and self._silent:
            await asyncio.Event().wait()
        return None if frame is None else transfer.decode(frame)

    def take(self, frame: transfer.BlocksFrame, receiver: transfer.BlockReceiver) -> None:
        receiver.accept(frame)


def say(message: HandOverMessage) -> bytes:
    return transfer.encode_message(wire.encode(message))


def welcome(identity: Identity = THEIRS) -> bytes:
    return say(Welcome(identity.to_hello().SerializeToString()))


def blocks(contents: dict[int, bytes] = BLOCKS) -> tuple[list[bytes], bytes]:
    """The frames of these blocks, and their commit."""
    sent: dict[int, bytes] = {}
    frames = list(transfer.encode_blocks([(p, memoryview(data)) for p, data in contents.items()], sent))
    return frames, transfer.encode_commit(sent)


class Landing:
    def __init__(self) -> None:
        self.memory = {position: bytearray(BLOCK_BYTES) for position in BLOCKS}
        self.tokens: list[int] = []

    async def pull(self, *frames: bytes, silent: bool = False) -> None:
        await self.pull_from(Script(frames, silent))

    async def pull_from(self, stream: Script) -> None:
        await pull(
            stream,
            ours=OURS,
            target=TARGET,
            receiver=transfer.BlockReceiver({p: memoryview(memory) for p, memory in self.memory.items()}),
            on_first_token=lambda token: self.tokens.append(token.token),
            stall_timeout_s=0.02,
        )


async def refusal(*frames: bytes, silent: bool = False) -> PronghornError:
    with pytest.raises(PronghornError) as refused:
        await Landing().pull(*frames, silent=silent)
    return refused.value


async def test_blocks_land_and_the_first_token_is_told() -> None:
    landing = Landing()
    frames, commit = blocks()
    await landing.pull(welcome(), say(Progress()), say(FirstToken(7)), *frames, commit)
    assert landing.memory == BLOCKS and landing.tokens == [7]


async def test_the_welcome_comes_first() -> None:
    frames, commit = blocks()
    assert isinstance(await refusal(*frames, commit), HandshakeRefused)
    assert isinstance(await refusal(say(Progress())), HandshakeRefused)


@pytest.mark.conformance(45)
async def test_a_refusal_is_the_error_that_the_prefill_node_gave() -> None:
    refused = say(Refusal(Overloaded("full", retry_after_s=2.0).record()))
    for frames in ([refused], [welcome(), refused]):
        error = await refusal(*frames)
        assert isinstance(error, Overloaded) and error.retry_after_s == 2.0


@pytest.mark.conformance(42)
@pytest.mark.parametrize(
    ("field", "value"),
    [("incarnation", "0" * 32), ("model", "other"), ("layout", {"dtype": "bfloat16"}), ("seed_digest", "other")],
)
async def test_a_peer_that_does_not_fit_is_refused_by_name_and_writes_nothing(field: str, value: object) -> None:
    other = msgspec.structs.replace(THEIRS, **{field: value})
    landing = Landing()
    frames, commit = blocks()
    with pytest.raises(HandshakeRefused, match=field):
        await landing.pull(welcome(other), *frames, commit)
    assert not any(any(memory) for memory in landing.memory.values())


async def test_silence_is_a_fault_at_every_point() -> None:
    frames, _ = blocks()
    for said in ([], [welcome()], [welcome(), *frames]):
        error = await refusal(*said, silent=True)
        assert isinstance(error, NodeLost) and error.code == "stalled"


async def test_whether_a_connection_broke_before_or_after_the_welcome_is_told_apart() -> None:
    class Breaking(Script):
        async def read(self) -> transfer.Frame | None:
            frame = await super().read()
            if frame is None:
                raise NodeLost("connection reset")
            return frame

    for said, code in (([], NOT_BEGUN), ([welcome()], "node_lost")):
        with pytest.raises(NodeLost) as lost:
            await Landing().pull_from(Breaking(said))
        assert lost.value.code == code


async def test_an_end_before_the_commit_is_incomplete() -> None:
    frames, commit = blocks()
    for said in ([], [welcome()], [welcome(), say(FirstToken(7)), *frames]):
        error = await refusal(*said)
        assert isinstance(error, TransferFailed) and error.code == "incomplete"


async def test_a_commit_without_a_first_token_is_incomplete() -> None:
    frames, commit = blocks()
    assert (await refusal(welcome(), *frames, commit)).code == "incomplete"


async def test_a_commit_of_fewer_blocks_than_wanted_is_refused() -> None:
    frames, commit = blocks({1: BLOCKS[1]})
    assert (await refusal(welcome(), say(FirstToken(7)), *frames, commit)).code == "incomplete"


async def test_a_position_that_was_not_asked_for_is_refused() -> None:
    frames, commit = blocks(BLOCKS | {3: BLOCKS[1]})
    assert (await refusal(welcome(), say(FirstToken(7)), *frames, commit)).code == "wrong_position"


async def test_a_flipped_bit_is_refused() -> None:
    [frame], commit = blocks()
    flipped = frame[:-1] + bytes([frame[-1] ^ 1])
    assert (await refusal(welcome(), say(FirstToken(7)), flipped, commit)).code == "wrong_digest"


async def test_garbage_is_refused_as_a_typed_error() -> None:
    await refusal(b"garbage")
    await refusal(welcome(), transfer.encode_message(b"\xff garbage"))
    await refusal(transfer.encode_message(wire.encode(Welcome(b"\xff\xff"))))
    await refusal(welcome(), welcome())
