"""Sound made from text: the state of one request, and the batch of one step."""

from dataclasses import dataclass, field
from typing import Generic

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypeVar

from pipelines.types.pipeline import PipelineInputs
from pipelines.types.status import GenerationStatus
from pipelines.types.token_buffer import TokenBuffer
from pronghorn.ids import RequestID


@dataclass(kw_only=True, eq=False)
class AudioContext:
    """Compared by identity, since it holds an array."""

    tokens: TokenBuffer
    audio_duration: float
    """Seconds; an upper bound."""
    num_inference_steps: int
    negative_tokens: TokenBuffer | None = None
    request_id: RequestID = field(default_factory=RequestID)
    model_name: str = ""
    status: GenerationStatus = GenerationStatus.ACTIVE
    guidance_scale: float | None = None
    """None: the model's own."""
    seed: int | None = None
    audio_format: str = "wav"
    waveform: NDArray[np.float32] | None = None
    """[channels, samples], once it was computed."""

    @property
    def is_done(self) -> bool:
        return self.status.is_done


AudioContextT = TypeVar("AudioContextT", bound=AudioContext, default=AudioContext)


@dataclass(frozen=True)
class AudioGenerationInputs(PipelineInputs, Generic[AudioContextT]):
    batch: dict[RequestID, AudioContextT]
