"""Node processes are killed, stopped and cut off under sixteen streams: every stream has exactly the tokens that it
would have had, and whatever still lives is at rest afterwards. Real processes and sockets, canaries for models.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import pytest

from cluster.chaos.cut_proxy import DOWN, UP, CutProxy, cut_proxy
from kvcache.memory_registry import MemoryRegistry
from orchestrator.node_client import GrpcConnector
from orchestrator.nodes import NodeView
from orchestrator.ports import GenerationJob
from orchestrator.replica import Replica
from pronghorn.clock import SystemClock
from pronghorn.deadline import Deadline
from pronghorn.ids import NodeName
from tests.fakes.canary_engine import SEED, canary_context
from tests.fakes.canary_pipeline import continuation
from tests.fakes.node_process import NodeProcess, node_process
from tests.fakes.orchestrator_cluster import config
from tests.integration.nodes.rig import MODEL, orchestrator_identity, prompt

STREAMS = 16
NEW_TOKENS = 40
PATIENCE_S = 30.0
ROUNDS = 40
ENGINE = {"model_path": "canary:?step_s=0.005", "num_blocks": 512, "max_batch_size": 16, "max_waiting": 64}
ROLES = {"prefill-0": "prefill", "prefill-1": "prefill", "decode-0": "decode", "decode-1": "decode"}


class Processes:
    def __init__(self) -> None:
        self.clock = SystemClock()
        self.nodes: dict[str, tuple[NodeProcess, CutProxy]] = {}
        registry = MemoryRegistry(self.clock, new_seed=lambda: SEED)
        self.registry = registry
        connector = GrpcConnector(orchestrator_identity(), connect_timeout_s=5.0, send_queue_frames=1024)
        self.replica = Replica(config(model_name=MODEL), registry, connector, self.clock)
        self.done = 0

    async def start(self, stack: AsyncExitStack) -> None:
        running = [node_process(role, name, **ENGINE) for name, role in ROLES.items()]  # type: ignore[arg-type]
        started = await asyncio.gather(*map(stack.enter_async_context, running))
        for node in started:
            proxy = await stack.enter_async_context(cut_proxy(node.record.address))
            self.nodes[node.record.name] = (node, proxy)
            await self.registry.register(msgspec.structs.replace(node.record, address=proxy.address), 3600.0)
        self.replica.start()
        stack.push_async_callback(self.replica.stop)
        await self.until(lambda: sum(view.unusable is None for view in self.replica.views()) == len(ROLES))

    async def until(self, what: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not what():  # noqa: ASYNC110  (told by other processes, in reports that nobody announces)
                await asyncio.sleep(0.01)

    def busiest(self, role: str) -> NodeView:
        return max((v for v in self.replica.views() if v.role == role), key=lambda view: (view.in_flight, view.name))

    async def streams(self, blocks: int, on_token: Callable[[int], None] = lambda count: None) -> None:
        """Sixteen at once, each told exactly what follows its prompt."""
        count = 0

        async def one(number: int) -> None:
            nonlocal count
            tokens = prompt(blocks, start=31 * number)
            context = canary_context(tokens, NEW_TOKENS)
            job = GenerationJob(context, Deadline.after(self.clock.now_s(), PATIENCE_S), MODEL)
            got: list[int] = []
            async with self.replica.generate(job) as outputs:
                async for output in outputs:
                    got += output.tokens
                    for _ in output.tokens:
                        count += 1
                        on_token(count)
            assert got == continuation(tokens, NEW_TOKENS), f"stream {number}"

        async with asyncio.TaskGroup() as tasks:
            for number in range(STREAMS):
                tasks.create_task(one(number))

    async def at_rest(self, without: set[str]) -> None:
        """What lives is usable again and holds nothing."""

        def rests() -> bool:
            reports = [report for report in self.replica.nodes() if report.name not in without]
            return len(reports) == len(ROLES) - len(without) and all(
                report.healthy and report.in_flight == report.held_blocks == report.running == report.waiting == 0
                for report in reports
            )

        await self.until(rests)
        assert self.replica.in_flight() == 0
        self.replica.dispatcher.check()


@asynccontextmanager
async def processes() -> AsyncIterator[Processes]:
    async with AsyncExitStack() as stack:
        running = Processes()
        await running.start(stack)
        yield running
    assert running.replica.failure() is None


Fault = Callable[[NodeProcess, CutProxy], None]
FAULTS: dict[str, Fault] = {
    "killed": lambda node, _: node.kill(),
    "stopped": lambda node, _: node.pause(),
    "cut off": lambda _, proxy: proxy.hold(),
    "in a black hole": lambda _, proxy: proxy.drop(),
    "reset": lambda _, proxy: proxy.reset(),
}
chaos = pytest.mark.chaos
ALIKE = ("in a black hole", "reset")
"""To a stream these are like being cut off and killed."""
faults = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=chaos) if name in ALIKE else name for name in FAULTS]
)


async def undo(cluster: Processes, name: str, fault: str) -> None:
    """What stopped goes on, late tokens and all; nothing of it is heard."""
    node, proxy = cluster.nodes[name]
    if fault != "killed":
        node.resume()
        proxy.heal()
    await cluster.at_rest({name} if fault == "killed" else set())


@pytest.mark.field("sglang#35189")
async def test_under_steady_load_no_process_dies_and_no_token_is_wrong() -> None:
    """sglang#35189: a node crashed nine times in two days under nothing but steady load."""
    async with processes() as cluster:
        for round_ in range(ROUNDS):
            await cluster.streams(1 + round_ % 6)
        assert [node.process.returncode for node, _ in cluster.nodes.values()] == [None] * len(ROLES)
        reports = cluster.replica.nodes()
        assert {report.incarnation for report in reports} == {n.record.incarnation for n, _ in cluster.nodes.values()}
        assert sum(report.counters.get("engine_died", 0) for report in reports) == 0
        await cluster.at_rest(set())


