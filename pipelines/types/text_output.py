"""What a text pipeline gives back for one sequence after one step, or after several merged."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipelines.types.log_probabilities import LogProbabilities
from pipelines.types.sampled_token import SampledToken
from pipelines.types.status import GenerationStatus
from pronghorn.ids import RequestID


@dataclass(kw_only=True)
class TextGenerationOutput:
    request_id: RequestID
    tokens: list[int]
    """New since the output before; may be empty on the last one."""
    final_status: GenerationStatus
    log_probabilities: list[LogProbabilities] | None = None
    num_cached_tokens: int | None = None
    """Prompt tokens whose KV was not computed for this request."""
    choice: int = 0
    """Which of the request's sequences this is of."""
    siblings: list[SampledToken] = field(default_factory=list)
    """The first tokens of the request's other choices, in order, beside that of the first one."""
    prompt_log_probabilities: LogProbabilities | None = None
    """Of the prompt's tokens from the second on; once, with the first token."""

    @property
    def is_done(self) -> bool:
        return self.final_status.is_done

    @classmethod
    def merge(cls, outputs: Sequence["TextGenerationOutput"]) -> "TextGenerationOutput":
        """The outputs of one request, in order, as one. ValueError where there are none, or only some carry
        log probabilities."""
        if not outputs:
            raise ValueError("there are no outputs to merge")
        if len(outputs) == 1:
            return outputs[0]
        present = [output.log_probabilities for output in outputs if output.log_probabilities is not None]
        if present and len(present) != len(outputs):
            raise ValueError(f"{len(present)} of {len(outputs)} outputs carry log probabilities; all or none must")
        return cls(
            request_id=outputs[0].request_id,
            tokens=[token for output in outputs for token in output.tokens],
            final_status=outputs[-1].final_status,
            log_probabilities=[entry for entries in present for entry in entries] if present else None,
            num_cached_tokens=outputs[0].num_cached_tokens,
            choice=outputs[0].choice,
            siblings=outputs[0].siblings,
            prompt_log_probabilities=outputs[0].prompt_log_probabilities,
        )
