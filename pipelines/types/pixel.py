"""Images made from text: the request as it arrives, and the state of one that is being computed.

The request stays in the process that received it. What crosses is the `PixelContext`, in which text has become tokens
and parameters have become arrays: no string of a user reaches a device process.
"""

from dataclasses import dataclass, field
from typing import Generic

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypeVar

from pipelines.types.invalid_value import InvalidValue
from pipelines.types.pipeline import PipelineInputs
from pipelines.types.process_local import ProcessLocal
from pipelines.types.status import GenerationStatus
from pipelines.types.token_buffer import TokenBuffer
from pronghorn.ids import RequestID


@dataclass(frozen=True, eq=False)
class PixelGenerationRequest(ProcessLocal):
    """Raises InvalidValue for an empty prompt and for sizes and counts that are not above 0; guidance is free."""

    request_id: RequestID
    model_name: str
    prompt: str
    secondary_prompt: str | None = None
    """For a model with a second text encoder."""
    negative_prompt: str | None = None
    secondary_negative_prompt: str | None = None
    guidance_scale: float = 3.5
    true_cfg_scale: float = 1.0
    height: int | None = None
    """Pixels; the model's own where unset, as is `width`."""
    width: int | None = None
    num_inference_steps: int = 50
    num_images_per_prompt: int = 1
    seed: int | None = None
    input_image: NDArray[np.uint8] | None = None
    """[height, width, channels]: what is changed rather than made from nothing."""

    def __post_init__(self) -> None:
        if self.prompt == "":
            raise InvalidValue("prompt", self.prompt, "one character or more")
        for name in ("height", "width"):
            pixels = getattr(self, name)
            if pixels is not None and pixels <= 0:
                raise InvalidValue(name, pixels, "above 0, or absent")
        for name in ("num_inference_steps", "num_images_per_prompt"):
            if getattr(self, name) <= 0:
                raise InvalidValue(name, getattr(self, name), "above 0")

    def __str__(self) -> str:
        return str(self.request_id)


@dataclass(kw_only=True, eq=False)
class PixelContext:
    """Shapes of latents, ids and images are the model's own. Compared by identity, since it holds arrays."""

    tokens: TokenBuffer
    request_id: RequestID = field(default_factory=RequestID)
    model_name: str = ""
    status: GenerationStatus = GenerationStatus.ACTIVE

    mask: NDArray[np.bool_] | None = None
    """[len(tokens)]: False where a token is padding; the masks below likewise."""
    secondary_tokens: TokenBuffer | None = None
    secondary_mask: NDArray[np.bool_] | None = None
    negative_tokens: TokenBuffer | None = None
    negative_mask: NDArray[np.bool_] | None = None
    secondary_negative_tokens: TokenBuffer | None = None
    secondary_negative_mask: NDArray[np.bool_] | None = None

    timesteps: NDArray[np.float32] | None = None
    """[num_inference_steps]"""
    sigmas: NDArray[np.float32] | None = None
    latents: NDArray[np.float32] | None = None
    """The noise that the first step starts from."""
    latent_image_ids: NDArray[np.float32] | None = None
    text_ids: NDArray[np.int64] | None = None
    negative_text_ids: NDArray[np.int64] | None = None

    height: int = 1024
    """Pixels, as is `width`."""
    width: int = 1024
    num_inference_steps: int = 50
    num_warmup_steps: int = 0
    num_images_per_prompt: int = 1
    guidance_scale: float = 3.5
    true_cfg_scale: float = 1.0
    strength: float = 0.6
    """How far an input image is changed: 0 not at all, 1 wholly."""
    cfg_normalization: bool = False
    cfg_truncation: float = 1.0
    seed: int | None = None
    output_format: str = "jpeg"

    input_image: NDArray[np.uint8] | None = None
    """[height, width, channels]"""
    prompt_images: list[NDArray[np.uint8]] = field(default_factory=list)
    """As the text encoder sees them."""
    vae_images: list[NDArray[np.float32]] = field(default_factory=list)
    """As the autoencoder sees them."""

    @property
    def is_done(self) -> bool:
        return self.status.is_done


PixelContextT = TypeVar("PixelContextT", bound=PixelContext, default=PixelContext)


@dataclass(frozen=True)
class PixelGenerationInputs(PipelineInputs, Generic[PixelContextT]):
    batch: dict[RequestID, PixelContextT]
