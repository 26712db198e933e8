"""A GGUF file as a Hugging Face folder: either converted to float32 safetensors, or with the GGUF itself linked in."""

import json
import os
from pathlib import Path

from safetensors.numpy import save_file

from pipelines.models.config import CONFIG_FILE
from pipelines.models.gguf_file import GGUFFile
from pipelines.models.gguf_tokenizer import write_tokenizer

SAFETENSORS_FILE = "model.safetensors"
LINKED_GGUF_FILE = "model.gguf"


def convert_gguf(source: Path, folder: Path) -> None:
    """Write config, tokenizer and dequantised weights into `folder`. Raises ConfigurationError; OSError when full."""
    file = GGUFFile(source)
    _write_settings(file, folder)
    save_file(dict(file.tensors()), folder / SAFETENSORS_FILE, metadata={"format": "pt"})
    (folder / SAFETENSORS_FILE).chmod((folder / CONFIG_FILE).stat().st_mode)  # safetensors makes it private


def link_gguf(source: Path, folder: Path) -> None:
    """Write config and tokenizer into `folder`, and a link to `source` for the weights."""
    _write_settings(GGUFFile(source), folder)
    os.symlink(source.resolve(), folder / LINKED_GGUF_FILE)


def _write_settings(file: GGUFFile, folder: Path) -> None:
    config = file.hugging_face_config()
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_tokenizer(file.metadata, folder, max_length=config["max_position_embeddings"])
