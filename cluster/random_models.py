"""Small checkpoints with random weights, one for each shape that a family of models can have: what the decoder is held
to `transformers` on where no real checkpoint is at hand.
"""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SEED = 7

BASE: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


LEFT_OUT = object()
"""Of BASE: the architecture's own default stands, or it has no such field."""
OWN_HEADS = {"head_dim": LEFT_OUT}


@dataclass(frozen=True)
class RandomModel:
    model_type: str
    """As transformers' AutoConfig knows it."""
    changes: dict[str, Any]
    routed: bool = False
    """Its tokens go to experts: rounding sends one elsewhere where two experts are nearly as good."""


RANDOM_MODELS: dict[str, RandomModel] = {
    "llama": RandomModel("llama", {}),
    "llama, tied embeddings": RandomModel("llama", {"tie_word_embeddings": True}),
    "llama, every bias": RandomModel("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, 3.1's rope": RandomModel(
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "llama, linear rope": RandomModel(
        "llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}
    ),
    "mistral": RandomModel("mistral", {"sliding_window": None}),
    "mistral, window": RandomModel("mistral", {"sliding_window": 20}),
    "qwen2": RandomModel("qwen2", OWN_HEADS),
    "qwen2, YaRN": RandomModel(
        "qwen2",
        {
            "head_dim": LEFT_OUT,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen2, upper windows": RandomModel(
        "qwen2", {"head_dim": LEFT_OUT, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
    ),
    "qwen3": RandomModel("qwen3", {"tie_word_embeddings": True}),
    "qwen3, bias": RandomModel("qwen3", {"attention_bias": True}),
    "smollm3": RandomModel("smollm3", {"num_hidden_layers": 5}),
    "smollm3, window": RandomModel(
        "smollm3", {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 19}
    ),
}

FOREIGN_MODELS: dict[str, RandomModel] = {
    "gemma": RandomModel("gemma", {}),
    "gemma2, windows and soft caps": RandomModel("gemma2", {"sliding_window": 20, "attn_logit_softcapping": 20.0}),
    "gemma3, windows": RandomModel("gemma3_text", {"sliding_window": 20, "rope_parameters": LEFT_OUT}),
    "phi": RandomModel("phi", {"head_dim": LEFT_OUT}),
    "phi3": RandomModel("phi3", OWN_HEADS),
    "gpt_neox": RandomModel("gpt_neox", {"head_dim": LEFT_OUT, "num_key_value_heads": LEFT_OUT}),
    "gpt2": RandomModel(
        "gpt2", {"head_dim": LEFT_OUT, "num_key_value_heads": LEFT_OUT, "n_positions": 512, "rope_parameters": LEFT_OUT}
    ),
    "olmo2": RandomModel("olmo2", OWN_HEADS),
    "granite": RandomModel("granite", {"head_dim": LEFT_OUT, "attention_multiplier": 0.2, "residual_multiplier": 0.7}),
    "mixtral, experts": RandomModel("mixtral", {"num_local_experts": 4, "sliding_window": None}, routed=True),
}
"""Architectures without a decoder here, which transformers' modules compute."""


def write_random_model(model: RandomModel, folder: Path) -> PreTrainedModel:
    """Saved in `folder` as float32 safetensors, and returned. Norms and biases are random, too."""
    left_out = {key for key, value in model.changes.items() if value is LEFT_OUT}
    # A copy: transformers writes into the rope_parameters that it is given.
    settings = copy.deepcopy({key: value for key, value in (BASE | model.changes).items() if key not in left_out})
    torch.manual_seed(SEED)
    made: PreTrainedModel = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model.model_type, **settings), dtype=torch.float32
    )
    for name, weight in made.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
        elif name.endswith(".bias"):
            torch.nn.init.normal_(weight)
    made.eval().save_pretrained(folder)
    return made
