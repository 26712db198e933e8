"""An orchestrator's core over in-memory nodes and an in-memory registry: no sockets, no engine, one process."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np

from kvcache.memory_registry import MemoryRegistry
from orchestrator.config import OrchestratorConfig
from orchestrator.nodes import NodeView
from orchestrator.ports import GenerationJob
from orchestrator.replica import Replica
from pipelines.types.frames import Submit
from pipelines.types.text_context import TextContext
from pipelines.types.token_buffer import TokenBuffer
from pronghorn.clock import Clock, SystemClock
from pronghorn.deadline import Deadline
from pronghorn.ids import NodeName, RequestID
from pronghorn.tasks import Owner
from tests.fakes.memory_node import MODEL, Answer, MemoryConnector, MemoryNode, record

LEASE_S = 3600.0


def config(**changes: object) -> OrchestratorConfig:
    values: dict[str, object] = {
        "redis_url": "memory:",
        "key_prefix": "test",
        "model_name": MODEL,
        "model_path": "/nowhere",
        "max_length": 64,
        "reconnect_min_s": 0.001,
        "reconnect_max_s": 0.01,
        "relist_period_s": 0.02,
        "heartbeat_timeout_s": 30.0,  # nodes in memory beat once, and when a test says so
        "silence_timeout_s": 30.0,
        "reconnect_wait_s": 0.1,
        **changes,
    }
    return OrchestratorConfig(**values)  # type: ignore[arg-type]  # the changes are the tests' own


class Cluster:
    """`replica` and the nodes that it can reach. Nodes join by `join` and leave by `leave`."""

    def __init__(self, clock: Clock | None = None, **changes: object) -> None:
        self.clock = clock or SystemClock()
        self.registry = MemoryRegistry(self.clock)
        self.connector = MemoryConnector()
        self.nodes: dict[str, MemoryNode] = {}
        self.replica = Replica(config(**changes), self.registry, self.connector, self.clock)

    def __getitem__(self, name: str) -> MemoryNode:
        return self.nodes[name]

    async def join(self, name: str, answer: Answer | None = None, **changes: object) -> MemoryNode:
        """Register a node, `role-number`, and wait until it is usable."""
        role = name.split("-")[0]
        node = MemoryNode(record(name, role, **changes), answer)  # type: ignore[arg-type]  # the tests' own
        self.nodes[name] = node
        self.connector.add(node)
        await self.registry.register(node.record, LEASE_S)
        await self.until(lambda: self.usable(name))
        return node

    async def leave(self, name: str) -> None:
        await self.registry.deregister(NodeName(name), self.nodes[name].record.incarnation)

    async def until(self, what: Callable[[], bool], within_s: float = 60.0) -> None:
        """Let the tasks run until `what` holds: for effects that nobody announces."""
        async with asyncio.timeout(within_s):
            while not what():  # noqa: ASYNC110  (there is no event to wait for)
                await asyncio.sleep(0.001)

    async def stop(self) -> None:
        """Stop, and see that nothing is left."""
        await self.replica.stop()
        assert self.replica.failure() is None
        assert self.replica.in_flight() == 0
        assert self.replica.membership.running == []
        self.replica.dispatcher.check()

    async def tokens_of(self, job: GenerationJob) -> list[int]:
        async with self.replica.generate(job) as outputs:
            return [token async for output in outputs for token in output.tokens]

    async def first_token(
        self, node: MemoryNode, job: GenerationJob, client: Owner
    ) -> tuple[asyncio.Task[list[int]], Submit]:
        """A request of `client` whose first token, 7, has been delivered from `node`."""
        arrived = asyncio.Event()

        async def request() -> list[int]:
            tokens: list[int] = []
            async with self.replica.generate(job) as outputs:
                async for output in outputs:
                    tokens += output.tokens
                    arrived.set()
            return tokens

        task = client.start(request(), "request")
        submit = await node.submitted(len(node.submits) + 1)
        node.produce(submit.fence, 7)
        await arrived.wait()
        return task, submit

    def assert_at_rest(self) -> None:
        self.replica.dispatcher.check()
        assert self.replica.in_flight() == 0
        assert all(node.in_flight == 0 for node in self.views())

    def usable(self, name: str) -> bool:
        incarnation = self.nodes[name].record.incarnation
        return any(node.incarnation == incarnation and node.healthy for node in self.replica.nodes())

    def views(self) -> list[NodeView]:
        return self.replica.views()

    def why_not(self, name: str) -> str | None:
        (node,) = [view for view in self.views() if view.name == name]
        return node.unusable

    def room(self, name: str) -> int | None:
        (node,) = [view for view in self.views() if view.name == name]
        return node.local_prefill_room_tokens

    def job(
        self,
        prompt_tokens: int = 4,
        budget_s: float = 30.0,
        target_endpoint: str | None = None,
        hint: dict[str, object] | None = None,
        request_id: RequestID | None = None,
        key: str | None = None,
    ) -> GenerationJob:
        context = TextContext(
            request_id=request_id or RequestID(),
            max_length=64,
            tokens=TokenBuffer(np.arange(1, prompt_tokens + 1, dtype=np.int64)),
        )
        return GenerationJob(context, Deadline.after(self.clock.now_s(), budget_s), MODEL, target_endpoint, hint, key)


@asynccontextmanager
async def running(clock: Clock | None = None, **changes: object) -> AsyncIterator[Cluster]:
    cluster = Cluster(clock, **changes)
    cluster.replica.start()
    try:
        yield cluster
    finally:
        await cluster.stop()
