"""The network between simulated processes: delays, slow and cut links, connections that break, damaged frames.

Knows streams and what passes on them, by its outside; takes no part in what they mean. As TCP under gRPC does: within
one stream nothing is lost, doubled or reordered unless the stream breaks; a broken process is noticed at once, a silent
one (paused, or behind a cut link in either direction) by keepalive, on both sides, within `KEEPALIVE_S`.

Two things it does beyond TCP, for the sake of what must hold anyway: it damages block frames, and it lets outputs that
were on their way when a session broke, and the last before them once more, come out of the next session with the same
life of the node.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from cluster.simulator.process import SimProcess
from cluster.simulator.stream import End, Item, Open, Pipe, Status, Stream
from pronghorn.wire import FETCH_METHOD, PREFILL_METHOD, SESSION_METHOD

KEEPALIVE_S = (1.5, 2.1)
"""Between which a silent peer is noticed: `pronghorn.wire`'s period and timeout."""
HOST_SEPARATOR = "/"


@dataclass
class Link:
    """One direction between two hosts."""

    delay_s: float
    jitter_s: float
    bytes_per_s: float
    blocked: int = 0
    """How many cuts hold it now."""
    cuts: int = 0
    slowed: float = 1.0
    busy_until_s: float = 0.0


@dataclass
class Moments:
    """What has passed, and who waits for the next of it."""

    counts: dict[str, int] = field(default_factory=dict)
    watchers: dict[str, list[Callable[[str, str], None]]] = field(default_factory=dict)

    def note(self, kind: str, source: str, target: str) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + 1
        for watcher in list(self.watchers.get(kind, ())):
            watcher(source, target)


