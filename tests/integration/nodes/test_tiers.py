"""Blocks that the pool has evicted, and that come back from this host's memory or disk."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvcache.hashing import BlockHash
from kvcache.tiers import DiskTier
from tests.fakes.cache_hints import hint
from tests.fakes.canary_pipeline import block_bytes, continuation
from tests.integration.nodes.rig import BLOCK_TOKENS, Node, Rig, at_rest, prompt, target

SHARED = prompt(10, 0)


def tiers_of(kind: str, folder: Path) -> dict[str, Any]:
    """Room for everything, in memory or on disk alone."""
    in_memory = {"host_offload_bytes": 1 << 20}
    on_disk = {"host_offload_bytes": 0, "disk_offload_bytes": 1 << 20, "disk_offload_dir": str(folder)}
    return {
        "local": {"kv_connector": "local", **in_memory},
        "tiered": {"kv_connector": "tiered", **on_disk},
        "dkv over local": {"kv_connector": "dkv", **in_memory},
        "dkv over tiered": {"kv_connector": "dkv", **on_disk},
    }[kind]


async def kept(node: Node, blocks: int) -> None:
    async with asyncio.timeout(60.0):
        while node.counters.value("blocks_offloaded") < blocks:  # noqa: ASYNC110  # a count, which no event tells
            await asyncio.sleep(0.005)


async def copied(node: Node) -> None:
    """What is being copied is held, and held blocks stay: they are no room for others. Then it may go to disk."""
    exchange, offloader = node.shell.exchange, node.shell.exchange._offloader
    assert offloader is not None
    async with asyncio.timeout(60.0):
        while not offloader.idle or exchange.held() or exchange._connector.poll():  # noqa: ASYNC110  # nor an event
            await asyncio.sleep(0.005)


class FullDisk(DiskTier):
    """Of which nothing more can be written, whatever its budget says: every write is told ENOSPC."""

    def path(self, block_hash: BlockHash) -> Path:
        file = super().path(block_hash)
        if not file.is_symlink():
            file.symlink_to("/dev/full")
        return file


@pytest.mark.cells("F10 P1-P11")
@pytest.mark.parametrize("what", ["host", "host and disk", "the disk itself"])
async def test_tiers_that_are_full_all_along_cost_no_token(
    rig: Rig, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two blocks are all that fits, and every request brings ten: whatever phase it is in, a tier is full."""
    room_bytes = 2 * block_bytes(BLOCK_TOKENS)
    if what == "the disk itself":
        monkeypatch.setattr("kvcache.tiers.DiskTier", FullDisk)
    tiers: dict[str, Any] = {"kv_connector": "local", "host_offload_bytes": room_bytes}
    if what != "host":
        tiers |= {
            "kv_connector": "tiered",
            "disk_offload_bytes": 1 << 20 if what == "the disk itself" else room_bytes,
            "disk_offload_dir": str(tmp_path),
        }
    prefill, _ = await rig.prefill(num_blocks=32, tiers=tiers)
    decode, _ = await rig.decode(num_blocks=32, tiers=tiers)
    orchestrator = await rig.orchestrator(decode)
    for round_ in range(3):
        prompts = [prompt(10, start=1 + 10 * i + round_) for i in range(8)]
        ways = [(), (target(prefill),)]
        fences = [await orchestrator.submit(each, 4, *ways[i % 2]) for i, each in enumerate(prompts)]
        for each, fence in zip(prompts, fences, strict=True):
            assert await orchestrator.result(fence) == continuation(each, 4)
    for node in (prefill, decode):
        await kept(node, 10)
        await copied(node)
        await at_rest(node)
    if what == "the disk itself":
        assert decode.counters.value("tier_write_failed") > 0


@pytest.mark.conformance(40)
@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("kind", ["local", "tiered", "dkv over local", "dkv over tiered"])
async def test_a_prefix_that_was_evicted_is_restored_and_not_computed(rig: Rig, tmp_path: Path, kind: str) -> None:
    tiers = tiers_of(kind, tmp_path)
    node, engine = await rig.decode(num_blocks=16, tiers=tiers)
    orchestrator = await rig.orchestrator(node)
    await orchestrator.result(await orchestrator.submit([*SHARED, 1], 2))
    await kept(node, 10)
    await copied(node)
    await orchestrator.result(await orchestrator.submit(prompt(12, start=500), 2))  # evicts the first
    await copied(node)
    before = engine.pipeline.computed_tokens
    fence = await orchestrator.submit([*SHARED, 2], 2)
    assert await orchestrator.result(fence) == continuation([*SHARED, 2], 2)
    assert node.counters.value("blocks_restored") > 0
    assert engine.pipeline.computed_tokens - before < len(SHARED)
    assert (orchestrator.deltas[fence][0].num_cached_tokens or 0) > 0
    await at_rest(node)
    await copied(node)
    node.shell.drop_prefix_cache()
    fence = await orchestrator.submit([*SHARED, 3], 2)
    await orchestrator.result(fence)
    assert orchestrator.deltas[fence][0].num_cached_tokens == 0


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(("kind", "tier"), [("dkv over local", "host"), ("dkv over tiered", "disk")])
async def test_what_a_node_has_kept_itself_is_not_fetched_and_the_rest_is(
    rig: Rig, tmp_path: Path, kind: str, tier: str
) -> None:
    holder, _ = await rig.decode("decode-1")
    second, engine = await rig.decode("decode-2", num_blocks=16, tiers=tiers_of(kind, tmp_path))
    await rig.registered(holder, second)
    one, other = await rig.orchestrator(holder), await rig.orchestrator(second)
    await one.result(await one.submit([*SHARED, 1], 2))
    await other.result(await other.submit([*SHARED[: 4 * BLOCK_TOKENS], 2], 2))
    await kept(second, 4)
    for start in (500, 900):  # two, since the pool gives up the ends of what is oldest first
        await copied(second)
        await other.result(await other.submit(prompt(12, start=start), 2))
    await copied(second)
    before = engine.pipeline.computed_tokens
    fence = await other.submit([*SHARED, 3], 2, hint=hint(SHARED, decode_1=10))
    assert await other.result(fence) == continuation([*SHARED, 3], 2)
    size_bytes = block_bytes(BLOCK_TOKENS)
    assert other.deltas[fence][0].fetched_bytes == {tier: 4 * size_bytes, "decode-1": 6 * size_bytes}
    assert other.deltas[fence][0].num_cached_tokens == len(SHARED)
    assert engine.pipeline.computed_tokens - before <= 1 + 2
    assert second.counters.value("blocks_restored") == 4 and second.counters.value("blocks_fetched") == 6
    await copied(second)
    await at_rest(holder, second)
