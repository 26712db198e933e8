"""What a request's client feels is what the histograms say, on a clock that is moved by hand."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from operations.metrics import Metrics, Reading, RequestMetrics
from orchestrator.measured import MeasuredGenerator
from orchestrator.ports import GenerationJob
from pipelines.types.status import GenerationStatus
from pipelines.types.text_output import TextGenerationOutput
from pronghorn.clock import ManualClock
from pronghorn.errors import Overloaded
from tests.fakes.memory_node import MODEL
from tests.fakes.metric_samples import samples
from tests.fakes.orchestrator_cluster import Cluster


class Slow:
    """Two choices: a token each, then two tokens of the first, which ends; every output a second after the last."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock

    @asynccontextmanager
    async def generate(self, job: GenerationJob) -> AsyncIterator[AsyncIterator[TextGenerationOutput]]:
        self._clock.advance(2.0)
        yield self._outputs(job)

    async def _outputs(self, job: GenerationJob) -> AsyncIterator[TextGenerationOutput]:
        for choice, tokens, status in (
            (0, [1], GenerationStatus.ACTIVE),
            (1, [2], GenerationStatus.ACTIVE),
            (0, [3, 4], GenerationStatus.MAXIMUM_LENGTH),
        ):
            yield TextGenerationOutput(
                request_id=job.context.request_id, tokens=tokens, final_status=status, choice=choice
            )
            self._clock.advance(1.0)


class Refusing:
    @asynccontextmanager
    async def generate(self, job: GenerationJob) -> AsyncIterator[AsyncIterator[TextGenerationOutput]]:
        raise Overloaded("full")
        yield


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("orchestrator", {MODEL: lambda: Reading({}, [], {})})


@pytest.mark.field("dynamo#8483")
async def test_first_token_gaps_and_end_are_measured_of_each_choice(clock: ManualClock, metrics: Metrics) -> None:
    job = Cluster(clock).job(prompt_tokens=4)
    async with MeasuredGenerator(Slow(clock), RequestMetrics(metrics), clock).generate(job) as outputs:
        assert [output.tokens async for output in outputs] == [[1], [2], [3, 4]]
    found = samples(metrics.text())
    assert found["pronghorn:time_to_first_token_seconds_sum", ""] == 2.0
    assert found["pronghorn:inter_token_latency_seconds_count", ""] == 2
    assert found["pronghorn:inter_token_latency_seconds_sum", ""] == 2.0
    assert found["pronghorn:e2e_request_latency_seconds_sum", ""] == 4.0
    assert found["pronghorn:request_success_total", "finished_reason=maximum_length"] == 1
    assert found["pronghorn:prompt_tokens_total", ""] == 4
    assert found["pronghorn:generation_tokens_total", ""] == 4


async def test_a_refused_request_has_no_first_token(clock: ManualClock, metrics: Metrics) -> None:
    with pytest.raises(Overloaded):
        async with MeasuredGenerator(Refusing(), RequestMetrics(metrics), clock).generate(Cluster(clock).job()):
            pass
    assert samples(metrics.text())["pronghorn:time_to_first_token_seconds_count", ""] == 0


async def test_a_request_that_is_left_early_counts_as_no_success(clock: ManualClock, metrics: Metrics) -> None:
    async with MeasuredGenerator(Slow(clock), RequestMetrics(metrics), clock).generate(Cluster(clock).job()) as outputs:
        await anext(outputs)
    found = samples(metrics.text())
    assert found["pronghorn:e2e_request_latency_seconds_count", ""] == 0
    assert found["pronghorn:generation_tokens_total", ""] == 1
