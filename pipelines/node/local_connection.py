"""Messages, and descriptors beside them, over a Unix socket between two processes of one host.

Knows lengths, bounds and who is at the other end; not what a message says. Linux only: the names are abstract, so that
nothing is left in the file system, whoever was killed, and a process in another network namespace does not see them.
Invariants: what was received and not taken is bounded; the end of the other side is noticed while nobody reads.
"""

import asyncio
import contextlib
import os
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from pronghorn.errors import NodeLost
from pronghorn.ids import Incarnation

SUPPORTED: Final = sys.platform == "linux"
MAX_MESSAGE_BYTES: Final = 64 << 20
"""A prompt of a million tokens, with all that a context carries, is a tenth of it."""
_MAX_MESSAGES: Final = 64
_READ_BYTES: Final = 256 << 10
_LENGTH = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def listen(incarnation: Incarnation) -> socket.socket:
    """Raises OSError where the name is taken, or there are no such names here."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(_name(incarnation))
        listener.listen(64)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def connect(incarnation: Incarnation) -> socket.socket | None:
    """To that life of a node; None where it does not listen on this host, or has no time to."""
    if not SUPPORTED:
        return None
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connected.setblocking(False)
    try:
        connected.connect(_name(incarnation))
    except OSError:
        connected.close()
        return None
    return connected


def is_ours(connected: socket.socket) -> bool:
    """Whether the process at the other end, as the kernel tells, runs as this one's user."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    return bool(uid == os.geteuid())


def _name(incarnation: Incarnation) -> str:
    return f"\0pronghorn-node-{incarnation}"


class LocalConnection:
    """Made inside a running event loop; owns its socket and the descriptors that came and were not taken."""

    def __init__(self, connected: socket.socket, on_end: Callable[[], None]) -> None:
        """`on_end` is called once, when the other side has ended it; not after `close`."""
        self._socket = connected
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._messages: deque[bytes] = deque()
        self._descriptors: deque[int] = deque()
        self._news = asyncio.Event()
        self._reading = False
        self._sending: asyncio.Timeout | None = None
        """What ends the message that is being sent."""
        self.ended = False
        self._go_on()

    async def send(self, message: bytes, descriptors: Sequence[int] = ()) -> None:
        """`descriptors` stay the caller's. One message at a time. Raises NodeLost where the connection has ended, or
        ends meanwhile."""
        if self.ended:
            raise NodeLost("the local connection has ended")
        data = memoryview(_LENGTH.pack(len(message)) + message)
        try:
            if descriptors:  # with the first bytes, which a waiting socket always takes
                data = data[socket.send_fds(self._socket, [data], list(descriptors)) :]
            with contextlib.suppress(BlockingIOError):
                data = data[self._socket.send(data) :]
            if data:
                await self._send_all(data)
        except OSError as error:  # a TimeoutError is one too
            self._end()
            raise NodeLost(f"the local connection broke: {error}") from error

    def send_short(self, message: bytes) -> None:
        """A few bytes between messages, from outside a task. They always fit where the other side reads: where they
        do not, or the connection has ended, it ends."""
        data = _LENGTH.pack(len(message)) + message
        with contextlib.suppress(OSError):
            if not self.ended and self._socket.send(data) == len(data):
                return
        self._end()

    async def _send_all(self, data: memoryview) -> None:
        """Raises OSError, also where the connection is closed meanwhile."""
        try:
            async with asyncio.timeout(None) as self._sending:
                await self._loop.sock_sendall(self._socket, data)
        finally:
            self._sending = None

    async def receive(self) -> bytes:
        """The next message. Raises NodeLost where the connection has ended, and nothing is left to be taken."""
        while not self._messages:
            if self.ended:
                raise NodeLost("the local connection has ended")
            self._news.clear()
            await self._news.wait()
        message = self._messages.popleft()
        self._go_on()
        return message

    def take_descriptor(self) -> int | None:
        """The first that came and was not taken, now the caller's."""
        return self._descriptors.popleft() if self._descriptors else None

    def close(self) -> None:
        """Idempotent; the other side hears of it."""
        if self.ended:
            return
        self.ended = True
        self._pause()
        if self._sending is not None:
            # The loop must not wait for a number that the next socket gets, nor the sender for ever.
            self._loop.remove_writer(self._socket)
            self._sending.reschedule(self._loop.time())
        self._socket.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())
        self._news.set()

    def _go_on(self) -> None:
        if not self._reading and not self.ended and len(self._messages) < _MAX_MESSAGES:
            self._reading = True
            self._loop.add_reader(self._socket, self._read)

    def _pause(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._socket)

    def _read(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, _READ_BYTES, 4)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data, descriptors = b"", []
        self._descriptors.extend(descriptors)
        if not data:
            self._end()
            return
        self._buffer += data
        if not self._split():
            self._end()
        self._news.set()
        if len(self._messages) >= _MAX_MESSAGES:
            self._pause()

    def _split(self) -> bool:
        """Messages out of the buffer; False where one is too long."""
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > MAX_MESSAGE_BYTES:
                return False
            end = start + _LENGTH.size + length
            if end > len(self._buffer):
                break
            self._messages.append(bytes(self._buffer[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return True

    def _end(self) -> None:
        if not self.ended:
            self.close()
            self._on_end()
