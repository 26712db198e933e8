"""A tiny GGUF file made of a Hugging Face folder, the way llama.cpp's converter lays it out."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from pipelines.models.config import DecoderConfig

_LEAVES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
}  # fmt: skip
_ROOTS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(
    path: Path,
    config: DecoderConfig,
    folder: Path,
    *,
    architecture: str = "llama",
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    pre_tokenizer: str = "smollm",
    rope_factors: np.ndarray[Any, Any] | None = None,
) -> None:
    writer = gguf.GGUFWriter(str(path), arch=architecture)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if (window := next(iter(config.windows))) is not None:
        writer.add_sliding_window(window)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors)
    _add_tokenizer(writer, config.vocab_size, pre_tokenizer)
    for name, values in load_file(folder / "model.safetensors").items():
        stored, kind_of_tensor = name.rsplit(".", 1)
        if stored in _ROOTS:
            target = _ROOTS[stored]
        else:
            _, _, layer, leaf = stored.split(".", 3)
            target = f"blk.{layer}.{_LEAVES[leaf]}"
        paired = architecture in ("llama", "smollm3")
        if paired and target.endswith(".attn_q"):
            values = _interleaved(values, config.num_heads)
        if paired and target.endswith(".attn_k"):
            values = _interleaved(values, config.num_kv_heads)
        kind = gguf.GGMLQuantizationType.F32 if values.ndim == 1 else quantization
        writer.add_tensor(f"{target}.{kind_of_tensor}", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int, pre_tokenizer: str) -> None:
    """Three control tokens, then letters and bytes of the byte alphabet, one merge."""
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = [chr(c) for c in range(33, 127)] + ["Ġ", "Ċ"]
    tokens = control + letters + ["th", "the", "<think>"]
    tokens += [f"filler{i}" for i in range(vocab_size - len(tokens))]
    kinds = [3] * 3 + [1] * (len(tokens) - 3)
    kinds[tokens.index("<think>")] = 4
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")


def _interleaved(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)
