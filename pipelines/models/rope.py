"""Rotary position embedding as tables. Formulas: Su et al. 2021 (RoFormer); the stretch of Llama 3.1 and YaRN (Peng et
al. 2023) as transformers' `modeling_rope_utils` states them.
"""

import math

import torch

from pipelines.models.config import (
    DecoderConfig,
    LinearRopeScaling,
    Llama3RopeScaling,
    StoredRopeScaling,
    YarnRopeScaling,
)


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
        case YarnRopeScaling() as scaling:
            return _yarn(plain, scaling, config)
        case StoredRopeScaling(factors):
            return plain / torch.tensor(factors)


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


def _yarn(plain: torch.Tensor, scaling: YarnRopeScaling, config: DecoderConfig) -> torch.Tensor:
    def dimension(turns: float) -> float:
        """That turns so often over the original length."""
        reach = scaling.original_max_positions / (turns * 2 * math.pi)
        return config.head_dim * math.log(reach) / (2 * math.log(config.rope_theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.whole_dimensions:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    width = high - low if high != low else 0.001
    stretch = ((torch.arange(len(plain), dtype=torch.float32) - low) / width).clamp(0, 1)
    return plain / scaling.factor * stretch + plain * (1 - stretch)


def rope_tables(config: DecoderConfig, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, each [num_positions, head_dim / 2] float32."""
    angles = torch.arange(num_positions).float()[:, None] * inverse_frequencies(config)[None, :]
    growth = config.rope_scaling.attention_factor if isinstance(config.rope_scaling, YarnRopeScaling) else 1.0
    return angles.cos() * growth, angles.sin() * growth
