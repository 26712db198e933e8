"""Routing by what real nodes hold, over real gRPC: their events arrive, and the next request follows them."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvcache.registry import NodeRecord
from orchestrator.holdings import EXPECTS_S
from orchestrator.node_client import GrpcConnector
from orchestrator.ports import NodeClient, NodeConnector
from orchestrator.prompt_keys import PromptBlocks, PromptKeys
from orchestrator.replica import Replica
from orchestrator.routing.break_even import Speeds
from orchestrator.routing.speeds import LearnedSpeeds
from pipelines.types.frames import BlockEvents, NodeFrame, OrchestratorFrame
from pronghorn.clock import Clock, ManualClock
from tests.fakes.canary_engine import SEED
from tests.fakes.canary_pipeline import block_bytes, continuation
from tests.fakes.orchestrator_cluster import config
from tests.integration.nodes.rig import BLOCK_TOKENS, MODEL, Rig, new_rig, orchestrator_identity, prompt
from tests.integration.nodes.test_tiers import copied, kept, tiers_of
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


@pytest.mark.conformance(40)
@pytest.mark.parametrize(("kind", "tier"), [("dkv over local", "host"), ("dkv over tiered", "disk")])
async def test_a_prefix_that_has_left_its_pool_for_a_tier_is_routed_to_and_brought_back_and_not_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, tier: str
) -> None:
    monkeypatch.setattr(LearnedSpeeds, "of", lambda *_: Speeds())  # the canary computes faster than memory is copied
    async with new_rig() as rig:
        tiers = tiers_of(kind, tmp_path)
        made = [await rig.decode(f"decode-{i}", num_blocks=16, tiers=tiers) for i in range(DECODE_NODES)]
        for node, _ in made:
            await node.shell.check_health()
        clock = ManualClock(rig.clock.now_s())
        replica = await replica_of(rig, clock=clock)
        tokens = prompt(8)
        assert await answer(replica, job(rig, tokens)) == continuation(tokens, NEW_TOKENS)
        blocks = await blocks_of(rig, tokens)
        held, keys = len(blocks.hashes), set(memoryview(blocks.keys).cast("Q"))
        await until(lambda: any(keys <= found for found in replica.holdings.dump().values()))
        (holder,) = [life for life, found in replica.holdings.dump().items() if keys <= found]
        node, engine = next(each for each in made if each[0].shell.incarnation == holder)
        await kept(node, held)
        direct = await rig.orchestrator(node)
        for start in (500, 900):  # others take its place in the pool
            await copied(node)
            await direct.result(await direct.submit(prompt(12, start=start), 2))
        await until(lambda: not keys & replica.holdings.dump()[holder])
        for _ in range(3):  # what it was thought to be about to hold is forgotten
            clock.advance(EXPECTS_S)
            turn = replica.holdings._turned_at_s
            await until(lambda turn=turn: replica.holdings._turned_at_s != turn)
        await until_usable(replica, DECODE_NODES)
        assert replica.holdings.find(blocks.keys) == {}
        assert replica.holdings.find_kept(blocks.keys, [holder]) == {holder: {tier: held}}

        await copied(node)
        before, request = engine.pipeline.computed_tokens, job(rig, tokens)
        assert await answer(replica, request) == continuation(tokens, NEW_TOKENS)
        record = replica.explain(str(request.context.request_id))
        assert record is not None
        chosen = record.attempts[0].considered[0]
        assert chosen.decode == node.shell.name and chosen.scores["overlap"] > 0.5
        assert chosen.tier_tokens == {tier: held * BLOCK_TOKENS}
        assert record.reused_tokens == chosen.reuse_tokens == held * BLOCK_TOKENS
        assert record.attempts[0].fetched_bytes == {tier: held * block_bytes(BLOCK_TOKENS)}
        assert engine.pipeline.computed_tokens - before <= len(tokens) - held * BLOCK_TOKENS + NEW_TOKENS

        def told() -> float | None:
            report = next(each for each in replica.nodes() if each.incarnation == holder)
            return None if isinstance(report.tiers, msgspec.UnsetType) else report.tiers[tier].bytes_per_s

        await until(lambda: (told() or 0.0) > 0.0)
        await again_known(rig, replica, blocks.keys, held)
        await replica.reset_prefix_cache()
        await until(lambda: not any(replica.holdings.dump_kept(tier).values()))
        replica.holdings.check()
        await replica.stop()


async def again_known(rig: Rig, before: Replica, packed: bytes, held: int) -> None:
    """A new orchestrator learns from the nodes' snapshots what the one before it knows of tiers."""
    again = await replica_of(rig)
    lives = list(before.holdings.dump())
    await until(lambda: again.holdings.find_kept(packed, lives) == before.holdings.find_kept(packed, lives))
    assert any(held in tiers.values() for tiers in again.holdings.find_kept(packed, lives).values())
    await again.stop()
