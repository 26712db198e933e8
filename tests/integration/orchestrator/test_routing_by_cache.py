"""Routing by what real nodes hold, over real gRPC: their events arrive, and the next request follows them."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import numpy as np
import pytest

from kvcache.registry import NodeRecord
from orchestrator.holdings import EXPECTS_S
from orchestrator.node_client import GrpcConnector
from orchestrator.ports import NodeClient, NodeConnector
from orchestrator.prompt_keys import PromptBlocks, PromptKeys
from orchestrator.replica import Replica
from pipelines.types.frames import BlockEvents, NodeFrame, OrchestratorFrame
from pronghorn.clock import Clock, ManualClock
from tests.fakes.canary_engine import SEED
from tests.fakes.canary_pipeline import block_bytes, continuation
from tests.fakes.orchestrator_cluster import config
from tests.integration.nodes.rig import MODEL, Rig, new_rig, orchestrator_identity, prompt
from tests.integration.orchestrator.test_real_nodes import NEW_TOKENS, answer, job, until_usable

DECODE_NODES = 3


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(60.0):
        while not what():  # noqa: ASYNC110  (nobody announces it)
            await asyncio.sleep(0.01)


class Deaf:
    """`NodeConnector` whose sessions lose every block event once `deaf` is set, and nothing else."""

    def __init__(self, honest: NodeConnector) -> None:
        self.honest = honest
        self.deaf = False

    def client(self, record: NodeRecord) -> NodeClient:
        return _DeafClient(self.honest.client(record), self)


class _DeafClient:
    def __init__(self, honest: NodeClient, of: Deaf) -> None:
        self._honest = honest
        self._of = of

    async def connect(self) -> None:
        await self._honest.connect()

    def send(self, frame: OrchestratorFrame) -> None:
        self._honest.send(frame)

    async def frames(self) -> AsyncGenerator[NodeFrame, None]:
        async with aclosing(self._honest.frames()) as frames:
            async for frame in frames:
                if not (self._of.deaf and isinstance(frame, BlockEvents)):
                    yield frame

    async def close(self) -> None:
        await self._honest.close()


def connector() -> GrpcConnector:
    return GrpcConnector(orchestrator_identity(), connect_timeout_s=5.0, send_queue_frames=1024)


async def replica_of(rig: Rig, over: NodeConnector | None = None, clock: Clock | None = None) -> Replica:
    settings = config(model_name=MODEL, max_length=256)
    replica = Replica(settings, rig.registry, over or connector(), clock or rig.clock, seed=SEED)
    replica.start()
    await until_usable(replica, DECODE_NODES)
    return replica


async def blocks_of(rig: Rig, tokens: list[int]) -> PromptBlocks:
    keys = PromptKeys("sha256", SEED, MODEL)
    keys.learn((await rig.registry.list())[0].layout)
    return keys.blocks(np.array(tokens, dtype=np.int64), None)


@pytest.mark.field("dynamo#1056", "aibrix#2287")
async def test_requests_follow_the_blocks_a_new_orchestrator_knows_them_at_once_and_a_reset_is_heard() -> None:
    async with new_rig() as rig:
        nodes = [(await rig.decode(f"decode-{i}"))[0] for i in range(DECODE_NODES)]
        for node in nodes:
            await node.shell.check_health()
        replica = await replica_of(rig)
        tokens = prompt(8)
        assert await answer(replica, job(rig, tokens)) == continuation(tokens, NEW_TOKENS)
        blocks = await blocks_of(rig, tokens)
        held = len(blocks.hashes)
        await until(lambda: any(held <= len(keys) for keys in replica.holdings.dump().values()))
        (holder,) = [life for life, keys in replica.holdings.dump().items() if keys]
        for _ in range(4):
            request = job(rig, tokens)
            assert await answer(replica, request) == continuation(tokens, NEW_TOKENS)
            record = replica.explain(str(request.context.request_id))
            assert record is not None and record.attempts[0].considered[0].reuse_tokens == record.reused_tokens
            assert request.context.external_block_metadata is not None
        assert [life for life, keys in replica.holdings.dump().items() if keys] == [holder]
        await replica.stop()

        again = await replica_of(rig)
        await until(lambda: again.holdings.find(blocks.keys).get(holder, 0) == held)
        await again.reset_prefix_cache()
        await until(lambda: not any(again.holdings.dump().values()))
        again.holdings.check()
        await again.stop()


async def test_a_record_counts_the_bytes_that_moved_and_not_those_that_were_to_move() -> None:
    async with new_rig() as rig:
        nodes = [(await rig.decode(f"decode-{i}"))[0] for i in range(DECODE_NODES - 1)]
        prefill, _ = await rig.prefill("prefill-1")
        for each in (*nodes, prefill):
            await each.shell.check_health()
        replica = await replica_of(rig)
        size_bytes = block_bytes(rig.node_config().engine.block_tokens)
        for tokens in (prompt(8), prompt(5)):
            before = sum(node.counters.snapshot().get("blocks_received", 0) for node in nodes)
            request = job(rig, tokens, "prefill-1")
            assert await answer(replica, request) == continuation(tokens, NEW_TOKENS)
            received = sum(node.counters.snapshot().get("blocks_received", 0) for node in nodes) - before
            record = replica.explain(str(request.context.request_id))
            assert record is not None
            assert record.attempts[-1].moved_bytes == received * size_bytes > 0
        await replica.stop()


@pytest.mark.field("llm-d-kv-cache#544")
@pytest.mark.parametrize("deaf", [True, False], ids=["events stop", "events come"])
async def test_events_that_stop_are_told_from_a_node_at_rest_within_thirty_seconds(deaf: bool) -> None:
    """llm-d-kv-cache#544: a broken pipeline of events looked like an idle one."""
    async with new_rig() as rig:
        for i in range(DECODE_NODES):
            node, _ = await rig.decode(f"decode-{i}")
            await node.shell.check_health()
        over, clock = Deaf(connector()), ManualClock(rig.clock.now_s())
        replica = await replica_of(rig, over, clock)
        over.deaf = deaf

        def in_vain() -> int:
            return replica.counters().get("block_expected_in_vain", 0)

        async def pass_s(seconds: float) -> None:
            """That time, and then a heartbeat at least."""
            clock.advance(seconds)
            turn = replica.holdings._turned_at_s
            await until(lambda: replica.holdings._turned_at_s != turn)

        tokens = prompt(8)
        assert await answer(replica, job(rig, tokens)) == continuation(tokens, NEW_TOKENS)
        if not deaf:
            await until(lambda: any(replica.holdings.dump().values()))
        assert in_vain() == 0
        assert 3 * EXPECTS_S <= 30.0
        for _ in range(3):
            await pass_s(EXPECTS_S)
        assert in_vain() == (1 if deaf else 0)
        for _ in range(3):  # at rest
            await pass_s(EXPECTS_S)
        assert in_vain() == (1 if deaf else 0)
        await replica.stop()
