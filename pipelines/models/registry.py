"""Which architectures the decoder computes, by the name that a checkpoint gives itself, and how each is no Llama.

Pure data. A new family is a new row (and a decoder, where it is not a Llama underneath).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Raw = Mapping[str, Any]
"""A config.json."""


def _all_windows(raw: Raw) -> list[bool]:
    return [True] * int(raw["num_hidden_layers"])


def _upper_windows(raw: Raw) -> list[bool]:
    """Qwen: the layers from `max_window_layers` on, where `use_sliding_window` is on (it is off by default)."""
    first = int(raw.get("max_window_layers", 28)) if raw.get("use_sliding_window") else int(raw["num_hidden_layers"])
    return [layer >= first for layer in range(int(raw["num_hidden_layers"]))]


def _all_rotary(raw: Raw) -> list[bool]:
    return [True] * int(raw["num_hidden_layers"])


def _some_rotary(raw: Raw) -> list[bool]:
    """SmolLM3: `no_rope_layers` holds 1 for a layer that does turn its heads; every fourth does not by default."""
    stated = raw.get("no_rope_layers")
    if stated is not None:
        return [bool(turned) for turned in stated]
    every = int(raw.get("no_rope_layer_interval", 4))
    return [(layer + 1) % every != 0 for layer in range(int(raw["num_hidden_layers"]))]


def _unturned_windows(raw: Raw) -> list[bool]:
    """SmolLM3: the layers without rotary positions, where `use_sliding_window` is on."""
    return [bool(raw.get("use_sliding_window")) and not turned for turned in _some_rotary(raw)]


@dataclass(frozen=True)
class Family:
    title: str
    qkv_bias: bool | None = None
    """Whether Q, K and V add a bias; None: where the checkpoint's `attention_bias` says so."""
    output_bias: bool | None = None
    """The same of the output projection."""
    qk_norm: bool = False
    """Each head of Q and K is normalised before it is turned."""
    windowed: Callable[[Raw], list[bool]] | None = None
    """Which layers see only the last `sliding_window` tokens, where the checkpoint has no `layer_types`; None: the
    family knows no windows."""
    rotary: Callable[[Raw], list[bool]] = _all_rotary
    """Which layers turn their heads by position."""
    default_window: int | None = None
    """`sliding_window` where the checkpoint does not mention it."""


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("Llama 2, 3, 3.1, 3.2; SmolLM, SmolLM2; TinyLlama"),
    "MistralForCausalLM": Family("Mistral", False, False, windowed=_all_windows, default_window=4096),
    "Qwen2ForCausalLM": Family("Qwen 2, 2.5", True, False, windowed=_upper_windows, default_window=4096),
    "Qwen3ForCausalLM": Family("Qwen 3", qk_norm=True, windowed=_upper_windows, default_window=4096),
    "SmolLM3ForCausalLM": Family("SmolLM3", windowed=_unturned_windows, rotary=_some_rotary),
}


@dataclass(frozen=True)
class GGUFArchitecture:
    name: str
    """The architecture above."""
    paired_rotary: bool = False
    """Its Q and K rows are stored with the two halves of a head interleaved."""


GGUF_ARCHITECTURES: dict[str, GGUFArchitecture] = {
    "llama": GGUFArchitecture("LlamaForCausalLM", paired_rotary=True),
    "qwen2": GGUFArchitecture("Qwen2ForCausalLM"),
    "qwen3": GGUFArchitecture("Qwen3ForCausalLM"),
    "smollm3": GGUFArchitecture("SmolLM3ForCausalLM", paired_rotary=True),
}
"""By `general.architecture` of a GGUF file. Mistral's files call themselves llama."""
