"""A generator that is measured: what its requests' clients feel, into histograms.

Wraps the port; knows times and counts, nothing of how tokens come to be. A request for several choices has one first
token and, of each choice, its own gaps and end. Times are those at which the request's consumer took its tokens.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from operations.metrics import ModelRequests, RequestMetrics
from orchestrator.ports import GenerationJob, Generator
from pipelines.types.text_output import TextGenerationOutput
from pronghorn.clock import Clock


class MeasuredGenerator:
    """Implements `ports.Generator`."""

    def __init__(self, generator: Generator, metrics: RequestMetrics, clock: Clock) -> None:
        self._generator = generator
        self._metrics = metrics
        self._clock = clock

    @asynccontextmanager
    async def generate(self, job: GenerationJob) -> AsyncIterator[AsyncIterator[TextGenerationOutput]]:
        started_s, metrics = self._clock.now_s(), self._metrics.of(job.model)
        metrics.prompt(job.context.tokens.prompt_length)
        async with self._generator.generate(job) as outputs:
            metrics.first_token(self._clock.now_s() - started_s)
            yield _Measured(outputs, metrics, self._clock, started_s)


class _Measured:
    """The outputs, passed on. No generator: one that is left in the middle would need to be closed."""

    def __init__(
        self, outputs: AsyncIterator[TextGenerationOutput], metrics: ModelRequests, clock: Clock, started_s: float
    ) -> None:
        self._outputs = outputs
        self._metrics = metrics
        self._clock = clock
        self._started_s = started_s
        self._told_s: dict[int, float] = {}
        """When each choice last said something."""

    def __aiter__(self) -> "_Measured":
        return self

    async def __anext__(self) -> TextGenerationOutput:
        output = await anext(self._outputs)
        now_s = self._clock.now_s()
        if output.tokens:
            last_s = self._told_s.get(output.choice)
            self._metrics.tokens(len(output.tokens), None if last_s is None else now_s - last_s)
            self._told_s[output.choice] = now_s
        if output.is_done:
            self._metrics.finished(output.final_status.name.lower(), now_s - self._started_s)
        return output
