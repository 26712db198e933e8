"""Streams from nodes on this host through shared memory, and from all others through another port.

Knows connections, mappings of other nodes' block memory, and when the short way is not to be had. A node is on this
host where its life answers on this host's own socket; nobody says so. Invariants: memory that belongs to another user
is never read; a mapping goes with the last connection to the life that it is of, so that a dead node's memory is free
at once; a life whose short way has broken is asked through the other port from then on. Blocks are copied in threads,
as many frames at once as the holder sends ahead: the event loop goes on meanwhile.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_threads
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import msgspec

from kvcache import transfer
from kvcache.memory import ForeignMemory
from pipelines.node import local_connection
from pipelines.node.local_connection import LocalConnection
from pipelines.node.local_server import END, TAKEN, Open
from pipelines.node.stream_port import FrameStream, StreamPort
from pipelines.types.frames import PrefillTarget
from pronghorn.clock import Clock
from pronghorn.counters import Counters
from pronghorn.errors import DeadlineExceeded, NodeLost, TransferFailed
from pronghorn.ids import Incarnation

COPY_THREADS: Final = 2
"""One core copies and digests at half of what the memory gives."""
MAX_REFUSED = 256
"""Lives that are remembered as not to be had by the short way; the oldest is forgotten first, and tried anew."""


class _Peer:
    """One life of one node on this host: its memory, and the connections to it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.memory: ForeignMemory | None = None
        self.idle: list[LocalConnection] = []
        self.users = 0
        self.used_at_s = 0.0

    def close(self) -> None:
        for connection in self.idle:
            connection.close()
        self.idle.clear()
        if self.memory is not None:
            self.memory.close()
            self.memory = None


class _LocalStream:
    def __init__(
        self,
        peer: _Peer,
        connection: LocalConnection,
        target: PrefillTarget,
        opened: Open,
        copiers: ThreadPoolExecutor,
    ) -> None:
        self._peer = peer
        self._connection = connection
        self._target = target
        self._copiers = copiers
        self._loop = asyncio.get_running_loop()
        self._to_send: bytes | None = msgspec.msgpack.encode(opened)
        self._untaken = False
        self._copies: dict[Future[None], Callable[[], object]] = {}
        """Under way, and what is to be done when each has ended."""
        self._failure: BaseException | None = None
        self.answered = False
        self.committed = False
        self.expires_at_s = 0.0

    async def read(self) -> transfer.Frame | None:
        try:
            async with asyncio.timeout_at(self.expires_at_s):
                return await self._next()
        except TimeoutError as error:
            raise DeadlineExceeded(f"the request's deadline passed in a stream from {self._target.name}") from error
        except NodeLost as error:
            raise NodeLost(f"{self._target.name} on this host: {error.message}") from error

    async def _next(self) -> transfer.Frame | None:
        if self._to_send is not None:
            await self._connection.send(self._to_send)
            self._to_send = None
        if self._untaken:
            self._untaken = False
            self._connection.send_short(TAKEN)
        data = await self._connection.receive()
        self.answered = True
        if self._failure is not None:
            raise self._failure
        if data == END:
            return None
        if transfer.is_shared(data):
            self._untaken = True
            return transfer.decode_shared(data, self._memory())
        if transfer.is_commit(data):
            if self._copies:
                raise TransferFailed("a commit came before its blocks were taken", code="malformed")
            self.committed = True
        return transfer.decode(data)

    def take(self, frame: transfer.BlocksFrame, receiver: transfer.BlockReceiver) -> None:
        copying = receiver.begin(frame)
        self._untaken = False
        copy = self._copiers.submit(copying.copy)
        self._copies[copy] = partial(receiver.settle, copying)
        copy.add_done_callback(lambda copy: self._loop.call_soon_threadsafe(self._copied, copy))

    def _copied(self, copy: Future[None]) -> None:
        settle = self._copies.pop(copy, None)
        if settle is not None:  # else the stream was left meanwhile
            self._settle(copy, settle)
            self._connection.send_short(TAKEN)  # of blocks that are wrong as well: the next read says so

    def _settle(self, copy: Future[None], settle: Callable[[], object]) -> None:
        failure = copy.exception()
        if failure is None:
            try:
                settle()
            except TransferFailed as refused:
                failure = refused
        self._failure = self._failure or failure

    def leave(self) -> None:
        """Nothing is written from now on. What has been copied counts."""
        copies, self._copies = self._copies, {}
        wait_for_threads([copy for copy in copies if not copy.cancel()])  # a frame each, which is a millisecond
        for copy, settle in copies.items():
            if not copy.cancelled():
                self._settle(copy, settle)

    def _memory(self) -> memoryview:
        descriptor = self._connection.take_descriptor()
        if descriptor is not None:
            try:
                mapped = ForeignMemory(descriptor)
            except (OSError, ValueError) as error:
                self.answered = False  # the other way may do
                raise NodeLost(f"its block memory cannot be mapped: {error}", code="shared_memory") from error
            if self._peer.memory is None:
                self._peer.memory = mapped
            else:  # two streams asked for it at once
                mapped.close()
        if self._peer.memory is None:
            raise NodeLost("it shares blocks and not its memory", code="shared_memory")
        return self._peer.memory.view


