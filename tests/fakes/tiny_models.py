"""Random checkpoints of a few thousand weights, in every shape that the decoder must get right."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

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
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64}

LLAMA, MISTRAL = (LlamaConfig, LlamaForCausalLM), (MistralConfig, MistralForCausalLM)
QWEN2, QWEN3 = (Qwen2Config, Qwen2ForCausalLM), (Qwen3Config, Qwen3ForCausalLM)
SMOLLM3 = (SmolLM3Config, SmolLM3ForCausalLM)

SHAPES: dict[str, tuple[tuple[Any, Any], dict[str, Any]]] = {
    "grouped": (LLAMA, {}),
    "tied": (LLAMA, {"tie_word_embeddings": True}),
    "one_kv_head": (LLAMA, {"num_key_value_heads": 1}),
    "every_head_its_own": (LLAMA, {"num_key_value_heads": 4}),
    "heads_of_8": (LLAMA, {"head_dim": 8}),
    "heads_of_80": (LLAMA, {"head_dim": 80}),
    "llama3_rope": (LLAMA, {"rope_parameters": LLAMA3_ROPE}),
    "linear_rope": (LLAMA, {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "yarn_rope": (LLAMA, {"rope_parameters": YARN_ROPE}),
    "every_bias": (LLAMA, {"attention_bias": True, "mlp_bias": True}),
    "mistral": (MISTRAL, {"sliding_window": None}),
    "mistral_window": (MISTRAL, {"sliding_window": 20}),
    "mistral_window_of_1": (MISTRAL, {"sliding_window": 1}),
    "mistral_window_of_a_block": (MISTRAL, {"sliding_window": 32}),
    "qwen2": (QWEN2, {"head_dim": None}),
    "qwen2_window": (
        QWEN2,
        {"head_dim": None, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen3": (QWEN3, {"tie_word_embeddings": True}),
    "qwen3_bias": (QWEN3, {"attention_bias": True}),
    "smollm3": (SMOLLM3, {"no_rope_layer_interval": 2, "pad_token_id": 0}),
    "smollm3_every_4": (SMOLLM3, {"num_hidden_layers": 5, "pad_token_id": 0}),
    "smollm3_window": (
        SMOLLM3,
        {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 19, "pad_token_id": 0},
    ),
}


def tiny_model(shape: str, folder: Path) -> Any:
    """The transformers model of SHAPES[shape], saved in `folder` as float32 safetensors."""
    (config, kind), changes = SHAPES[shape]
    torch.manual_seed(7)
    model = kind(config(**{key: value for key, value in (BASE | changes).items() if key != "head_dim" or value}))
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
        elif name.endswith(".bias"):
            torch.nn.init.normal_(weight)
    model.eval().save_pretrained(folder)
    return model
