"""What one step computes, on every replica: which kind comes first, and how much fits. Both schedulers ask here.

Prompts are context encoding (CE), running sequences token generation (TG). Strategies say which of the two comes first:

- `prefill_first`: CE everywhere while any replica wants it; `decode_first`: TG everywhere while any replica has it;
- `balanced`: what most replicas want, TG where votes are even; a replica without work has no vote;
- `per_replica`: each what it wants.

A replica wants what it has. Where it has both, it wants TG while its pool is under pressure, and CE otherwise, but TG
under `decode_first` and, with in-flight batching, under all but `prefill_first`. With in-flight batching what comes
first is followed by the other kind in what is left of the budgets; without it a replica that has nothing of what was
decided stands idle for the step. A kind that was left out of `max_passed_over_steps` steps in a row comes first in the
next, so that nothing waits for ever.

Knows contexts' windows and queues' order. Must not know blocks, commands or events. Invariants: a replica's windows
are within its budgets; only the last context of its batch can be a chunk, and it is the first of its prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

from pipelines.runtime.config import EngineConfig, SchedulingStrategy
from pipelines.runtime.replica import Replica, WorkT
from pipelines.types.batch import BatchType
from pipelines.types.text_context import TextContext

CE, TG = BatchType.CE, BatchType.TG
_OTHER = {CE: TG, TG: CE}


@dataclass(frozen=True)
class Policy:
    strategy: SchedulingStrategy
    in_flight: bool
    kv_pressure_fraction: float
    max_passed_over_steps: int

    @classmethod
    def of(cls, config: EngineConfig, *, strategy: SchedulingStrategy, in_flight: bool) -> "Policy":
        """`config`'s, with these two where it leaves them open."""
        return cls(
            strategy=config.scheduling_strategy or strategy,
            in_flight=in_flight if config.enable_in_flight_batching is None else config.enable_in_flight_batching,
            kv_pressure_fraction=config.kv_pressure_fraction,
            max_passed_over_steps=config.max_passed_over_steps,
        )


class StepBudget:
    """What one replica's batch may still take. Budgets are asked in order: active tokens, then total context; the first
    that has nothing left closes the batch."""

    def __init__(
        self,
        max_input_tokens: int,
        *,
        chunked: bool = True,
        min_chunk_tokens: int = 0,
        max_total_tokens: int | None = None,
        block_tokens: int = 1,
    ) -> None:
        self.tokens_left = max_input_tokens
        self.total_left = max_total_tokens
        self._chunked = chunked
        self._min_chunk_tokens = max(1, min_chunk_tokens)
        self._block_tokens = block_tokens
        self._empty = True

    @classmethod
    def of(cls, config: EngineConfig) -> "StepBudget":
        return cls(
            config.max_batch_input_tokens,
            chunked=config.enable_chunked_prefill,
            min_chunk_tokens=config.chunked_prefill_min_chunk_size,
            max_total_tokens=config.max_batch_total_tokens,
            block_tokens=config.block_tokens,
        )

    def take(self, context: TextContext, *, bounded: bool = True) -> bool:
        """Put `context`'s active window into the batch, cut where it has to be. False where it does not fit.

        Without `bounded` the total context is counted and not held against it: a batch of decoding sequences alone.
        """
        window = context.tokens.active_length
        taken = self._admissible(window)
        if taken == 0:
            return False
        if self.total_left is not None and not self._take_total(context.tokens.processed_length + taken, bounded):
            return False
        if taken < window:
            context.tokens.chunk(taken)
            self.tokens_left = 0
        else:
            self.tokens_left = max(0, self.tokens_left - window)
        self._empty = False
        return True

    def _admissible(self, window: int) -> int:
        """How much of the window the active tokens let in. A chunk is as long as it can be, and closes the batch."""
        left = self.tokens_left
        if window <= left or left == 0:
            return window if left else 0
        if not self._chunked:
            return window
        taken = min(left, window - self._min_chunk_tokens)
        return taken if taken >= self._min_chunk_tokens else 0

    def _take_total(self, context_tokens: int, bounded: bool) -> bool:
        """A context that is alone always fits, so that none is too long for ever."""
        assert self.total_left is not None
        whole = blocks_for(context_tokens, self._block_tokens) * self._block_tokens
        if bounded and not self._empty and whole > self.total_left:
            return False
        self.total_left -= whole
        return True


