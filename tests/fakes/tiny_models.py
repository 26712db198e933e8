"""Random checkpoints of a few thousand weights, in every shape that the decoder must get right."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

BASE: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "tied": {"tie_word_embeddings": True},
    "one_kv_head": {"num_key_value_heads": 1},
    "every_head_its_own": {"num_key_value_heads": 4},
    "heads_of_8": {"head_dim": 8},
    "heads_of_80": {"head_dim": 80},
    "llama3_rope": {"rope_parameters": LLAMA3_ROPE},
    "linear_rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "qkv_bias": {"qwen2": True},
}


def tiny_model(shape: str, folder: Path) -> Any:
    """The transformers model of SHAPES[shape], saved in `folder` as float32 safetensors."""
    changes = dict(SHAPES[shape])
    torch.manual_seed(7)
    if changes.pop("qwen2", False):
        settings = {key: value for key, value in BASE.items() if key != "head_dim"}
        model = Qwen2ForCausalLM(Qwen2Config(**settings))
        for layer in model.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                torch.nn.init.normal_(projection.bias)
    else:
        model = LlamaForCausalLM(LlamaConfig(**BASE | changes))
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    model.eval().save_pretrained(folder)
    return model
