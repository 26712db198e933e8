"""Llama-family GGUF files: metadata as a config.json, tensors under Hugging Face names, dequantised to float32.

llama.cpp stores the Q and K rows of some architectures with each head's two rotary halves interleaved; they are put
back into halves here. What a file stretches its rotary frequencies by is a tensor in it, and goes into the config.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from pipelines.models.registry import GGUF_ARCHITECTURES
from pronghorn.errors import ConfigurationError

_LEAVES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROOTS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ROPE_FACTORS = "rope_freqs.weight"
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROOT = re.compile(r"(\w+)\.(weight|bias)")


class GGUFFile:
    """A memory-mapped GGUF file. Raises ConfigurationError where it is missing, damaged or of another architecture."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = gguf.GGUFReader(str(path))
        except FileNotFoundError:
            raise ConfigurationError(f"no model at {path}: there is no such file") from None
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise ConfigurationError(f"{path} is not a whole GGUF file: {error}") from None
        self.metadata: dict[str, Any] = {name: field.contents() for name, field in self._reader.fields.items()}
        kind = str(self.metadata.get("general.architecture"))
        if kind not in GGUF_ARCHITECTURES:
            raise ConfigurationError(
                f"{path}: the GGUF architecture {kind!r} is not supported; supported: {', '.join(GGUF_ARCHITECTURES)}"
            )
        self._kind = kind
        self._architecture = GGUF_ARCHITECTURES[kind]
        self._names = {_hugging_face_name(t.name): t for t in self._reader.tensors if t.name != _ROPE_FACTORS}
        self._rope_factors = next((t for t in self._reader.tensors if t.name == _ROPE_FACTORS), None)

    def _value(self, key: str) -> Any:
        name = f"{self._kind}.{key}"
        if name not in self.metadata:
            raise ConfigurationError(f"{self.path} has no metadata {name}")
        return self.metadata[name]

    def hugging_face_config(self) -> dict[str, Any]:
        """What config.json would say."""
        heads = int(self._value("attention.head_count"))
        hidden = int(self._value("embedding_length"))
        get = self.metadata.get
        rope: dict[str, Any] = {
            "rope_theta": float(get(f"{self._kind}.rope.freq_base", 10000.0)),
            "rope_type": str(get(f"{self._kind}.rope.scaling.type", "default")).replace("none", "default"),
        }
        if self._rope_factors is not None:
            rope |= {"rope_type": "stored", "factors": [float(factor) for factor in self._rope_factors.data.ravel()]}
        elif rope["rope_type"] != "default":
            rope["factor"] = float(self._value("rope.scaling.factor"))
            rope["original_max_position_embeddings"] = get(f"{self._kind}.rope.scaling.original_context_length")
        window = get(f"{self._kind}.attention.sliding_window")
        return {
            # Mistral's files call themselves llama.
            "architectures": ["MistralForCausalLM" if self._kind == "llama" and window else self._architecture.name],
            "model_type": self._kind,
            "vocab_size": len(get("tokenizer.ggml.tokens", [])) or int(self._value("vocab_size")),
            "hidden_size": hidden,
            "intermediate_size": int(self._value("feed_forward_length")),
            "num_hidden_layers": int(self._value("block_count")),
            "num_attention_heads": heads,
            "num_key_value_heads": int(get(f"{self._kind}.attention.head_count_kv", heads)),
            "head_dim": int(get(f"{self._kind}.attention.key_length", hidden // heads)),
            "max_position_embeddings": int(self._value("context_length")),
            # Stored as float32 of a decimal such as 1e-5: give the decimal back.
            "rms_norm_eps": float(
                np.format_float_scientific(np.float32(self._value("attention.layer_norm_rms_epsilon")))
            ),
            "rope_parameters": rope,
            "rope_theta": rope["rope_theta"],
            "hidden_act": "silu",
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in self._names,
            "mlp_bias": "model.layers.0.mlp.up_proj.bias" in self._names,
            "sliding_window": window,
            "tie_word_embeddings": "lm_head.weight" not in self._names,
            "bos_token_id": get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": get("tokenizer.ggml.eos_token_id"),
            "dtype": "float32",
            "torch_dtype": "float32",
        }

    @property
    def names(self) -> list[str]:
        return list(self._names)

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Dequantised, in its own memory. Raises ConfigurationError for a quantisation that gguf cannot read."""
        stored = self._names[name]
        try:
            values = gguf.quants.dequantize(stored.data, stored.tensor_type)
        except NotImplementedError:
            raise ConfigurationError(f"{self.path}: the type {stored.tensor_type.name} is not supported") from None
        shape = [int(n) for n in reversed(stored.shape)]
        values = np.array(values, dtype=np.float32).reshape(shape)
        if not self._architecture.paired_rotary:
            return values
        if ".attn_q." in stored.name:
            return _halves(values, int(self._value("attention.head_count")))
        if ".attn_k." in stored.name:
            heads = self.metadata.get(f"{self._kind}.attention.head_count_kv", self._value("attention.head_count"))
            return _halves(values, int(heads))
        return values

    def tensors(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        for name in self._names:
            yield name, self.tensor(name)


def _halves(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """[heads * (dim / 2) * 2, ...] with pairs interleaved -> [heads * 2 * (dim / 2), ...]."""
    paired = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(rows.shape)


def _hugging_face_name(name: str) -> str:
    if (layer := _LAYER.fullmatch(name)) and layer[2] in _LEAVES:
        return f"model.layers.{layer[1]}.{_LEAVES[layer[2]]}.{layer[3]}"
    if (root := _ROOT.fullmatch(name)) and root[1] in _ROOTS:
        return f"{_ROOTS[root[1]]}.{root[2]}"
    return name
