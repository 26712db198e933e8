"""The folder of a model so small that many engines of it fit on one machine: random weights, a real tokenizer."""

import shutil
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.fakes.tiny_models import BASE
from tests.fakes.tokenizer_folder import write_tokenizer_folder

MAX_LENGTH = 1024


def write_tiny_model(folder: Path) -> Path:
    """Always the same weights."""
    tokenizer = write_tokenizer_folder(folder / "tokenizer")
    torch.manual_seed(7)
    shape = {**BASE, "vocab_size": 320, "max_position_embeddings": MAX_LENGTH, "bos_token_id": 1, "eos_token_id": 2}
    LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.move(tokenizer / name, folder / name)
    shutil.rmtree(tokenizer)
    return folder
