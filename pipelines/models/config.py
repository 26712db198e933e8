"""The shape of a decoder, read from a checkpoint's config.json. No weights are opened here, and torch is not needed.

Field names follow what they measure, not the checkpoint's spelling. Anything that this code would compute wrongly
(another rope scaling, another activation) is refused here, by name; another architecture is `foreign_config.py`'s.
"""

import json
import math
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pipelines.models.foreign_config import ForeignConfig, parse_foreign
from pipelines.models.registry import FAMILIES, Family
from pronghorn.errors import ConfigurationError

CONFIG_FILE = "config.json"

T = TypeVar("T")


class Llama3RopeScaling(msgspec.Struct, frozen=True):
    """Llama 3.1's stretch of the low frequencies (transformers' `rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


class LinearRopeScaling(msgspec.Struct, frozen=True):
    """Positions divided by `factor`."""

    factor: float


class YarnRopeScaling(msgspec.Struct, frozen=True):
    """Frequencies between `beta_fast` and `beta_slow` turns over the original length blend into those divided by
    `factor`, and cosines and sines grow by `attention_factor` (Peng et al. 2023)."""

    factor: float
    attention_factor: float
    beta_fast: float
    beta_slow: float
    original_max_positions: int
    whole_dimensions: bool


class StoredRopeScaling(msgspec.Struct, frozen=True):
    """Each frequency divided by a factor of its own, as a GGUF file's `rope_freqs` holds them."""

    factors: tuple[float, ...]


RopeScaling = Llama3RopeScaling | LinearRopeScaling | YarnRopeScaling | StoredRopeScaling


class DecoderConfig(msgspec.Struct, frozen=True):
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    """Of each layer: how many tokens back a token sees, itself among them; None: all."""
    rotary: tuple[bool, ...]
    """Of each layer: whether queries and keys are turned by position."""


ModelConfig = DecoderConfig | ForeignConfig
"""Of a model that the decoders of this project compute, or of one that `transformers` computes."""


def read_config(folder: Path) -> ModelConfig:
    """Raises ConfigurationError where config.json is missing, damaged or asks for something unsupported."""
    path = folder / CONFIG_FILE
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigurationError(f"no model at {folder}: {CONFIG_FILE} is missing") from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigurationError(f"{path} is not a JSON object")
    try:
        return parse_config(raw)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error.message}") from None
    except KeyError as error:
        raise ConfigurationError(f"{path} has no field {error}") from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigurationError(f"{path} is damaged: {error}") from None


def parse_config(raw: dict[str, Any]) -> ModelConfig:
    """Raises KeyError for a missing field and ConfigurationError for what is not supported."""
    architectures = raw.get("architectures") or [f"unnamed ({raw.get('model_type', 'no model_type')})"]
    architecture = str(architectures[0])
    if architecture not in FAMILIES:
        return parse_foreign(architecture, raw)
    return parse_native(architecture, raw)


def parse_native(architecture: str, raw: dict[str, Any]) -> DecoderConfig:
    family = FAMILIES[architecture]
    _refuse_what_differs(raw)
    num_heads = int(raw["num_attention_heads"])
    hidden_size = int(raw["hidden_size"])
    # transformers 5 nests all of it in rope_parameters; 4 wrote rope_theta beside rope_scaling.
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    attention_bias = bool(raw.get("attention_bias", False))
    rotary = _of_every_layer("no_rope_layers", family.rotary(raw), raw)
    return DecoderConfig(
        architecture=architecture,
        vocab_size=int(raw["vocab_size"]),
        hidden_size=hidden_size,
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=int(raw["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
        head_dim=int(raw.get("head_dim") or hidden_size // num_heads),
        max_positions=int(raw["max_position_embeddings"]),
        rms_norm_eps=float(raw["rms_norm_eps"]),
        rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
        rope_scaling=_rope_scaling(rope, int(raw["max_position_embeddings"])),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=attention_bias if family.output_bias is None else family.output_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        windows=_windows(raw, family),
        rotary=rotary,
    )


def _windows(raw: dict[str, Any], family: Family) -> tuple[int | None, ...]:
    window = raw.get("sliding_window", family.default_window)
    if window is not None and int(window) < 1:
        raise ConfigurationError(f"sliding_window: {window} is not above 0")
    reach = None if window is None or int(window) >= int(raw["max_position_embeddings"]) else int(window)
    if family.windowed is None:
        if reach is not None and raw.get("use_sliding_window", True):
            raise ConfigurationError(f"sliding_window: {window} is not supported by this architecture")
        return (None,) * int(raw["num_hidden_layers"])
    stated = raw.get("layer_types")
    for kind in stated or ():
        if kind not in ("full_attention", "sliding_attention"):
            raise ConfigurationError(f"layer_types: the layer type {kind!r} is not supported")
    if stated is None:
        windowed = family.windowed(raw)
    else:
        windowed = [kind == "sliding_attention" for kind in stated]
    return _of_every_layer("layer_types", [reach if limited else None for limited in windowed], raw)


def _of_every_layer(field: str, values: list[T], raw: dict[str, Any]) -> tuple[T, ...]:
    if len(values) != int(raw["num_hidden_layers"]):
        raise ConfigurationError(f"{field} has {len(values)} entries, num_hidden_layers is {raw['num_hidden_layers']}")
    return tuple(values)


def _refuse_what_differs(raw: dict[str, Any]) -> None:
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ConfigurationError(f"the model's activation {raw['hidden_act']!r} is not supported; supported: silu")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unnamed")
        raise ConfigurationError(f"the model's quantization {method!r} is not supported; give plain or GGUF weights")
    partial = (raw.get("rope_parameters") or {}).get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if float(partial) != 1.0:
        raise ConfigurationError(f"partial_rotary_factor: {partial} is not supported; supported: 1.0")


def _rope_scaling(rope: dict[str, Any], max_positions: int) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    match kind:
        case "default":
            return None
        case "linear":
            return LinearRopeScaling(float(rope["factor"]))
        case "llama3":
            return Llama3RopeScaling(
                factor=float(rope["factor"]),
                low_freq_factor=float(rope["low_freq_factor"]),
                high_freq_factor=float(rope["high_freq_factor"]),
                original_max_positions=int(rope["original_max_position_embeddings"]),
            )
        case "yarn":
            return _yarn(rope, max_positions)
        case "stored":
            return StoredRopeScaling(tuple(float(factor) for factor in rope["factors"]))
        case _:
            raise ConfigurationError(
                f"the model's rope scaling {kind!r} is not supported; supported: linear, llama3, yarn"
            )


def _yarn(rope: dict[str, Any], max_positions: int) -> YarnRopeScaling:
    """Defaults as in transformers' `modeling_rope_utils._compute_yarn_parameters`."""
    original = int(rope.get("original_max_position_embeddings") or max_positions)
    factor = float(rope.get("factor") or max_positions / original)

    def growth(scale: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0

    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        scale, scale_all = float(rope.get("mscale") or 0.0), float(rope.get("mscale_all_dim") or 0.0)
        attention_factor = growth(scale) / growth(scale_all) if scale and scale_all else growth(1.0)
    return YarnRopeScaling(
        factor=factor,
        attention_factor=float(attention_factor),
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        original_max_positions=original,
        whole_dimensions=bool(rope.get("truncate", True)),
    )