class Batcher(Generic[WorkT]):
    def __init__(self, config: EngineConfig, policy: Policy, replicas: Sequence[Replica[WorkT]]) -> None:
        self._config = config
        self._policy = policy
        self._replicas = replicas
        self._passed_over = [{CE: 0, TG: 0} for _ in replicas]
        """Steps in a row that had none of what a replica has of this kind."""

    def next(self) -> list[list[TextContext]]:
        """The contexts of the next step, by replica. Cuts the windows of those that are chunked."""
        return [self._fill(replica, first) for replica, first in zip(self._replicas, self._decide(), strict=True)]

    def check(self) -> None:
        """AssertionError where a kind of work was passed over for longer than configured, with a turn for each replica
        on which something else was overdue as well."""
        bound = self._policy.max_passed_over_steps + len(self._replicas)
        assert all(steps < bound for passed_over in self._passed_over for steps in passed_over.values())

    # --- which kind comes first --------------------------------------------------------------------------------------

    def _decide(self) -> list[BatchType | None]:
        wanted = [self._wanted(replica) for replica in self._replicas]
        overdue = [self._overdue(replica) for replica in self._replicas]
        if self._policy.strategy == "per_replica":
            return [late or want for late, want in zip(overdue, wanted, strict=True)]
        votes = [want for want in wanted if want is not None]
        decided = next((late for late in overdue if late is not None), None) or self._common(votes)
        return [decided if want is not None else None for want in wanted]

    def _wanted(self, replica: Replica[WorkT]) -> BatchType | None:
        if not replica.prompts or not replica.decoding:
            return CE if replica.prompts else TG if replica.decoding else None
        if replica.cache.held_fraction > self._policy.kv_pressure_fraction:
            return TG
        match self._policy.strategy:
            case "prefill_first":
                return CE
            case "decode_first":
                return TG
            case "balanced" | "per_replica":
                return TG if self._policy.in_flight else CE

    def _common(self, votes: Sequence[BatchType]) -> BatchType:
        match self._policy.strategy:
            case "prefill_first":
                return CE if CE in votes else TG
            case "decode_first":
                return TG if TG in votes else CE
            case _:
                return CE if 2 * votes.count(CE) > len(votes) else TG

    def _overdue(self, replica: Replica[WorkT]) -> BatchType | None:
        passed_over, bound = self._passed_over[replica.index], self._policy.max_passed_over_steps
        if replica.prompts and passed_over[CE] >= bound:
            return CE
        return TG if replica.decoding and passed_over[TG] >= bound else None

    # --- how much fits -----------------------------------------------------------------------------------------------

    def _fill(self, replica: Replica[WorkT], first: BatchType | None) -> list[TextContext]:
        prompts: list[TextContext] = []
        decoding: list[TextContext] = []
        if first is not None:
            budget = StepBudget.of(self._config)
            if first is TG:
                decoding = self._take_decoding(replica, budget, bounded=False)
            if first is CE or self._policy.in_flight:
                prompts = self._take_prompts(replica, budget)
            if first is CE and self._policy.in_flight:
                decoding = self._take_decoding(replica, budget, bounded=bool(prompts))
        passed_over = self._passed_over[replica.index]
        passed_over[CE] = passed_over[CE] + 1 if replica.prompts and not prompts else 0
        passed_over[TG] = passed_over[TG] + 1 if replica.decoding and not decoding else 0
        return prompts + decoding if first is CE else decoding + prompts

    def _take_decoding(self, replica: Replica[WorkT], budget: StepBudget, *, bounded: bool) -> list[TextContext]:
        taken: list[TextContext] = []
        for work in replica.decoding:
            if not budget.take(work.context, bounded=bounded):
                break
            taken.append(work.context)
        return taken

    def _take_prompts(self, replica: Replica[WorkT], budget: StepBudget) -> list[TextContext]:
        taken: list[TextContext] = []
        for work in replica.prompts:
            if not budget.take(work.context):
                break
            taken.append(work.context)
            if work.context.tokens.actively_chunked:
                replica.begun = work
        return taken


def blocks_for(num_tokens: int, block_tokens: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_tokens)
