"""One stream between two processes: ordered messages both ways, flow control, an end.

Knows no method and no fault: the network says when a message arrives, and cuts. Invariants: what one side wrote is read
by the other in the same order, each once, or not at all after a cut; a side that is over stays over; every callback
runs as the process of the side that it concerns.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cluster.simulator.process import SimProcess


@dataclass(frozen=True)
class Status:
    """How a side ended. `code` is the name of a gRPC status."""

    code: str
    details: str = ""


OK = Status("OK")


@dataclass(frozen=True)
class Open:
    """The first message: the call itself."""

    method: str
    request: bytes | None


Item = bytes | Status | Open


LAST_ARRIVED = 3


class Carrier(Protocol):
    window_bytes: int

    def send(self, pipe: "Pipe", item: Item) -> None:
        """Have `pipe.arrive` called once for each item, in order, unless the stream is cut before."""


class Pipe:
    """One direction."""

    def __init__(self, source: "End", target: "End", carrier: Carrier) -> None:
        self.source = source
        self.target = target
        self.flying: deque[Item] = deque()
        self.unscheduled = 0
        """How many at the end of `flying` wait for the link to be whole again."""
        self.arrived: deque[bytes] = deque(maxlen=LAST_ARRIVED)
        """The last messages that have."""
        self.last_arrival_s = 0.0
        self.cut = False
        self.fetched = False
        """Whether it carries what was fetched, rather than handed over."""
        self.window_bytes = carrier.window_bytes
        self._carrier = carrier

    def send(self, item: Item) -> None:
        if not self.cut and self.source.process.alive:
            self._carrier.send(self, item)

    def arrive(self) -> None:
        if not self.cut:
            item = self.flying.popleft()
            if isinstance(item, bytes):
                self.arrived.append(item)
            self.target.receive(item)


class End:
    """One side of a stream."""

    def __init__(self, process: SimProcess, host: str) -> None:
        self.process = process
        self.host = host
        self.status: Status | None = None
        """How it ended; None while it is open."""
        self.on_open: Callable[[Open], None] | None = None
        self.on_over: Callable[[], None] | None = None
        self.outgoing: Pipe
        self.incoming: Pipe
        self._inbox: deque[bytes] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._unread_bytes = 0
        """Of what this side wrote, and the other has not read."""

    async def write(self, data: bytes) -> None:
        """Waits while the window is full."""
        while self._unread_bytes >= self.outgoing.window_bytes and self.status is None:
            self._writer = asyncio.get_running_loop().create_future()
            await self._writer
        if self.status is None:
            self._unread_bytes += len(data)
            self.outgoing.send(data)

    async def read(self) -> bytes | None:
        """The next message, those first that came before the end; None at the end, whatever it was."""
        while not self._inbox:
            if self.status is not None:
                return None
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        data = self._inbox.popleft()
        self.incoming.source._credit(len(data))
        return data

    def _credit(self, size_bytes: int) -> None:
        self._unread_bytes -= size_bytes
        _wake(self._writer)

    def receive(self, item: Item) -> None:
        """As this side's process."""
        if self.status is not None:
            return
        match item:
            case Open():
                assert self.on_open is not None
                self.on_open(item)
            case Status():
                self.end(item)
            case _:
                self._inbox.append(item)
                _wake(self._reader)

    def end(self, status: Status) -> None:
        """It is over on this side."""
        if self.status is None:
            self.status = status
            _wake(self._reader)
            _wake(self._writer)
            if self.on_over is not None:
                self.on_over()

    def cancel_reader(self) -> None:
        """As grpc does to the reader of a call that is cancelled."""
        self._inbox.clear()
        if self._reader is not None:
            self._reader.cancel()


class Stream:
    def __init__(self, client: End, server: End, carrier: Carrier) -> None:
        self.client = client
        self.server = server
        self.up = client.outgoing = server.incoming = Pipe(client, server, carrier)
        self.down = server.outgoing = client.incoming = Pipe(server, client, carrier)
        self.method = ""

    @property
    def over(self) -> bool:
        """Over on both sides, as far as these still live."""
        return all(end.status is not None or not end.process.alive for end in (self.client, self.server))


def _wake(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)
