"""What a text pipeline gives back for one sequence after one step, or after several merged."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipelines.types.log_probabilities import LogProbabilities
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
        )