@pytest.mark.cells("F1 P10", "F2 P10")
@pytest.mark.field("dynamo#13095", "vllm#38027")
@faults
@pytest.mark.parametrize(
    "at",
    [
        pytest.param(1, marks=chaos),
        STREAMS * NEW_TOKENS // 2,
        pytest.param(STREAMS * NEW_TOKENS - 3, marks=chaos),
    ],
)
async def test_a_decode_node_that_fails_in_mid_stream_costs_no_token(name: str, at: int) -> None:
    async with processes() as cluster:
        failed: list[NodeName] = []

        def on_token(count: int) -> None:
            if count == at:
                failed.append(cluster.busiest("decode").name)
                FAULTS[name](*cluster.nodes[failed[0]])

        await cluster.streams(3, on_token)
        await undo(cluster, failed[0], name)


@pytest.mark.field("dynamo#13095")
@faults
@pytest.mark.parametrize(
    "way, after_bytes",
    [
        pytest.param(UP, 0, marks=chaos),
        pytest.param(UP, 3_000, marks=chaos),
        (DOWN, 3_000),
        pytest.param(DOWN, 20_000, marks=chaos),
    ],
)
async def test_a_prefill_node_that_fails_in_a_hand_over_costs_no_token(name: str, way: str, after_bytes: int) -> None:
    async with processes() as cluster:
        failing = cluster.busiest("prefill").name
        node, proxy = cluster.nodes[failing]
        proxy.after(after_bytes, way, lambda: FAULTS[name](node, proxy))
        await cluster.streams(40)
        await undo(cluster, failing, name)


@chaos
@pytest.mark.field("dynamo#13095")
@faults
async def test_a_prefill_node_that_fails_when_all_is_handed_over_costs_no_token(name: str) -> None:
    async with processes() as cluster:
        failing = cluster.busiest("prefill").name

        def on_token(count: int) -> None:
            if count == STREAMS * NEW_TOKENS // 2:
                FAULTS[name](*cluster.nodes[failing])

        await cluster.streams(3, on_token)
        await undo(cluster, failing, name)