class LocalStreamClient:
    """`StreamPort`."""

    def __init__(self, method: str, remote: StreamPort, clock: Clock, idle_s: float, counters: Counters) -> None:
        self._method = method
        self._remote = remote
        self._clock = clock
        self._idle_s = idle_s
        self._counters = counters
        self._copiers = ThreadPoolExecutor(COPY_THREADS, "block-copy")
        self._peers: dict[Incarnation, _Peer] = {}
        self._refused: dict[Incarnation, None] = {}

    def channels(self) -> list[str]:
        return [*self._remote.channels(), *(f"{peer.address} (this host)" for peer in self._peers.values())]

    @property
    def mapped(self) -> int:
        """How many nodes' memory is mapped."""
        return sum(peer.memory is not None for peer in self._peers.values())

    @asynccontextmanager
    async def stream(self, target: PrefillTarget, request: bytes, timeout_s: float) -> AsyncIterator[FrameStream]:
        connection = self._connection(target.incarnation)
        if connection is None:
            self._counters.count("stream_opened", "grpc")
            async with self._remote.stream(target, request, timeout_s) as remote:
                yield remote
            return
        self._counters.count("stream_opened", "shared_memory")
        peer = self._peers.setdefault(target.incarnation, _Peer(target.address))
        peer.users += 1
        opened = Open(self._method, request, peer.memory is not None)
        stream = _LocalStream(peer, connection, target, opened, self._copiers)
        stream.expires_at_s = asyncio.get_running_loop().time() + timeout_s
        try:
            yield stream
        finally:
            stream.leave()
            peer.users -= 1
            peer.used_at_s = self._clock.now_s()
            if connection.ended and not stream.answered:
                self._refuse(target.incarnation, "broken")
            if stream.committed and not connection.ended and self._peers.get(target.incarnation) is peer:
                peer.idle.append(connection)
            else:
                connection.close()
            self._let_go(target.incarnation, peer)

    def _connection(self, incarnation: Incarnation) -> LocalConnection | None:
        peer = self._peers.get(incarnation)
        if peer is not None and peer.idle:
            return peer.idle.pop()
        if incarnation in self._refused or (connected := local_connection.connect(incarnation)) is None:
            return None
        if not local_connection.is_ours(connected):
            connected.close()
            self._refuse(incarnation, "uid")
            return None
        return LocalConnection(connected, lambda: self._ended(incarnation))

    def _refuse(self, incarnation: Incarnation, reason: str) -> None:
        self._counters.count("shared_memory_refused", reason)
        self._refused[incarnation] = None
        if len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]

    def _ended(self, incarnation: Incarnation) -> None:
        """The node has closed a connection: it has ended."""
        peer = self._peers.get(incarnation)
        if peer is not None:
            peer.idle = [connection for connection in peer.idle if not connection.ended]
            self._let_go(incarnation, peer)

    def _let_go(self, incarnation: Incarnation, peer: _Peer) -> None:
        if peer.users == 0 and not peer.idle:
            peer.close()
            if self._peers.get(incarnation) is peer:
                del self._peers[incarnation]

    async def close_idle(self) -> None:
        now_s = self._clock.now_s()
        for incarnation, peer in list(self._peers.items()):
            if peer.users == 0 and now_s - peer.used_at_s >= self._idle_s:
                peer.close()
                del self._peers[incarnation]
        await self._remote.close_idle()

    async def close(self) -> None:
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        self._copiers.shutdown()
        await self._remote.close()
