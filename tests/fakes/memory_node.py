"""A node without a socket or an engine, for tests of whoever talks to nodes.

A test plays the node: it reads what was submitted and says what comes back. `MemoryConnector` hands out clients for the
nodes that it was given, as a real connector does for addresses.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Literal

from kvcache.registry import NodeRecord
from pipelines.types.frames import (
    Abort,
    Delta,
    DropPrefixCache,
    Failure,
    Heartbeat,
    NodeFrame,
    NodeReport,
    OrchestratorFrame,
    Outputs,
    Submit,
)
from pipelines.types.status import GenerationStatus
from pronghorn.errors import NodeLost, Overloaded, PronghornError
from pronghorn.ids import Fence, Incarnation, NodeName

MODEL = "tiny"

Answer = Callable[[Submit], Sequence[Sequence[int]]]
"""What a node says to a request without being told: groups of tokens, one Delta each, the last one done."""


def record(
    name: str,
    role: Literal["prefill", "decode"] = "decode",
    incarnation: str | None = None,
    address: str | None = None,
    model: str = MODEL,
    registered_at_unix_s: float = 1.0,
) -> NodeRecord:
    return NodeRecord(
        name=NodeName(name),
        role=role,
        model=model,
        address=address or f"127.0.0.1:{1000 + sum(name.encode())}",
        incarnation=Incarnation(incarnation or f"{name}-1"),
        layout={},
        seed_digest="seed",
        load={},
        host="here",
        pid=1,
        registered_at_unix_s=registered_at_unix_s,
    )


def report(
    of: NodeRecord,
    *,
    healthy: bool = True,
    draining: bool = False,
    in_flight: int = 0,
    local_prefill_room_tokens: int | None = None,
) -> NodeReport:
    return NodeReport(
        name=of.name,
        role=of.role,
        model=of.model,
        address=of.address,
        incarnation=of.incarnation,
        healthy=healthy,
        draining=draining,
        in_flight=in_flight,
        total_blocks=64,
        free_blocks=64,
        held_blocks=0,
        cached_blocks=0,
        waiting=0,
        running=in_flight,
        awaiting_blocks=0,
        local_prefill_room_tokens=local_prefill_room_tokens,
    )


class MemoryNode:
    """One life of a node. Sends a heartbeat when a session opens, and what the test says after that."""

    def __init__(self, record: NodeRecord, answer: Answer | None = None, send_queue_frames: int = 1024) -> None:
        self.record = record
        self.answer = answer
        self.send_queue_frames = send_queue_frames
        self.reading = True
        """False: what is sent stays in the client's queue, as with a node that does not read."""
        self.refuses: PronghornError | None = None
        """What connecting raises."""
        self.received: list[OrchestratorFrame] = []
        self.sessions = 0
        self.tries = 0
        self._client: MemoryNodeClient | None = None
        self._arrived = asyncio.Event()

    @property
    def submits(self) -> list[Submit]:
        return [frame for frame in self.received if isinstance(frame, Submit)]

    @property
    def aborts(self) -> list[Fence]:
        return [frame.fence for frame in self.received if isinstance(frame, Abort)]

    @property
    def dropped_caches(self) -> int:
        return sum(isinstance(frame, DropPrefixCache) for frame in self.received)

    async def submitted(self, count: int = 1) -> Submit:
        """Wait until `count` requests have come in all, and return the last of these."""
        while len(self.submits) < count:
            self._arrived.clear()
            await self._arrived.wait()
        return self.submits[count - 1]

    # --- what the node says ---

    def say(self, frame: NodeFrame) -> None:
        assert self._client is not None, f"{self.record.name} has no session to speak on"
        self._client.inbox.put_nowait(frame)

    def produce(
        self, fence: Fence, *tokens: int, status: GenerationStatus = GenerationStatus.ACTIVE, cached: int | None = None
    ) -> None:
        self.say(Outputs([Delta(fence, list(tokens), status, cached)]))

    def fail(self, fence: Fence, error: PronghornError) -> None:
        self.say(Outputs([], [Failure(fence, error.record())]))

    def beat(self, **says: Any) -> None:
        self.say(Heartbeat(report(self.record, **says)))

    def lose(self, reason: str = "the wire was cut") -> None:
        """Break the session. The client may connect again, unless `refuses` says otherwise."""
        assert self._client is not None
        self._client.inbox.put_nowait(NodeLost(reason))
        self._client = None

    # --- what its client calls ---

    def _open(self, client: "MemoryNodeClient") -> None:
        self._client = client
        self.sessions += 1
        self.beat()

    def _receive(self, client: "MemoryNodeClient", frame: OrchestratorFrame) -> None:
        if client is not self._client:
            return  # the session is broken, which the client has not noticed yet: the frame is lost
        self.received.append(frame)
        self._arrived.set()
        if isinstance(frame, Submit) and self.answer is not None:
            groups = self.answer(frame)
            for group in groups[:-1]:
                self.produce(frame.fence, *group)
            self.produce(frame.fence, *groups[-1], status=GenerationStatus.END_OF_SEQUENCE)


class MemoryNodeClient:
    """`orchestrator.ports.NodeClient` to a MemoryNode."""

    def __init__(self, node: MemoryNode) -> None:
        self._node = node
        self._up = False
        self._unread = 0
        self.inbox: asyncio.Queue[NodeFrame | NodeLost] = asyncio.Queue()

    async def connect(self) -> None:
        self._node.tries += 1
        if self._node.refuses is not None:
            raise self._node.refuses
        self._up = True
        self._node._open(self)

    def send(self, frame: OrchestratorFrame) -> None:
        if not self._up:
            raise NodeLost("the session is not up")
        if self._node.reading:
            self._node._receive(self, frame)
        elif self._unread < self._node.send_queue_frames or isinstance(frame, Abort):
            self._unread += 1
        else:
            raise Overloaded(f"{self._unread} frames wait for {self._node.record.name}")

    async def frames(self) -> AsyncGenerator[NodeFrame, None]:
        while True:
            if not self._up:
                raise NodeLost("the session is not up")
            frame = await self.inbox.get()
            if isinstance(frame, NodeLost):
                self._up = False
                raise frame
            yield frame

    async def close(self) -> None:
        self._up = False
        self.inbox.put_nowait(NodeLost("the session was closed"))


class MemoryConnector:
    """`orchestrator.ports.NodeConnector` over the nodes that were added to it."""

    def __init__(self, *nodes: MemoryNode) -> None:
        self._nodes = {node.record.incarnation: node for node in nodes}

    def add(self, node: MemoryNode) -> None:
        self._nodes[node.record.incarnation] = node

    def client(self, record: NodeRecord) -> MemoryNodeClient:
        return MemoryNodeClient(self._nodes[record.incarnation])
