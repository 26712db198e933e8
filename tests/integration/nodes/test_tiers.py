"""Blocks that the pool has evicted, and that come back from this host's memory or disk."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.canary_pipeline import continuation
from tests.integration.nodes.rig import Node, Rig, at_rest, prompt

SHARED = prompt(10, 0)


def tiers_of(kind: str, folder: Path) -> dict[str, Any]:
    """Room for everything, in memory or on disk alone."""
    host_bytes = 1 << 20 if kind == "local" else 0
    return {
        "kv_connector": kind,
        "host_offload_bytes": host_bytes,
        "disk_offload_bytes": 1 << 20,
        "disk_offload_dir": str(folder),
    }


async def kept(node: Node, blocks: int) -> None:
    async with asyncio.timeout(60.0):
        while node.counters.value("blocks_offloaded") < blocks:  # noqa: ASYNC110  # a count, which no event tells
            await asyncio.sleep(0.005)


async def copied(node: Node) -> None:
    """What is being copied is held, and held blocks stay: they are no room for others."""
    async with asyncio.timeout(60.0):
        while node.shell.exchange.held():  # noqa: ASYNC110  # the engine's holds, which no event tells
            await asyncio.sleep(0.005)


@pytest.mark.conformance(40)
@pytest.mark.parametrize("kind", ["local", "tiered"])
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
