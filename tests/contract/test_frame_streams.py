"""Every way of carrying a stream of frames from one node to another keeps the same promises."""

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from kvcache import transfer
from kvcache.memory import BlockMemory
from kvcache.transfer import BlockReceiver, BlocksFrame, Carriage, CommitFrame, MessageFrame
from pipelines.node.local_client import LocalStreamClient
from pipelines.node.local_connection import SUPPORTED
from pipelines.node.local_server import LocalServer
from pipelines.node.session_service import grpc_server
from pipelines.node.stream_client import StreamClient
from pipelines.node.stream_port import FrameStream
from pipelines.node.stream_service import StreamMethod
from pipelines.types.frames import PrefillTarget
from pronghorn.clock import SystemClock
from pronghorn.counters import Counters
from pronghorn.credentials import Credentials
from pronghorn.errors import DeadlineExceeded, NodeLost, PronghornError, TransferFailed
from pronghorn.ids import NodeName, new_incarnation
from pronghorn.wire import FETCH_METHOD
from tests.fakes.certificates import Authority

NUM_BLOCKS, BLOCK_BYTES = 240, 96 << 10
"""Several frames, whatever carries them."""
PATIENCE_S = 60.0


class Holder:
    """Streams the blocks of a memory, however the test has it told."""

    def __init__(self) -> None:
        self.memory = BlockMemory.create(NUM_BLOCKS, BLOCK_BYTES)
        for block in range(NUM_BLOCKS):
            self.memory.block(block)[:] = bytes([block, 7]) * (BLOCK_BYTES // 2)
        self.requests: list[bytes] = []
        self.ended = asyncio.Event()
        self.commits = True
        self.waits = False
        """For ever, before it commits."""
        self.tamper = bytes
        self.reached_commit = False

    async def frames(self, request: bytes, carriage: Carriage) -> AsyncGenerator[bytes, None]:
        self.requests.append(request)
        self.ended.clear()
        sent: dict[int, bytes] = {}
        try:
            yield transfer.encode_message(b"hello")
            step = carriage.blocks_per_frame(BLOCK_BYTES)
            for first in range(0, NUM_BLOCKS, step):
                blocks = range(first, min(first + step, NUM_BLOCKS))
                for frame in carriage.encode(((b, self.memory.block(b)) for b in blocks), sent):
                    yield self.tamper(frame)
            if self.waits:
                await asyncio.Event().wait()
            self.reached_commit = True
            if self.commits:
                yield transfer.encode_commit(sent)
        finally:
            self.ended.set()


class Pair:
    """A holder that serves, and a client that reads from it by the transport under test."""

    def __init__(self, transport: str, stack: AsyncExitStack, folder: Path) -> None:
        self._credentials = Credentials(Authority("ours").issue(folder) if transport == "tls" else None)
        self.transport = transport
        self.holder = Holder()
        self.counters = Counters()
        self._stack = stack
        self._method = StreamMethod(FETCH_METHOD, self.holder.frames)
        self.incarnation = new_incarnation()
        self.local: LocalServer | None = None

    async def start(self) -> None:
        self.server = grpc_server()
        self.server.add_generic_rpc_handlers([self._method.handler()])
        port = self._credentials.add_port(self.server, "127.0.0.1:0")
        await self.server.start()
        self._stack.push_async_callback(self.server.stop, None)
        self.target = PrefillTarget(NodeName("holder"), f"127.0.0.1:{port}", self.incarnation)
        self.client: StreamClient | LocalStreamClient = StreamClient(
            FETCH_METHOD, SystemClock(), 60.0, credentials=self._credentials
        )
        if self.transport == "shared memory":
            self.local = LocalServer(self.incarnation, [self._method], self.holder.memory, Counters())
            self._stack.push_async_callback(self.local.stop)
            self.client = LocalStreamClient(FETCH_METHOD, self.client, SystemClock(), 60.0, self.counters)
        self._stack.push_async_callback(self.client.close)

    async def die(self) -> None:
        await self.server.stop(None)
        if self.local is not None:
            await self.local.stop()

    def stream(self, request: bytes = b"?", timeout_s: float = PATIENCE_S) -> Any:
        return self.client.stream(self.target, request, timeout_s)


@pytest.fixture(
    params=[
        "grpc",
        "tls",
        pytest.param("shared memory", marks=pytest.mark.skipif(not SUPPORTED, reason="there is none on this system")),
    ]
)
async def pair(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        pair = Pair(request.param, stack, tmp_path)
        await pair.start()
        async with asyncio.timeout(3 * PATIENCE_S):
            yield pair


class Landing:
    def __init__(self) -> None:
        self.memory = bytearray(NUM_BLOCKS * BLOCK_BYTES)
        view = memoryview(self.memory)
        blocks = {b: view[b * BLOCK_BYTES : (b + 1) * BLOCK_BYTES] for b in range(NUM_BLOCKS)}
        self.receiver = BlockReceiver(blocks)
        self.said: list[bytes] = []
        self.frames = 0
        self.named = 0
        """Pieces in those frames."""

    async def take(self, stream: FrameStream) -> bool:
        """One frame; False at the end."""
        match await stream.read():
            case MessageFrame(payload=payload):
                self.said.append(bytes(payload))
            case BlocksFrame() as blocks:
                self.frames += 1
                self.named += len(blocks.pieces)
                stream.take(blocks, self.receiver)
            case CommitFrame() as commit:
                self.receiver.commit(commit)
                return False
            case None:
                return False
        return True

    async def take_all(self, stream: FrameStream) -> None:
        while await self.take(stream):
            pass

    async def take_blocks(self, stream: FrameStream) -> None:
        """Until some have come."""
        while not (self.frames or self.receiver.committed):
            assert await self.take(stream)
        await self.have(1)

    async def have(self, blocks: int) -> None:
        """Until so many that were taken are here."""
        while self.receiver.received_bytes < blocks * BLOCK_BYTES:  # noqa: ASYNC110  # nobody announces it
            await asyncio.sleep(0.001)


@pytest.mark.conformance(42)
async def test_all_blocks_arrive_as_they_were(pair: Pair) -> None:
    for round_ in range(3):
        landing = Landing()
        async with pair.stream(b"ask %d" % round_) as stream:
            await landing.take_all(stream)
        assert landing.receiver.committed and landing.said == [b"hello"]
        assert landing.memory == b"".join(pair.holder.memory.block(b) for b in range(NUM_BLOCKS))
    assert pair.holder.requests == [b"ask 0", b"ask 1", b"ask 2"]
    if pair.transport == "shared memory":
        assert pair.counters.snapshot() == {"stream_opened.shared_memory": 3}


async def test_several_streams_run_at_once(pair: Pair) -> None:
    async def one(landing: Landing) -> None:
        async with pair.stream() as stream:
            await landing.take_all(stream)

    landings = [Landing() for _ in range(4)]
    await asyncio.gather(*map(one, landings))
    assert all(landing.receiver.committed for landing in landings)


async def test_a_large_request_arrives_whole(pair: Pair) -> None:
    request = bytes(range(256)) * (8 << 12)
    landing = Landing()
    async with pair.stream(request) as stream:
        await landing.take_all(stream)
    assert pair.holder.requests == [request] and landing.receiver.committed


async def test_a_stream_without_a_commit_ends_as_one(pair: Pair) -> None:
    pair.holder.commits = False
    for _ in range(2):
        landing = Landing()
        async with pair.stream() as stream:
            await landing.take_all(stream)
        assert not landing.receiver.committed and landing.receiver.leading == NUM_BLOCKS


@pytest.mark.conformance(43)
async def test_a_wrong_digest_is_seen_and_counts_for_nothing(pair: Pair) -> None:
    digest = transfer.block_digest(pair.holder.memory.block(3))
    pair.holder.tamper = lambda frame: bytes(frame).replace(digest, digest[:-1] + bytes([digest[-1] ^ 1]))
    landing = Landing()
    with pytest.raises(TransferFailed, check=lambda error: error.code == "wrong_digest"):
        async with pair.stream() as stream:
            await landing.take_all(stream)
    assert landing.receiver.leading == 3
    await pair.holder.ended.wait()


async def test_torn_frames_are_refused(pair: Pair) -> None:
    pair.holder.tamper = lambda frame: bytes(frame)[:-5]
    with pytest.raises(TransferFailed, check=lambda error: error.code == "bad_frame"):
        async with pair.stream() as stream:
            await Landing().take_all(stream)
    await pair.holder.ended.wait()


@pytest.mark.parametrize("after", ["nothing", "blocks", "all"])
async def test_leaving_ends_the_stream_on_the_other_side(pair: Pair, after: str) -> None:
    pair.holder.waits = True
    landing = Landing()
    async with pair.stream() as stream:
        assert await landing.take(stream)
        if after == "blocks":
            await landing.take_blocks(stream)
        if after == "all":
            while landing.named < NUM_BLOCKS:  # a piece each: none is larger than a frame
                assert await landing.take(stream)
            await landing.have(NUM_BLOCKS)
    await pair.holder.ended.wait()
    assert not pair.holder.reached_commit


async def test_being_cancelled_in_a_read_ends_the_stream_on_the_other_side(pair: Pair) -> None:
    pair.holder.waits = True
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3), pair.stream() as stream:
            await Landing().take_all(stream)
    await pair.holder.ended.wait()


async def test_a_holder_that_goes_breaks_its_streams(pair: Pair) -> None:
    pair.holder.waits = True
    landing = Landing()
    with pytest.raises(NodeLost):
        async with pair.stream() as stream:
            await landing.take_blocks(stream)
            await pair.die()
            await landing.take_all(stream)
    with pytest.raises(PronghornError):
        async with pair.stream(timeout_s=2.0) as stream:
            await landing.take_all(stream)


async def test_a_stream_has_its_time_and_no_more(pair: Pair) -> None:
    pair.holder.waits = True
    with pytest.raises(DeadlineExceeded):
        async with pair.stream(timeout_s=0.5) as stream:
            await Landing().take_all(stream)
    await pair.holder.ended.wait()


ONLY_SHARED = [
    pytest.mark.skipif(not SUPPORTED, reason="there is none on this system"),
    pytest.mark.parametrize("pair", ["shared memory"], indirect=True),
]


class HeldCopies:
    """Copies of blocks wait in their threads until the test lets them go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on = threading.Event()
        self.begun = 0
        self.ended = 0
        copy = transfer.Copying.copy

        def held(copying: transfer.Copying) -> None:
            self.begun += 1
            assert self.go_on.wait(PATIENCE_S)
            copy(copying)
            self.ended += 1

        monkeypatch.setattr(transfer.Copying, "copy", held)

    async def begins(self) -> None:
        while not self.begun:  # noqa: ASYNC110  # begun in a thread, which no event reaches
            await asyncio.sleep(0.001)


@pytest.fixture
def held_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldCopies]:
    held = HeldCopies(monkeypatch)
    yield held
    held.go_on.set()


class TestSharedMemory:
    """gRPC has copied what it sends; how much it takes ahead is its own."""

    pytestmark = ONLY_SHARED

    async def test_a_holder_does_not_end_before_its_blocks_were_taken(
        self, pair: Pair, held_copies: HeldCopies
    ) -> None:
        """Else it would give them up while they are read."""
        landing = Landing()
        async with pair.stream() as stream:
            taking = asyncio.ensure_future(landing.take_all(stream))
            await held_copies.begins()
            await asyncio.sleep(0.05)  # time in which it might go on
            assert not pair.holder.ended.is_set() and not taking.done(), "nor does the event loop wait"
            held_copies.go_on.set()
            await taking
        assert landing.receiver.committed and held_copies.ended == landing.frames > 1

    async def test_blocks_that_nobody_takes_are_given_up_with_the_next_read(self, pair: Pair) -> None:
        async with pair.stream() as stream:
            for _ in range(2):
                await stream.read()
            await asyncio.sleep(0.05)  # time in which it might go on
            assert not pair.holder.ended.is_set()
            while not isinstance(await stream.read(), CommitFrame):
                pass

    async def test_nothing_is_written_once_a_stream_was_left(self, pair: Pair, held_copies: HeldCopies) -> None:
        landing = Landing()
        async with pair.stream() as stream:
            while landing.frames < 3:
                await landing.take(stream)
            await held_copies.begins()
            threading.Timer(0.1, held_copies.go_on.set).start()
        begun, ended = held_copies.begun, held_copies.ended
        assert begun == ended < landing.frames, "those that had not begun never do"
        assert landing.receiver.leading >= NUM_BLOCKS // 4 and not landing.receiver.committed
        there = bytes(landing.memory)
        await pair.holder.ended.wait()
        await asyncio.sleep(0.05)
        assert bytes(landing.memory) == there and held_copies.begun == begun
        async with pair.stream() as stream:
            await Landing().take_all(stream)

    async def test_a_commit_that_does_not_wait_for_its_blocks_is_refused(
        self, pair: Pair, held_copies: HeldCopies, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def at_once(self: object) -> None:
            pass

        monkeypatch.setattr("pipelines.node.local_server._Served._all_taken", at_once)
        landing = Landing()
        with pytest.raises(TransferFailed, check=lambda error: error.code == "malformed"):
            async with pair.stream() as stream:
                threading.Timer(0.2, held_copies.go_on.set).start()
                await landing.take_all(stream)
        assert not landing.receiver.committed
