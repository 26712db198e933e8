"""Nodes with two replicas: the same tokens as with one, whatever is pulled, copied, padded or preempted."""

from typing import Any

import pytest

from pronghorn.ids import Fence
from tests.fakes.canary_pipeline import continuation
from tests.integration.nodes.rig import Orchestrator, Rig, at_rest, holds, prompt, target

PREFILL, DECODE = "tests.fakes.canary_prefill", "tests.fakes.canary_decode"
PROMPTS = [prompt(1 + i % 4, 1 + i % 3, start=50 * (i // 2)) for i in range(12)]
"""Pairs of them share their beginning."""


async def assert_exact(orchestrator: Orchestrator, fences: list[Fence], prompts: list[list[int]], n: int) -> None:
    for fence, tokens in zip(fences, prompts, strict=True):
        assert await orchestrator.result(fence) == continuation(tokens, n)


@pytest.mark.parametrize(("prefill_replicas", "decode_replicas"), [(2, 2), (1, 2), (2, 1)])
@pytest.mark.conformance(52)
async def test_prefill_and_decode_nodes_may_have_any_number_of_replicas(
    rig: Rig, prefill_replicas: int, decode_replicas: int
) -> None:
    prefill, prefill_engine = await rig.prefill(data_parallel=prefill_replicas)
    decode, decode_engine = await rig.decode(data_parallel=decode_replicas)
    orchestrator = await rig.orchestrator(decode)
    prefill_engine.close_gates()  # so that all are there before the first has ended
    fences = [await orchestrator.submit(tokens, 8, target(prefill)) for tokens in PROMPTS]
    await holds(decode, len(PROMPTS))
    prefill_engine.open_gates()
    await assert_exact(orchestrator, fences, PROMPTS, 8)
    assert decode.counters.value("pull_committed") == len(PROMPTS)
    for engine in (prefill_engine, decode_engine):
        assert all(pipeline.computed_tokens for pipeline in engine.pipelines), "every replica has computed"
    await at_rest(prefill, decode)


@pytest.mark.parametrize(
    "policy",
    [
        {},
        {"device_graph_capture": True},
        {"scheduling_strategy": "per_replica", "enable_in_flight_batching": False},
        {"scheduling_strategy": "balanced", "enable_in_flight_batching": False, "device_graph_capture": True},
        {"scheduling_strategy": "prefill_first", "enable_chunked_prefill": False},
        {"num_blocks": 10},  # the newest are preempted
        {"enable_dp_cross_replica_prefix_copy": False},
    ],
)
@pytest.mark.conformance(52)
async def test_an_aggregated_node_gives_the_same_tokens_under_every_policy(rig: Rig, policy: dict[str, Any]) -> None:
    decode, engine = await rig.decode(data_parallel=2, **policy)
    orchestrator = await rig.orchestrator(decode)
    engine.close_gates()  # so that all are there before the first has ended
    fences = [await orchestrator.submit(tokens, 12) for tokens in PROMPTS]
    await holds(decode, len(PROMPTS))
    engine.open_gates()
    await assert_exact(orchestrator, fences, PROMPTS, 12)
    assert all(pipeline.computed_tokens for pipeline in engine.pipelines)
    await at_rest(decode)


@pytest.mark.conformance(52)
async def test_a_prefix_that_the_other_replica_has_is_neither_pulled_nor_computed(rig: Rig) -> None:
    prefill, _ = await rig.prefill()
    decode, engine = await rig.decode(data_parallel=2)
    orchestrator = await rig.orchestrator(decode)
    tokens = prompt(6)
    await orchestrator.result(await orchestrator.submit(tokens, 1, target(prefill)))
    for pipeline in engine.pipelines:
        pipeline.gate.clear()
    busy = await orchestrator.submit(prompt(1, start=500), 2)  # on the replica that has the prefix
    await holds(decode)
    sent = prefill.counters.value("blocks_sent")
    fence = await orchestrator.submit(tokens, 5, target(prefill))
    await holds(decode, 2)
    engine.open_gates()
    assert await orchestrator.result(fence) == continuation(tokens, 5)
    assert orchestrator.deltas[fence][0].num_cached_tokens == 24
    assert prefill.counters.value("blocks_sent") - sent == 1
    await orchestrator.result(busy)
    await at_rest(prefill, decode)


async def test_engines_in_processes_share_the_memory_of_all_their_replicas(rig: Rig) -> None:
    prefill = await rig.prefill_over(rig.process(PREFILL, data_parallel=2), data_parallel=2)
    decode = await rig.decode_over(rig.process(DECODE, data_parallel=2), data_parallel=2)
    orchestrator = await rig.orchestrator(decode)
    fences = [await orchestrator.submit(tokens, 6, target(prefill)) for tokens in PROMPTS]
    await assert_exact(orchestrator, fences, PROMPTS, 6)
    assert (await rig.status(decode)).total_blocks == 128
    assert decode.counters.value("pull_committed") == len(PROMPTS)
    await at_rest(prefill, decode)
