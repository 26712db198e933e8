"""Which decoder computes a model: the compiled one on the CPU, the plain one elsewhere, and transformers' own for an
architecture that has no family here.
"""

from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from pipelines.models.config import ModelConfig
from pipelines.models.decoder import PlainDecoder
from pipelines.models.foreign_config import ForeignConfig
from pipelines.models.weights import open_weights
from pipelines.runtime.attention import PlainAttention
from pipelines.runtime.compiled_decoder import CompiledDecoder
from pipelines.runtime.config import EngineConfig
from pipelines.runtime.step import Step
from pipelines.runtime.transformers_decoder import TransformersDecoder
from pronghorn.errors import ConfigurationError


class Decoder(Protocol):
    def logits(self, step: Step) -> NDArray[np.float32]:
        """[rows sampled, vocab] float32. Writes the step's keys and values into the pool."""

    def close(self) -> None:
        """End what computes in the background. Idempotent."""


def build_decoder(model: ModelConfig, config: EngineConfig, pool: torch.Tensor, max_length: int) -> Decoder:
    """`pool` [num_blocks, layers, 2, kv_heads, block_tokens, head_dim]; its type is also that of native weights.

    Raises ConfigurationError where the model cannot be computed as asked.
    """
    folder = Path(config.model_path)
    if isinstance(model, ForeignConfig):
        return TransformersDecoder(model, folder, pool, _usable(config.device))
    weights = open_weights(folder)
    if config.device == "cpu":
        return CompiledDecoder(model, weights, pool, config.threads, max_length)
    attention = PlainAttention(pool, model.windows)
    return PlainDecoder(
        model, weights, attention, device=_usable(config.device), dtype=pool.dtype, max_length=max_length
    )


def _usable(device: str) -> str:
    """Raises ConfigurationError where torch cannot compute on `device`."""
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigurationError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from None
    return device
