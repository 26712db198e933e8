"""What a node has cached, as its orchestrators hear of it on their sessions."""

import numpy as np
import pytest

from kvcache.hashing import BlockHasher, index_keys, pack_tokens
from pipelines.types.frames import BlocksCleared, DropPrefixCache, ResendBlocks
from tests.fakes.canary_engine import SEED
from tests.fakes.canary_pipeline import canary_layout
from tests.integration.nodes.rig import MODEL, Rig, prompt, target


def keys(tokens: list[int], blocks: int) -> set[bytes]:
    hasher = BlockHasher("sha256", SEED, MODEL, None, canary_layout(4))
    packed = index_keys(hasher.chain(pack_tokens(np.array(tokens)), hasher.root(None))[:blocks])
    return {packed[i : i + 8] for i in range(0, len(packed), 8)}


async def test_every_orchestrator_hears_what_a_node_computes_and_a_late_one_hears_it_at_once(rig: Rig) -> None:
    prefill, _ = await rig.prefill()
    decode, _ = await rig.decode()
    early, watcher = await rig.orchestrator(decode), await rig.orchestrator(prefill)
    await early.result(await early.submit(prompt(3), 1, target(prefill)))
    expected = keys(prompt(3), 3)
    await early.until(lambda: early.cached_keys() >= expected)
    await watcher.until(lambda: watcher.cached_keys() >= expected)
    late = await rig.orchestrator(decode)
    await late.until(lambda: late.cached_keys() >= expected)
    assert late.blocks[0].snapshot and early.blocks[0].snapshot and not early.blocks[0].events


@pytest.mark.field("aibrix#2287")
@pytest.mark.field("llm-d-kv-cache#593")
async def test_a_reset_is_heard_and_the_numbers_have_no_gap(rig: Rig) -> None:
    decode, _ = await rig.decode()
    orchestrator = await rig.orchestrator(decode)
    await orchestrator.result(await orchestrator.submit(prompt(3), 2))
    await orchestrator.until(lambda: bool(orchestrator.cached_keys()))
    await orchestrator.send(DropPrefixCache())
    await orchestrator.until(lambda: not orchestrator.cached_keys())
    assert BlocksCleared() in orchestrator.blocks[-1].events
    assert [frame.sequence for frame in orchestrator.blocks] == list(range(1, len(orchestrator.blocks) + 1))


@pytest.mark.field("llm-d-router#1887")
async def test_an_orchestrator_that_missed_something_asks_and_gets_everything(rig: Rig) -> None:
    decode, _ = await rig.decode()
    orchestrator = await rig.orchestrator(decode)
    await orchestrator.result(await orchestrator.submit(prompt(3), 2))
    await orchestrator.until(lambda: orchestrator.cached_keys() >= keys(prompt(3), 3))
    held = orchestrator.cached_keys()
    orchestrator.blocks.clear()
    await orchestrator.send(ResendBlocks())
    await orchestrator.until(lambda: bool(orchestrator.blocks))
    assert orchestrator.blocks[0].snapshot and orchestrator.cached_keys() == held
