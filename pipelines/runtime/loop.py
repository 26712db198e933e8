"""The engine's one loop: take commands, sweep deadlines, compute a step, report.

Knows a scheduler, a pipeline, the block memory and two queues. Must not know processes, sockets or torch. It alone
calls the scheduler and the pipeline, from one thread, and makes the copies between blocks that the scheduler orders,
before anything else happens to a block. What commands and deadlines cause is reported before the step, because a step
is long; what the step causes right after it. With nothing to compute it waits in the inbox, never longer than until
the next report is due.
"""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Protocol

from kvcache.memory import BlockMemory
from pipelines.runtime.config import EngineConfig
from pipelines.runtime.messages import EngineCommand, EngineMessage, EngineReady, StepReport, Stock, Stop, TakeStock
from pipelines.runtime.request_failures import RequestFailures
from pipelines.runtime.scheduler import Batch, Scheduler
from pipelines.types.batch import CompletedBatchStats, TextGenerationInputs
from pipelines.types.pipeline import Pipeline
from pipelines.types.text_context import TextContext
from pipelines.types.text_output import TextGenerationOutput
from pronghorn.clock import Clock
from pronghorn.errors import PronghornError
from pronghorn.ids import RequestID

TextPipeline = Pipeline[TextGenerationInputs[TextContext], TextGenerationOutput]


class InboxClosed(Exception):
    """The shell is gone: no command can come any more."""


class Inbox(Protocol):
    def take(self, timeout_s: float) -> list[EngineCommand]:
        """The commands that are there, in order, waiting at most `timeout_s` for the first. Raises InboxClosed."""


class Outbox(Protocol):
    def put(self, message: EngineMessage) -> None:
        """Hand a message to the shell; waits where the shell does not keep up. Raises InboxClosed where it is gone."""


@dataclass(frozen=True)
class EngineParts:
    """An engine that is built and has computed its canary: what `EngineLoop` runs, and what its shell is told."""

    scheduler: Scheduler
    pipeline: TextPipeline
    ready: EngineReady


BuildEngine = Callable[[EngineConfig, bytes, BlockMemory], EngineParts]
"""(configuration, hash seed, block memory) -> parts. Raises ConfigurationError where these cannot work."""


class EngineLoop:
    def __init__(
        self,
        scheduler: Scheduler,
        pipeline: TextPipeline,
        memory: BlockMemory,
        inbox: Inbox,
        outbox: Outbox,
        clock: Clock,
        report_period_s: float,
        *,
        checked: bool = False,
    ) -> None:
        """With `checked` the scheduler's invariants are asserted in every round."""
        self._scheduler = scheduler
        self._pipeline = pipeline
        self._memory = memory
        self._inbox = inbox
        self._outbox = outbox
        self._clock = clock
        self._report_period_s = report_period_s
        self._checked = checked
        self._report_due_s = clock.now_s()
        self._stepped = False
        self._stopping = False
        self._stock_asked: int | None = None
        """The number of a `TakeStock` that has no answer yet."""

    def run(self) -> None:
        """Until `Stop`. Raises InboxClosed when the shell is gone, and what the pipeline raises for the whole step."""
        for _ in self.rounds():
            pass

    def rounds(self) -> Iterator[Batch | None]:
        """`run`, a piece at a time: yields each batch when it is about to be computed, and None after each round."""
        while not self._stopping:
            yield from self._round()
            yield None

    def _round(self) -> Generator[Batch, None, None]:
        took_commands = self._take_commands()
        self._scheduler.sweep(self._clock.now_s())
        self._copy_blocks()
        if self._scheduler.has_events:
            self._report()
        stats, prompt_tokens = (None, 0) if self._stopping else (yield from self._step())
        self._stepped = stats is not None
        for request_id in self._scheduler.take_ended():
            self._pipeline.release(request_id)
        if self._checked:
            self._scheduler.check()
        if self._stepped or took_commands or self._clock.now_s() >= self._report_due_s:
            self._report(stats, prompt_tokens)

    def _take_commands(self) -> bool:
        now_s = self._clock.now_s()
        commands = self._inbox.take(0.0 if self._stepped else max(0.0, self._report_due_s - now_s))
        for command in commands:
            if isinstance(command, Stop):
                self._stopping = True
                break
            if isinstance(command, TakeStock):
                self._stock_asked = command.number
                continue
            self._scheduler.handle(command, self._clock.now_s())
            self._copy_blocks()
        return bool(commands)

    def _take_stock(self) -> Stock | None:
        number, self._stock_asked = self._stock_asked, None
        return None if number is None else Stock(number, self._scheduler.held(self._clock.now_s()))

    def _step(self) -> Generator[Batch, None, tuple[CompletedBatchStats | None, int]]:
        """Compute a batch; what it came to, and its prompt tokens."""
        batch = self._scheduler.next_batch(self._clock.now_s())
        if batch is None:
            return None, 0
        prompt_tokens = _prompt_tokens(batch)
        started_s = self._clock.now_s()
        yield batch
        outputs, failures = self._execute(batch)
        ended_s = self._clock.now_s()
        self._scheduler.complete(batch, outputs, failures, ended_s)
        self._copy_blocks()
        stats = CompletedBatchStats(
            batch_type=batch.batch_type,
            batch_size=batch.batch_size,
            num_input_tokens=batch.input_tokens,
            num_context_tokens=batch.context_tokens,
            execution_time_s=ended_s - started_s,
            num_output_tokens=sum(len(output.tokens) for output in outputs.values()),
        )
        return stats, prompt_tokens

    def _execute(self, batch: Batch) -> tuple[dict[RequestID, TextGenerationOutput], dict[RequestID, PronghornError]]:
        try:
            return self._pipeline.execute(batch), {}
        except RequestFailures as error:
            return error.outputs, error.failures

    def _copy_blocks(self) -> None:
        for copy in self._scheduler.take_copies():
            self._memory.copy(copy.source, copy.destination)

    def _report(self, stats: CompletedBatchStats | None = None, prompt_tokens: int = 0) -> None:
        scheduler = self._scheduler
        report = StepReport(
            events=scheduler.take_events(),
            load=scheduler.load(),
            stats=stats,
            prompt_tokens=prompt_tokens,
            holds=scheduler.take_hold_events(),
            cache_changes=scheduler.take_cache_changes(),
            stock=self._take_stock(),
        )
        self._outbox.put(report)
        self._report_due_s = self._clock.now_s() + self._report_period_s


def _prompt_tokens(batch: Batch) -> int:
    """A running sequence's window is one token that was generated; every other window is of a prompt."""
    windows = (context.tokens for context in batch.flat_batch)
    return sum(w.active_length for w in windows if w.generated_length == 0 or w.active_length > 1)
