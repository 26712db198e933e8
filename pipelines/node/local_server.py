"""Streams for nodes on this host: the frames of the gRPC streams, blocks named in shared memory in the stead of bytes.

    asker -> holder    `Open`; an empty message for each frame of shared blocks that it has taken
    holder -> asker    frames; with the first of shared blocks, to an asker that has not mapped the memory yet, a
                       descriptor of it that can only be read; an empty message ends a stream without a commit

Knows who may connect, and when a frame has been taken; what a stream is about, and who may ask, is the node's to say,
which checks the asker's hello before it shares a block. Invariants: the holder goes on to its end only when every
shared frame was taken, so that its lease covers all reading; an asker that has gone ends its stream; nothing outlives
`stop`, nor, killed, the process.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Sequence
from functools import partial
from typing import Final

import msgspec

from kvcache import transfer
from kvcache.memory import BlockMemory
from pipelines.node import local_connection
from pipelines.node.local_connection import LocalConnection
from pipelines.node.stream_service import READER_TIMEOUT_S, StreamMethod, hand_over
from pronghorn.counters import Counters
from pronghorn.errors import PronghornError, TransferFailed
from pronghorn.ids import Incarnation
from pronghorn.tasks import Owner

log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 512
WINDOW_FRAMES: Final = 8
"""Shared frames that wait to be taken: the asker's threads copy several at once, and are not to wait for the next."""
TAKEN: Final = b""
END: Final = b""


class Open(msgspec.Struct, frozen=True, array_like=True):
    method: str
    request: bytes
    mapped: bool
    """The asker has the holder's memory already."""


class LocalServer:
    def __init__(
        self,
        incarnation: Incarnation,
        methods: Sequence[StreamMethod],
        memory: BlockMemory,
        counters: Counters,
        reader_timeout_s: float = READER_TIMEOUT_S,
        digest_of: transfer.Digest = transfer.block_digest,
    ) -> None:
        self._methods = {method.name: method for method in methods}
        self._memory = memory
        self._counters = counters
        encode = partial(transfer.encode_shared, place=memory.place, digest_of=digest_of)
        self._carriage = transfer.Carriage(encode, transfer.SHARED_FRAME_BYTES)
        self._reader_timeout_s = reader_timeout_s
        self._owner = Owner(f"local-{incarnation[:8]}")
        self._connections: dict[LocalConnection, None] = {}
        self._listener = local_connection.listen(incarnation)
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    async def stop(self) -> None:
        """End every stream. Idempotent."""
        if self._listener.fileno() < 0:
            return
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        await self._owner.stop(1.0)

    def _accept(self) -> None:
        try:
            connected, _ = self._listener.accept()
        except OSError as error:  # it has gone again, or there are no descriptors left
            log.debug("a local connection was not accepted: %s", error)
            return
        connected.setblocking(False)
        if not local_connection.is_ours(connected) or len(self._connections) >= MAX_CONNECTIONS:
            self._counters.count("local_refused", "uid" if len(self._connections) < MAX_CONNECTIONS else "full")
            connected.close()
            return
        _Served(self, connected)


class _Served:
    """One connection: its streams, one after another."""

    def __init__(self, server: LocalServer, connected: socket.socket) -> None:
        self._server = server
        self._connection = LocalConnection(connected, self._gone)
        self._untaken = 0
        server._connections[self._connection] = None
        self._task = server._owner.start(self._serve(), "connection")

    def _gone(self) -> None:
        self._task.cancel()

    async def _serve(self) -> None:
        try:
            while True:
                opened = msgspec.msgpack.decode(await self._connection.receive(), type=Open)
                if not await self._stream(opened):
                    return
        except (PronghornError, msgspec.MsgspecError, TimeoutError) as error:
            log.debug("a local connection ends: %s", error)
        finally:
            self._connection.close()
            del self._server._connections[self._connection]

    async def _stream(self, opened: Open) -> bool:
        """Serve one stream; whether the connection is good for another."""
        method = self._server._methods.get(opened.method)
        if method is None:
            return False
        mapping = _Mapping(opened.mapped)
        async with asyncio.timeout(method.limit_s):
            frames = method.frames(opened.request, carriage=self._server._carriage)
            whole = await hand_over(frames, partial(self._write, mapping), self._server._reader_timeout_s)
            if whole and not mapping.committed:
                await self._all_taken()
                await self._connection.send(END)
        return whole

    async def _write(self, mapping: "_Mapping", frame: bytes) -> None:
        if not transfer.is_shared(frame):
            await self._all_taken()
            await self._connection.send(frame)
            mapping.committed = transfer.is_commit(frame)
            return
        self._untaken += 1
        if mapping.given:
            await self._connection.send(frame)
        else:
            descriptor = self._server._memory.readable_fd()
            try:
                await self._connection.send(frame, [descriptor])
            finally:
                os.close(descriptor)
            mapping.given = True
        while self._untaken >= WINDOW_FRAMES:
            await self._taken()

    async def _all_taken(self) -> None:
        while self._untaken:
            await self._taken()

    async def _taken(self) -> None:
        if await self._connection.receive() != TAKEN:
            raise TransferFailed("a message came in the midst of a local stream", code="malformed")
        self._untaken -= 1


class _Mapping:
    """What one stream has given."""

    def __init__(self, given: bool) -> None:
        self.given = given
        self.committed = False
