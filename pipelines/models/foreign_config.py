"""The shape of a decoder of an architecture that only `transformers` computes, read from config.json without torch.

Checkpoints spell the same number in several ways; the spellings are in a table. What keeps no keys and values of the
standard kind, so that paged blocks cannot hold its state, is refused here by name; what cannot be seen in a config.json
is refused by the engine (`runtime/transformers_decoder.py`).
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from pronghorn.errors import ConfigurationError

_SPELLINGS: dict[str, tuple[str, ...]] = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "max_positions": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
}
_DECODER_ONLY = ("ForCausalLM", "LMHeadModel")
_RECURRENT_STATE = ("ssm_cfg", "state_size", "mamba_d_state", "conv_kernel", "conv_L_cache", "time_mix_extra_dim")
_LAYER_TYPES = ("full_attention", "sliding_attention")
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class ForeignConfig(msgspec.Struct, frozen=True):
    architecture: str
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    windows: tuple[int | None, ...]
    """Of each layer: how many tokens back a token sees, itself among them; None: all."""


def parse_foreign(architecture: str, raw: Mapping[str, Any]) -> ForeignConfig:
    """Raises ConfigurationError, naming the architecture and what about it cannot be served."""
    _refuse_other_kinds(architecture, raw)
    values = {field: _value(architecture, raw, names) for field, names in _SPELLINGS.items()}
    hidden_size = values.pop("hidden_size")
    kv_heads = raw.get("num_key_value_heads") or raw.get("num_kv_heads") or raw.get("multi_query") and 1
    return ForeignConfig(
        architecture=architecture,
        num_kv_heads=int(kv_heads or values["num_heads"]),
        head_dim=int(raw.get("head_dim") or hidden_size // values["num_heads"]),
        windows=_windows(architecture, raw, values["num_layers"]),
        **values,
    )


def _value(architecture: str, raw: Mapping[str, Any], names: tuple[str, ...]) -> int:
    for name in names:
        if isinstance(raw.get(name), int):
            return int(raw[name])
    raise ConfigurationError(f"{architecture}: config.json says nothing of {' or '.join(names)}")


def _windows(architecture: str, raw: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    window = raw.get("sliding_window") if raw.get("use_sliding_window", True) else None
    kinds = raw.get("layer_types") or ["full_attention" if window is None else "sliding_attention"] * num_layers
    if len(kinds) != num_layers:
        raise ConfigurationError(f"{architecture}: layer_types has {len(kinds)} entries, the model {num_layers} layers")
    return tuple(int(window) if window and kind == "sliding_attention" else None for kind in kinds)


def _refuse_other_kinds(architecture: str, raw: Mapping[str, Any]) -> None:
    def refuse(why: str) -> None:
        raise ConfigurationError(f"the model's architecture {architecture!r} is not supported: {why}")

    if raw.get("is_encoder_decoder"):
        refuse("it has an encoder")
    if not architecture.endswith(_DECODER_ONLY):
        refuse("it is not a decoder of text")
    for field in _RECURRENT_STATE:
        if raw.get(field):
            refuse(f"it keeps a recurrent state ({field})")
    if raw.get("kv_lora_rank"):
        refuse("it keeps compressed keys and values (kv_lora_rank)")
    for kind in raw.get("layer_types") or ():
        if kind not in _LAYER_TYPES:
            refuse(f"it has layers of type {kind!r}")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kinds = [rope] if "rope_type" in rope or "type" in rope or not rope else [r for r in rope.values() if r]
    for each in kinds:
        kind = each.get("rope_type") or each.get("type") or "default" if isinstance(each, dict) else "default"
        if kind not in _ROPE_TYPES:
            refuse(f"its rope scaling {kind!r} depends on how long the longest sequence of a batch is")
    if raw.get("quantization_config"):
        refuse(f"its weights are quantised ({raw['quantization_config'].get('quant_method', 'unnamed')})")
