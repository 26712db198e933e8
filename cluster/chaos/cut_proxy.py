"""A TCP proxy that stands before a node, and in which what passes is cut, held, corrupted, delayed or slowed.

`up` is from those who dial to the node, `down` is back. Faults act on connections that exist and on those that come.

- `hold`: nothing passes and nothing is lost, as on a link that is down for a while; `heal` lets it through, late.
- `drop`: bytes are read and thrown away, as behind a firewall that has forgotten the connection. A connection that
  has lost bytes can never be whole again: `heal` resets it.
- `reset`: every connection there is ends with an RST.
- `corrupt`: the byte at an offset from now on is flipped, once, on each way asked for.
- `delay`: each piece passes so much later.
- `slow`: no more than so many bytes a second pass on each connection.
- `after`: something is done at the moment when so many bytes have passed, before the next one does.

Each way counts the bytes that a fault has touched, which is the proof that it was one.
"""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from pronghorn.tasks import Owner

UP, DOWN = "up", "down"
BOTH = (UP, DOWN)
READ_BYTES = 65_536
STOP_GRACE_S = 10.0
ACCEPTED_PASSES = 8
"""Of the event loop, in fewer of which asyncio gives us what it had accepted."""
ABORTIVE_CLOSE = struct.pack("ii", 1, 0)


class Way:
    """One direction of the whole proxy."""

    def __init__(self) -> None:
        self.passing = asyncio.Event()
        self.passing.set()
        self.dropping = False
        self.delay_s = 0.0
        self.bytes_per_s: float | None = None
        self.corrupt_in: int | None = None
        """Bytes until the one that is flipped; None: none is."""
        self.dropped_bytes = 0
        self.held_bytes = 0
        self.slowed_bytes = 0
        self.flipped = 0
        self._waits: list[tuple[int, Callable[[], None]]] = []

    def after(self, count: int, what: Callable[[], None]) -> None:
        self._waits.append((count, what))

    def cut_at(self, size: int) -> int:
        """How much of a piece of `size` bytes passes before the next thing that is to be done."""
        return min([size, *(count for count, _ in self._waits)])

    def passed(self, size: int) -> None:
        due = [what for count, what in self._waits if count <= size]
        self._waits = [(count - size, what) for count, what in self._waits if count > size]
        for what in due:
            what()

    def spoil(self, data: bytes) -> bytes:
        if self.corrupt_in is None:
            return data
        if self.corrupt_in >= len(data):
            self.corrupt_in -= len(data)
            return data
        at, self.corrupt_in = self.corrupt_in, None
        self.flipped += 1
        return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]


class Connection:
    def __init__(self, near: asyncio.StreamWriter, far: asyncio.StreamWriter) -> None:
        self.torn = False
        """Bytes of it were thrown away."""
        self._writers = (near, far)

    def reset(self) -> None:
        for writer in self._writers:
            sock: socket.socket | None = writer.get_extra_info("socket")
            if sock is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORTIVE_CLOSE)
            writer.transport.abort()


