"""A decode node is killed, stopped or cut off in the middle of streams: they go on from another one, token for token.

Real processes and real gRPC; the engines are canaries, whose right answer is known. A block that is not what its prefix
makes shows at its first read.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import msgspec
import pytest

from cluster.chaos.cut_proxy import CutProxy, cut_proxy
from orchestrator.node_client import GrpcConnector
from orchestrator.ports import GenerationJob
from orchestrator.replica import Replica
from pronghorn.deadline import Deadline
from pronghorn.errors import PoisonRequest, RequestInProgress
from tests.fakes.canary_engine import canary_context
from tests.fakes.canary_pipeline import VOCAB_SIZE, continuation
from tests.fakes.node_process import NodeProcess, node_process
from tests.fakes.orchestrator_cluster import config
from tests.integration.nodes.rig import MODEL, Rig, at_rest, new_rig, orchestrator_identity, prompt
from tests.integration.orchestrator.test_real_nodes import answer, until_usable

LEASE_S = 3600.0
NEW_TOKENS = 60
STREAMS = 8
AT_TOKEN = 20
SLOW_CANARY = "canary:?step_s=0.01"


@dataclass
class DecodePair:
    rig: Rig
    replica: Replica
    nodes: dict[str, NodeProcess]
    proxies: dict[str, CutProxy]

    def job(self, tokens: list[int], choices: int = 1) -> GenerationJob:
        context = canary_context(tokens, NEW_TOKENS)
        context.num_choices = choices
        return GenerationJob(context, Deadline.after(self.rig.clock.now_s(), 60.0), MODEL)

    def at_rest(self) -> bool:
        """Whether no node that can be used holds anything, a node that went on again included."""
        return all(view.in_flight == 0 for view in self.replica.views() if view.unusable is None)

    def busiest(self) -> str:
        """The decode node that has most of the streams."""
        decode = [view for view in self.replica.views() if view.role == "decode"]
        return max(decode, key=lambda view: view.in_flight).name


@asynccontextmanager
async def decode_pair() -> AsyncIterator[DecodePair]:
    """One prefill node in this process, and two decode nodes in processes of their own, each behind a proxy."""
    async with new_rig() as rig, AsyncExitStack() as stack:
        prefill, _ = await rig.prefill(num_blocks=256)
        await prefill.shell.check_health()
        nodes: dict[str, NodeProcess] = {}
        proxies: dict[str, CutProxy] = {}
        for name in ("decode-0", "decode-1"):
            process = node_process("decode", name, model_path=SLOW_CANARY, num_blocks=256)
            node = nodes[name] = await stack.enter_async_context(process)
            proxy = proxies[name] = await stack.enter_async_context(cut_proxy(node.record.address))
            await rig.registry.register(msgspec.structs.replace(node.record, address=proxy.address), LEASE_S)
        timeouts = {"heartbeat_timeout_s": 1.0, "silence_timeout_s": 1.5}
        connector = GrpcConnector(orchestrator_identity(), connect_timeout_s=5.0, send_queue_frames=64)
        replica = Replica(config(model_name=MODEL, **timeouts), rig.registry, connector, rig.clock)
        replica.start()
        try:
            await until_usable(replica, 3)
            yield DecodePair(rig, replica, nodes, proxies)
            await at_rest(prefill)
        finally:
            await replica.stop()
            assert replica.failure() is None
            assert replica.in_flight() == 0


Fault = Callable[[NodeProcess, CutProxy], object]
FAULTS: dict[str, Fault] = {
    "killed": lambda node, proxy: node.kill(),
    "stopped": lambda node, proxy: node.pause(),
    "cut off": lambda node, proxy: proxy.hold(),
    "reset": lambda node, proxy: proxy.reset(),
}
HEALING: dict[str, Fault] = {
    "stopped": lambda node, proxy: node.resume(),
    "cut off": lambda node, proxy: proxy.heal(),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_streams_go_on_exactly_from_another_decode_node_when_theirs_is(fault: str) -> None:
    async with decode_pair() as pair:
        prompts = [prompt(2 + number % 3, start=100 * number) for number in range(STREAMS)]
        expected = [continuation(tokens, NEW_TOKENS) for tokens in prompts]
        got: list[list[int]] = [[] for _ in prompts]
        struck = asyncio.Event()

        async def stream(number: int) -> None:
            async with pair.replica.generate(pair.job(prompts[number])) as outputs:
                async for output in outputs:
                    got[number] += output.tokens
                    if len(got[number]) >= AT_TOKEN and not struck.is_set():
                        struck.set()
                        victim = pair.busiest()
                        FAULTS[fault](pair.nodes[victim], pair.proxies[victim])
                        victims.append(victim)

        victims: list[str] = []
        async with asyncio.timeout(60.0), asyncio.TaskGroup() as tasks:
            for number in range(STREAMS):
                tasks.create_task(stream(number))
        assert got == expected
        assert pair.replica.counters()["stream_migrated"] >= 1
        if heal := HEALING.get(fault):
            heal(pair.nodes[victims[0]], pair.proxies[victims[0]])
            await until_usable(pair.replica, 3)
            tokens = prompt(3, start=7)
            assert await answer(pair.replica, pair.job(tokens)) == continuation(tokens, NEW_TOKENS)
        await _until(pair.at_rest)


async def test_every_choice_of_a_request_goes_on_exactly() -> None:
    async with decode_pair() as pair:
        tokens = prompt(3)
        got: list[list[int]] = [[], [], []]
        struck = False
        async with asyncio.timeout(60.0), pair.replica.generate(pair.job(tokens, choices=3)) as outputs:
            async for output in outputs:
                got[output.choice] += output.tokens
                if len(got[2]) >= AT_TOKEN and not struck:
                    struck = True
                    pair.nodes[pair.busiest()].kill()
        first = continuation(tokens, 1)[0]
        for choice in range(3):
            of_choice = (first + choice) % VOCAB_SIZE
            assert got[choice] == [of_choice, *continuation([*tokens, of_choice], NEW_TOKENS - 1)]
        assert pair.replica.counters()["stream_migrated"] == 1


# --- poison, and the same request twice ---


POISON = 666
BREAKABLE = f"canary:?break_on={POISON}"


async def test_a_request_that_kills_engines_takes_two_and_no_more() -> None:
    """Three prefill and three decode nodes would have been tried, each by each."""
    async with new_rig() as rig:
        prefill = [await rig.prefill(f"prefill-{i}", model_path=BREAKABLE) for i in range(3)]
        decode = [await rig.decode(f"decode-{i}", model_path=BREAKABLE) for i in range(2)]
        nodes = [node for node, _ in [*prefill, *decode]]
        for node in nodes:
            await node.shell.check_health()
        connector = GrpcConnector(orchestrator_identity(), connect_timeout_s=5.0, send_queue_frames=64)
        replica = Replica(config(model_name=MODEL), rig.registry, connector, rig.clock)
        replica.start()
        try:
            await until_usable(replica, 5)
            with pytest.raises(PoisonRequest) as poison:
                await answer(replica, _job(rig, [1, 2, POISON, 3]))
            assert poison.value.code == "poison_request"
            died = [node.shell.name for node in nodes if node.counters.value("engine_died")]
            assert len(died) == 2
            tokens = prompt(3)
            assert await answer(replica, _job(rig, tokens)) == continuation(tokens, 6)
        finally:
            await replica.stop()


async def test_two_orchestrators_do_not_run_the_same_request_on_one_node() -> None:
    async with new_rig() as rig:
        decode, engine = await rig.decode()
        await decode.shell.check_health()
        replicas = []
        for name in ("orchestrator-1", "orchestrator-2"):
            identity = orchestrator_identity(name=name)
            connector = GrpcConnector(identity, connect_timeout_s=5.0, send_queue_frames=64)
            replicas.append(Replica(config(model_name=MODEL), rig.registry, connector, rig.clock))
            replicas[-1].start()
        try:
            for replica in replicas:
                await until_usable(replica, 1)
            tokens = prompt(3)
            engine.pipeline.gate.clear()
            first = asyncio.ensure_future(answer(replicas[0], _job(rig, tokens, key="mine")))
            await _until(lambda: decode.in_flight == 1)
            with pytest.raises(RequestInProgress, match="orchestrator-1"):
                await answer(replicas[1], _job(rig, tokens, key="mine"))
            engine.pipeline.gate.set()
            assert await first == continuation(tokens, 6)
            assert await answer(replicas[1], _job(rig, tokens, key="mine")) == continuation(tokens, 6)
            await at_rest(decode)
        finally:
            for replica in replicas:
                await replica.stop()


def _job(rig: Rig, tokens: list[int], key: str | None = None) -> GenerationJob:
    deadline = Deadline.after(rig.clock.now_s(), 30.0)
    return GenerationJob(canary_context(tokens, 6), deadline, MODEL, key=key)


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60.0):
        while not condition():  # noqa: ASYNC110  (nobody announces it)
            await asyncio.sleep(0.005)
