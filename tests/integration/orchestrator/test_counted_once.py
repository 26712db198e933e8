"""What operators count: each hand-over once on each side, and each request once, however many nodes it went through."""

import asyncio

import pytest

from operations.metrics import Metrics, Reading, RequestMetrics
from orchestrator.measured import MeasuredGenerator
from orchestrator.ports import GenerationJob
from tests.fakes.canary_pipeline import continuation
from tests.fakes.metric_samples import samples
from tests.integration.nodes.rig import MODEL, at_rest, prompt
from tests.integration.orchestrator.test_real_nodes import NEW_TOKENS, cluster, job

REQUESTS = 7


@pytest.mark.field("dynamo#8483", "inference-sim#821", "inference-sim#1510")
async def test_hand_overs_and_requests_are_counted_once_each() -> None:
    """dynamo#8483: a counter of transfers never moved; inference-sim#821: each half's latency was among the users'."""
    async with cluster() as (rig, replica, [decode]):
        (prefill,) = rig.prefill_nodes
        metrics = Metrics("orchestrator", {MODEL: lambda: Reading({}, [], replica.counters())})
        measured = MeasuredGenerator(replica, RequestMetrics(metrics), rig.clock)
        felt_s: list[float] = []

        async def one(request: GenerationJob) -> list[int]:
            began_s = rig.clock.now_s()
            async with measured.generate(request) as outputs:
                felt_s.append(rig.clock.now_s() - began_s)
                return [token async for output in outputs for token in output.tokens]

        prompts = [prompt(2, start=number) for number in range(REQUESTS)]
        answers = await asyncio.gather(*(one(job(rig, tokens, "prefill-0")) for tokens in prompts))
        assert answers == [continuation(tokens, NEW_TOKENS) for tokens in prompts]
        await at_rest(prefill, decode)

        assert decode.counters.value("pull_committed") == REQUESTS
        assert prefill.counters.value("hand_over_ended", "committed") == REQUESTS
        assert not [name for name in decode.counters.snapshot() if name.startswith("pull_failed")]
        found = samples(metrics.text())
        for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
            assert found[f"pronghorn:{name}_count", ""] == REQUESTS
        assert found["pronghorn:request_success_total", "finished_reason=maximum_length"] == REQUESTS
        told_s = found["pronghorn:time_to_first_token_seconds_sum", ""]
        assert 0.0 < told_s <= sum(felt_s), "the time to a first token is within what its client felt"