class Network:
    def __init__(self, loop: asyncio.AbstractEventLoop, random: Random, link: Link, window_bytes: int) -> None:
        self.window_bytes = window_bytes
        self.moments = Moments()
        self.tampering: deque[str] = deque()
        """What is done to the next frames of blocks, one each: corrupt, duplicate, drop, cut."""
        self.late_frames = False
        self.tampered = 0
        self.late = 0
        self._loop = loop
        self._random = random
        self._default = link
        self._links: dict[tuple[str, str], Link] = {}
        self._streams: dict[Stream, None] = {}
        self._stragglers: dict[tuple[SimProcess, SimProcess], list[bytes]] = {}

    # --- streams ------------------------------------------------------------------------------------------------------

    def open(self, client: End, server: End, method: str, request: bytes | None) -> Stream:
        stream = Stream(client, server, self)
        stream.method = method
        self._streams[stream] = None
        client.outgoing.send(Open(method, request))
        stream.down.fetched = method == FETCH_METHOD
        if method in (PREFILL_METHOD, FETCH_METHOD):
            self.moments.note("ask" if method == PREFILL_METHOD else "fetch", client.host, server.host)
        if not self._reachable(stream):
            self._watch(stream)
        return stream

    def refuse(self, client: End) -> None:
        """Nobody listens there."""
        failure = Status("UNAVAILABLE", "connection refused")
        self._loop.call_later(self._default.delay_s * 2, client.end, failure, context=client.process.context())

    def opened(self, stream: Stream) -> None:
        """The server has taken the call: what was late from an earlier session comes after all."""
        if stream.method == SESSION_METHOD:
            for data in self._stragglers.pop((stream.server.process, stream.client.process), ()):
                delay_s = 0.005 + self._random.random() * 0.1
                self._loop.call_later(delay_s, self._straggle, stream, data)

    def _straggle(self, stream: Stream, data: bytes) -> None:
        if stream.server.status is None and stream.server.process.alive:
            self.late += 1
            stream.down.send(data)

    def between(self, a: str, b: str) -> list[Stream]:
        self._forget()
        return [s for s in self._streams if {s.client.host, s.server.host} == {a, b}]

    def of(self, process: SimProcess) -> list[Stream]:
        self._forget()
        return [s for s in self._streams if process in (s.client.process, s.server.process)]

    def open_streams(self, method: str) -> list[Stream]:
        self._forget()
        return [s for s in self._streams if s.method == method]

    def _forget(self) -> None:
        for stream in [s for s in self._streams if s.over]:
            del self._streams[stream]

    # --- Carrier ------------------------------------------------------------------------------------------------------

    def send(self, pipe: Pipe, item: Item) -> None:
        for piece in self._tampered(pipe, item):
            pipe.flying.append(piece)
            link = self._link(pipe.source.host, pipe.target.host)
            if link.blocked or pipe.unscheduled:
                pipe.unscheduled += 1
            else:
                self._schedule(pipe, link, piece)

    def _schedule(self, pipe: Pipe, link: Link, item: Item) -> None:
        size_bytes = len(item) if isinstance(item, bytes) else 64
        now_s = self._loop.time()
        sent_s = max(now_s, link.busy_until_s) + size_bytes * link.slowed / link.bytes_per_s
        link.busy_until_s = sent_s
        delay_s = link.delay_s + self._random.random() * link.jitter_s
        pipe.last_arrival_s = max(pipe.last_arrival_s, sent_s + delay_s)
        self._loop.call_at(pipe.last_arrival_s, pipe.arrive, context=pipe.target.process.context())

    def _tampered(self, pipe: Pipe, item: Item) -> list[Item]:
        if not isinstance(item, bytes):
            return [item]
        kind = kind_of(item)
        if pipe.fetched and kind is not None:
            kind = f"fetched_{kind}"
        if kind is not None:
            self.moments.note(kind, pipe.source.host, pipe.target.host)
        if kind not in ("blocks", "fetched_blocks") or not self.tampering:
            return [item]
        self.tampered += 1
        match self.tampering.popleft():
            case "corrupt":
                return [item[:-1] + bytes([item[-1] ^ 1])]
            case "duplicate":
                return [item, item]
            case "truncate":
                return [item[:-3]]
            case _:  # drop
                return []

    # --- faults -------------------------------------------------------------------------------------------------------

    def block(self, source: str, target: str) -> None:
        link = self._link(source, target)
        link.blocked += 1
        link.cuts += 1
        for stream in self.between(source, target):
            self._watch(stream)

    def unblock(self, source: str, target: str) -> None:
        link = self._link(source, target)
        link.blocked -= 1
        if link.blocked:
            return
        for stream in self.between(source, target):
            for pipe in (stream.up, stream.down):
                if (pipe.source.host, pipe.target.host) == (source, target):
                    held, pipe.unscheduled = pipe.unscheduled, 0
                    for item in list(pipe.flying)[len(pipe.flying) - held :]:
                        self._schedule(pipe, link, item)

    def slow(self, source: str, target: str, factor: float) -> None:
        self._link(source, target).slowed *= factor

    def died(self, process: SimProcess) -> None:
        """Its sockets are closed by its system; behind a cut link nobody hears of it."""
        for stream in self.of(process):
            if self._reachable(stream):
                self.cut(stream, "connection reset")
            else:
                self._watch(stream)

    def paused(self, process: SimProcess) -> None:
        for stream in self.of(process):
            self._watch(stream)

    def cut(self, stream: Stream, reason: str) -> None:
        """Both sides see it end, each in its own time."""
        if self.late_frames and stream.method == SESSION_METHOD and not stream.down.cut:
            flying = [i for i in stream.down.flying if isinstance(i, bytes) and kind_of(i) == "outputs"]
            if outputs := [*(i for i in stream.down.arrived if kind_of(i) == "outputs"), *flying]:
                key = (stream.server.process, stream.client.process)
                self._stragglers.setdefault(key, []).extend(outputs)
        stream.up.cut = stream.down.cut = True
        for end in (stream.client, stream.server):
            delay_s = self._random.random() * 0.02
            self._loop.call_later(delay_s, end.end, Status("UNAVAILABLE", reason), context=end.process.context())

    def _watch(self, stream: Stream) -> None:
        """Have keepalive notice, should the silence last."""
        signature = self._silence(stream)
        self._loop.call_later(self._random.uniform(*KEEPALIVE_S), self._keepalive, stream, signature)

    def _keepalive(self, stream: Stream, signature: tuple[int, ...]) -> None:
        if not self._reachable(stream) and self._silence(stream) == signature and not stream.up.cut:
            self.cut(stream, "keepalive: the peer does not answer")

    def _silence(self, stream: Stream) -> tuple[int, ...]:
        """Changes with every pause and every cut that the stream has suffered."""
        links = self._both(stream)
        return (*(link.cuts for link in links), stream.client.process.pauses, stream.server.process.pauses)

    def _reachable(self, stream: Stream) -> bool:
        whole = not any(link.blocked for link in self._both(stream))
        return whole and stream.client.process.running and stream.server.process.running

    def _both(self, stream: Stream) -> tuple[Link, Link]:
        client, server = stream.client.host, stream.server.host
        return self._link(client, server), self._link(server, client)

    def cut_off(self, source: str, target: str) -> bool:
        """Whether a message from one to the other goes nowhere now."""
        return self._link(source, target).blocked > 0

    def _link(self, source: str, target: str) -> Link:
        key = (source, target)
        link = self._links.get(key)
        if link is None:
            default = self._default
            link = self._links[key] = Link(default.delay_s, default.jitter_s, default.bytes_per_s)
        return link


_TAGS = ((b"Submit", "submit"), (b"Outputs", "outputs"), (b"Abort", "abort"))


def kind_of(data: bytes) -> str | None:
    """What passes, seen from outside: the tag of a session's frame, the kind of a hand-over's. None: no matter."""
    if data[:2] == b"PT":
        if data[3] == 2:
            return "blocks"
        if data[3] == 3:
            return "commit"
        return "first_token" if b"FirstToken" in data[4:32] else None
    head = data[:24]
    for tag, kind in _TAGS:
        if tag in head:
            return kind
    return None
