"""A Generator that plays a script, and remembers what was asked and how each run ended."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from orchestrator.explanation import RequestRecord
from orchestrator.ports import GenerationJob, ModelState
from pipelines.types.frames import NodeReport
from pipelines.types.log_probabilities import LogProbabilities
from pipelines.types.status import GenerationStatus
from pipelines.types.text_output import TextGenerationOutput


@dataclass(frozen=True)
class Tokens:
    tokens: Sequence[int]
    status: GenerationStatus = GenerationStatus.ACTIVE
    cached: int | None = None
    choice: int = 0
    log_probabilities: list[LogProbabilities] | None = None
    prompt: LogProbabilities | None = None
    """What is said of the prompt's tokens."""


@dataclass(frozen=True)
class Fail:
    error: BaseException


@dataclass(frozen=True)
class Stall:
    """Wait until `until` is set; for ever where nobody sets it."""

    until: asyncio.Event = field(default_factory=asyncio.Event)


Step = Tokens | Fail | Stall


def spoken(
    text: str, end: Sequence[int] = (), status: GenerationStatus = GenerationStatus.END_OF_SEQUENCE
) -> list[Step]:
    """One token a byte, as `byte_tokenizer` has them; `end` tokens come with the last word."""
    return [*(Tokens([byte]) for byte in text.encode()), Tokens(list(end), status)]


@dataclass
class Run:
    job: GenerationJob
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when its context was left."""
    played: int = 0
    """Steps begun."""


class ScriptedGenerator:
    """Plays `script`, or what it returns for a job. Entering plays up to the first tokens, as the port says."""

    def __init__(self, script: Sequence[Step] | Callable[[GenerationJob], Sequence[Step]]) -> None:
        self._script = script
        self.runs: list[Run] = []
        self.entered = asyncio.Event()

    @property
    def job(self) -> GenerationJob:
        """Of the only run."""
        (run,) = self.runs
        return run.job

    @property
    def all_closed(self) -> bool:
        return all(run.closed.is_set() for run in self.runs)

    @asynccontextmanager
    async def generate(self, job: GenerationJob) -> AsyncIterator[AsyncIterator[TextGenerationOutput]]:
        run = Run(job)
        self.runs.append(run)
        self.entered.set()
        try:
            async with aclosing(self._play(run)) as outputs:
                first = await anext(outputs)
                yield _after(first, outputs)
        finally:
            run.closed.set()

    async def _play(self, run: Run) -> Any:
        for step in self._script(run.job) if callable(self._script) else self._script:
            run.played += 1
            match step:
                case Tokens():
                    yield TextGenerationOutput(
                        request_id=run.job.context.request_id,
                        tokens=list(step.tokens),
                        final_status=step.status,
                        num_cached_tokens=step.cached,
                        choice=step.choice,
                        log_probabilities=step.log_probabilities,
                        prompt_log_probabilities=step.prompt,
                    )
                case Fail(error):
                    raise error
                case Stall(until):
                    await until.wait()


async def _after(first: TextGenerationOutput, rest: Any) -> AsyncIterator[TextGenerationOutput]:
    yield first
    async for output in rest:
        yield output


@dataclass
class ScriptedView:
    reports: list[NodeReport] = field(default_factory=list)
    readiness: tuple[bool, str] = (True, "1 decode node")
    trouble: str | None = None
    resets: int = 0
    records: dict[str, RequestRecord] = field(default_factory=dict)

    def nodes(self) -> list[NodeReport]:
        return self.reports

    def ready(self) -> tuple[bool, str]:
        return self.readiness

    def degraded(self) -> str | None:
        return self.trouble

    def models(self) -> list[ModelState]:
        return [ModelState("org/tiny", *self.readiness, in_flight=2)]

    def counters(self) -> dict[str, int]:
        return {"attempts": 3}

    def gauges(self) -> dict[str, int]:
        return {}

    def explain(self, request_id: str) -> RequestRecord | None:
        return self.records.get(request_id)

    def in_flight(self) -> int:
        return 2

    async def reset_prefix_cache(self) -> None:
        self.resets += 1
