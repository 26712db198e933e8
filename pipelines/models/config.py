"""The shape of a decoder, read from a checkpoint's config.json. No weights are opened here, and torch is not needed.

Field names follow what they measure, not the checkpoint's spelling. Anything that this code would compute wrongly
(another architecture, another rope scaling, a sliding window) is refused here, by name.
"""

import json
from pathlib import Path
from typing import Any

import msgspec

from pipelines.models.registry import family_of
from pronghorn.errors import ConfigurationError

CONFIG_FILE = "config.json"


class Llama3RopeScaling(msgspec.Struct, frozen=True):
    """Llama 3.1's stretch of the low frequencies (transformers' `rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


class LinearRopeScaling(msgspec.Struct, frozen=True):
    """Positions divided by `factor`."""

    factor: float


RopeScaling = Llama3RopeScaling | LinearRopeScaling


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


def read_config(folder: Path) -> DecoderConfig:
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


def parse_config(raw: dict[str, Any]) -> DecoderConfig:
    """Raises KeyError for a missing field and ConfigurationError for what is not supported."""
    architectures = raw.get("architectures") or [f"unnamed ({raw.get('model_type', 'no model_type')})"]
    architecture = str(architectures[0])
    family = family_of(architecture)
    _refuse_what_differs(raw)
    num_heads = int(raw["num_attention_heads"])
    hidden_size = int(raw["hidden_size"])
    # transformers 5 nests all of it in rope_parameters; 4 wrote rope_theta beside rope_scaling.
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
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
        rope_scaling=_rope_scaling(rope),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias,
    )


def _refuse_what_differs(raw: dict[str, Any]) -> None:
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ConfigurationError(f"the model's activation {raw['hidden_act']!r} is not supported; supported: silu")
    for field in ("attention_bias", "mlp_bias"):
        if raw.get(field):
            raise ConfigurationError(f"the model's {field} is not supported")
    window = raw.get("sliding_window")
    if window and raw.get("use_sliding_window", True) and window < raw["max_position_embeddings"]:
        raise ConfigurationError(f"the model's sliding attention window of {window} tokens is not supported")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unnamed")
        raise ConfigurationError(f"the model's quantization {method!r} is not supported; give plain or GGUF weights")


def _rope_scaling(rope: dict[str, Any]) -> RopeScaling | None:
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
        case _:
            raise ConfigurationError(f"the model's rope scaling {kind!r} is not supported; supported: linear, llama3")
