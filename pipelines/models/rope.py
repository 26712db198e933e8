"""Rotary position embedding as tables. Formulas: Su et al. 2021 (RoFormer); the stretch of Llama 3.1 as transformers'
`modeling_rope_utils._compute_llama3_parameters` states it.
"""

import math

import torch

from pipelines.models.config import DecoderConfig, LinearRopeScaling, Llama3RopeScaling


def inverse_frequencies(config: DecoderConfig) -> torch.Tensor:
    """[head_dim / 2] float32, radians a position."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    plain = 1.0 / (config.rope_theta**exponents)
    match config.rope_scaling:
        case None:
            return plain
        case LinearRopeScaling(factor):
            return plain / factor
        case Llama3RopeScaling() as scaling:
            return _llama3(plain, scaling)


def _llama3(plain: torch.Tensor, scaling: Llama3RopeScaling) -> torch.Tensor:
    wavelengths = 2 * math.pi / plain
    long = scaling.original_max_positions / scaling.low_freq_factor
    short = scaling.original_max_positions / scaling.high_freq_factor
    blend = (scaling.original_max_positions / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    smooth = (1 - blend) * plain / scaling.factor + blend * plain
    stretched = torch.where(wavelengths > long, plain / scaling.factor, smooth)
    return torch.where(wavelengths < short, plain, stretched)


def rope_tables(config: DecoderConfig, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, each [num_positions, head_dim / 2] float32."""
    angles = torch.arange(num_positions).float()[:, None] * inverse_frequencies(config)[None, :]
    return angles.cos(), angles.sin()
