"""What an engine's batches come to: totals, the latest speeds, and lines in the log.

Knows step reports; time is passed in. Every batch is a line at DEBUG. At INFO there is one line in a period at most,
which tells of the latest batch and how many there were since the line before.
"""

import logging

from pipelines.runtime.messages import EngineLoad, StepReport
from pipelines.types.batch import BatchType, CompletedBatchStats
from pronghorn.counters import Counters

log = logging.getLogger(__name__)


class BatchLog:
    def __init__(self, node: str, counters: Counters, period_s: float) -> None:
        self.prompt_throughput = 0.0
        """Tokens a second of the last batch that had prompts in it; 0 before the first."""
        self.generation_throughput = 0.0
        """Tokens a second of the last batch, by `CompletedBatchStats`."""
        self._node = node
        self._counters = counters
        self._period_s = period_s
        self._unsaid = 0
        self._due_s: float | None = None

    def note(self, report: StepReport, now_s: float) -> None:
        """Nothing where the report follows no batch."""
        stats = report.stats
        if stats is None:
            return
        self._counters.count("batches", stats.batch_type.value)
        self._counters.count("prompt_tokens", n=report.prompt_tokens)
        self._counters.count("generated_tokens", n=stats.num_output_tokens or 0)
        if stats.batch_type is BatchType.CE:
            self.prompt_throughput = stats.prompt_throughput
        self.generation_throughput = stats.generation_throughput
        self._unsaid += 1
        if self._due_s is None or now_s >= self._due_s:
            log.info("%s; %d batches since the last line", self._line(stats, report.load), self._unsaid)
            self._unsaid = 0
            self._due_s = now_s + self._period_s
        elif log.isEnabledFor(logging.DEBUG):
            log.debug("%s", self._line(stats, report.load))

    def _line(self, stats: CompletedBatchStats, load: EngineLoad) -> str:
        return (
            f"{self._node}: {stats.batch_type} batch of {stats.batch_size}: {stats.num_input_tokens} tokens in, "
            f"{stats.num_output_tokens or 0} out, {stats.num_context_tokens} of context, in "
            f"{stats.execution_time_s * 1e3:.1f} ms; {stats.prompt_throughput:.0f} tokens/s in, "
            f"{stats.generation_throughput:.0f} tokens/s out; {load.held_blocks} of {load.total_blocks} blocks held, "
            f"{load.running} running, {load.waiting} waiting"
        )