class CutProxy:
    """Made by `cut_proxy`; only on its own event loop."""

    address: str

    def __init__(self, target_host: str, target_port: int) -> None:
        self._target = (target_host, target_port)
        self._connections: dict[Connection, None] = {}
        self._relays = Owner(f"proxy of {target_host}:{target_port}")
        self._server: asyncio.Server | None = None
        self._stopped = False
        self.ways = {UP: Way(), DOWN: Way()}

    @property
    def connections(self) -> int:
        return len(self._connections)

    def hold(self, *ways: str) -> None:
        for way in ways or BOTH:
            self.ways[way].passing.clear()

    def drop(self, *ways: str) -> None:
        for way in ways or BOTH:
            self.ways[way].dropping = True

    def delay(self, delay_s: float, *ways: str) -> None:
        for way in ways or BOTH:
            self.ways[way].delay_s = delay_s

    def slow(self, bytes_per_s: float, *ways: str) -> None:
        for way in ways or BOTH:
            self.ways[way].bytes_per_s = bytes_per_s

    def corrupt(self, offset: int, *ways: str) -> None:
        for way in ways or BOTH:
            self.ways[way].corrupt_in = offset

    def after(self, offset: int, way: str, what: Callable[[], None]) -> None:
        """Have `what` done once, when `offset` more bytes have passed that way."""
        self.ways[way].after(offset, what)

    def reset(self) -> None:
        for connection in list(self._connections):
            connection.reset()

    def heal(self) -> None:
        for way in self.ways.values():
            way.dropping, way.delay_s, way.bytes_per_s, way.corrupt_in = False, 0.0, None, None
            way.passing.set()
        for connection in list(self._connections):
            if connection.torn:
                connection.reset()

    def redirect(self, target: str) -> None:
        """Connections that come lead to `target` ("host:port") from now on; those that are there stay."""
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))

    # --- its own life ---

    async def start(self, host: str, port: int) -> None:
        """Raises OSError where the address is taken."""
        self._server = await asyncio.start_server(self._serve, host, port)
        self.address = "{}:{}".format(*self._server.sockets[0].getsockname()[:2])

    async def stop(self) -> None:
        self._stopped = True
        if self._server is not None:
            await self._accept_no_more(self._server)
            self._server.close()
        self.reset()
        await self._relays.stop(STOP_GRACE_S)

    @staticmethod
    async def _accept_no_more(server: asyncio.Server) -> None:
        """What asyncio has accepted becomes a transport some passes later, or never, and stays open, where its server
        was closed meanwhile."""
        for listening in server.sockets:
            asyncio.get_running_loop().remove_reader(listening.fileno())
        for _ in range(ACCEPTED_PASSES):
            await asyncio.sleep(0)

    def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._stopped:  # it was accepted in the server's last moment
            writer.transport.abort()
            return
        relay = self._relays.start(self._relay(reader, writer), "relay")
        relay.add_done_callback(lambda _: writer.close())  # one that is cancelled before its first step closes nothing

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()  # nobody listens there: whoever dialled hears it at once
            return
        if self._stopped:  # while it was dialled
            writer.transport.abort()
            far_writer.transport.abort()
            return
        connection = Connection(writer, far_writer)
        self._connections[connection] = None
        pumps = [
            self._relays.start(self._pump(connection, self.ways[UP], reader, far_writer), UP),
            self._relays.start(self._pump(connection, self.ways[DOWN], far_reader, writer), DOWN),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._connections[connection]
            for end in (writer, far_writer):  # before anything is waited for: the wait may be cancelled
                end.close()
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(
        self, connection: Connection, way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(READ_BYTES):
                while data:
                    size = way.cut_at(len(data))
                    await self._pass(connection, way, data[:size], writer)
                    way.passed(size)
                    data = data[size:]
            await way.passing.wait()  # the end of a connection travels on the link too

    async def _pass(self, connection: Connection, way: Way, data: bytes, writer: asyncio.StreamWriter) -> None:
        if not way.passing.is_set():
            way.held_bytes += len(data)
            await way.passing.wait()
        if way.dropping:
            way.dropped_bytes += len(data)
            connection.torn = True
            return
        if wait_s := way.delay_s + (len(data) / way.bytes_per_s if way.bytes_per_s else 0.0):
            way.slowed_bytes += len(data)
            await asyncio.sleep(wait_s)
        writer.write(way.spoil(data))
        await writer.drain()


@asynccontextmanager
async def cut_proxy(target: str, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[CutProxy]:
    """A proxy before `target` ("host:port"), on a port of its own where none is named."""
    target_host, _, target_port = target.rpartition(":")
    proxy = CutProxy(target_host, int(target_port))
    await proxy.start(host, port)
    try:
        yield proxy
    finally:
        await proxy.stop()
