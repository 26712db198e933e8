"""What one step of a text pipeline is given, and what it is said to have done."""

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Generic

from typing_extensions import TypeVar

from pipelines.types.pipeline import PipelineInputs
from pipelines.types.text_context import TextContext


class BatchType(StrEnum):
    CE = "CE"
    """Context encoding: one sequence at least is still in its prompt."""
    TG = "TG"
    """Token generation."""


TextContextT = TypeVar("TextContextT", bound=TextContext, default=TextContext)


@dataclass
class TextGenerationInputs(PipelineInputs, Generic[TextContextT]):
    """The contexts of one step. Every figure is taken at construction, because windows move afterwards.

    Padding contexts count in `input_tokens` and `context_tokens`, which the device computes, and nowhere else.
    """

    batches: list[list[TextContextT]]
    """One inner list per data-parallel replica."""
    input_tokens: int = -1
    batch_type: BatchType = BatchType.TG
    """CE where any context has generated nothing; a mixed batch is CE, an empty one TG."""
    per_replica_input_tokens: list[int] = field(default_factory=list)
    per_replica_context_tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        real = [[context for context in batch if not context._is_padding_ctx] for batch in self.batches]
        self.input_tokens = sum(context.tokens.active_length for context in self.flat_batch)
        self.context_tokens = sum(context.tokens.processed_length for context in self.flat_batch)
        self.per_replica_input_tokens = [sum(c.tokens.active_length for c in batch) for batch in real]
        self.per_replica_context_tokens = [sum(c.tokens.processed_length for c in batch) for batch in real]
        in_prompt = any(context.tokens.generated_length == 0 for context in self.flat_batch)
        self.batch_type = BatchType.CE if in_prompt else BatchType.TG

    @property
    def flat_batch(self) -> list[TextContextT]:
        return [context for batch in self.batches for context in batch]

    @property
    def batch_size(self) -> int:
        """Without padding."""
        return sum(not context._is_padding_ctx for context in self.flat_batch)

    @cached_property
    def batch_top_log_probs(self) -> list[int]:
        return [context.log_probabilities for context in self.flat_batch]

    @cached_property
    def batch_echo(self) -> list[bool]:
        return [context.log_probabilities_echo for context in self.flat_batch]

    @property
    def enable_log_probs(self) -> bool:
        return any(self.batch_top_log_probs)

    @property
    def enable_echo(self) -> bool:
        return any(self.batch_echo)

    def __bool__(self) -> bool:
        """A batch of padding alone is still work for the device."""
        return len(self.flat_batch) > 0

    def __repr__(self) -> str:
        return (
            f"TextGenerationInputs(batch_type={self.batch_type}, size={self.batch_size}, "
            f"padded={len(self.flat_batch)}, input_tokens={self.input_tokens}, context_tokens={self.context_tokens})"
        )


@dataclass
class CompletedBatchStats:
    batch_type: BatchType
    batch_size: int
    num_input_tokens: int
    num_context_tokens: int
    execution_time_s: float
    num_output_tokens: int | None = None
    draft_tokens_generated: int = 0
    draft_tokens_accepted: int = 0
    avg_acceptance_length: float = 0.0
    max_acceptance_length: int = 0
    """Speculative tokens as configured."""
    acceptance_rate_per_position: list[float] = field(default_factory=list)
    early_sync_duration_s: float | None = None

    @property
    def prompt_throughput(self) -> float:
        """Input tokens a second; 0 where no time passed."""
        return self.num_input_tokens / self.execution_time_s if self.execution_time_s > 0 else 0.0

    @property
    def generation_throughput(self) -> float:
        """Tokens a second; a sequence counts as one token unless a TG batch says how many it gave."""
        if self.execution_time_s <= 0:
            return 0.0
        if self.num_output_tokens is not None and self.batch_type is BatchType.TG:
            return self.num_output_tokens / self.execution_time_s
        return self.batch_size / self.execution_time_s
