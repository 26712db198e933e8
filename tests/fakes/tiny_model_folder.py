"""The folder of a model so small that many engines of it fit on one machine: random weights, a real tokenizer."""

import shutil
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.fakes.tokenizer_folder import write_tokenizer_folder

MAX_LENGTH = 1024
SHAPE = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": MAX_LENGTH,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_tiny_model(folder: Path, seed: int = 7) -> Path:
    """The same weights for the same seed."""
    tokenizer = write_tokenizer_folder(folder / "tokenizer")
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.move(tokenizer / name, folder / name)
    shutil.rmtree(tokenizer)
    return folder
