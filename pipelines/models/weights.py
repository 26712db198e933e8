"""A checkpoint's tensors by name, memory-mapped where the file format allows it, so that processes share the pages.

Safetensors come as views of the mapping: whoever packs or fuses them makes the copy, and pays for it per process.
A GGUF is dequantised to float32 tensor by tensor, in memory of this process.
"""

import json
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from pipelines.models.config import DecoderConfig, ModelConfig
from pipelines.models.conversion import LINKED_GGUF_FILE, SAFETENSORS_FILE
from pipelines.models.foreign_config import ForeignConfig
from pipelines.models.gguf_file import GGUFFile
from pronghorn.errors import ConfigurationError

INDEX_FILE = "model.safetensors.index.json"


class Weights(Protocol):
    def names(self) -> set[str]: ...

    def tensor(self, name: str) -> torch.Tensor:
        """In the stored type. Not to be written to. Raises ConfigurationError where there is none of that name."""


class SafetensorsWeights:
    """One safetensors file or several, opened without reading them."""

    def __init__(self, paths: list[Path]) -> None:
        self._files: dict[str, Any] = {}
        for path in paths:
            try:
                file = safe_open(path, framework="pt")
            except FileNotFoundError:
                raise ConfigurationError(f"{path} is missing") from None
            except (SafetensorError, OSError) as error:
                raise ConfigurationError(f"{path} is damaged: {error}") from None
            self._files.update(dict.fromkeys(file.keys(), file))  # type: ignore[no-untyped-call]  # no types there

    def names(self) -> set[str]:
        return set(self._files)

    def tensor(self, name: str) -> torch.Tensor:
        if name not in self._files:
            raise ConfigurationError(f"the checkpoint has no tensor {name}")
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor


class GGUFWeights:
    def __init__(self, path: Path) -> None:
        self._file = GGUFFile(path)

    def names(self) -> set[str]:
        return set(self._file.names)

    def tensor(self, name: str) -> torch.Tensor:
        if name not in self.names():
            raise ConfigurationError(f"{self._file.path} has no tensor {name}")
        return torch.from_numpy(self._file.tensor(name))


def open_weights(folder: Path) -> Weights:
    """Raises ConfigurationError where `folder` holds no whole weights."""
    if (folder / INDEX_FILE).is_file():
        try:
            index = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))["weight_map"]
            shards = sorted(set(index.values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigurationError(f"{folder / INDEX_FILE} is damaged: {error}") from None
        return SafetensorsWeights([folder / shard for shard in shards])
    if (folder / SAFETENSORS_FILE).is_file():
        return SafetensorsWeights([folder / SAFETENSORS_FILE])
    if (folder / LINKED_GGUF_FILE).is_file():
        return GGUFWeights(folder / LINKED_GGUF_FILE)
    raise ConfigurationError(f"{folder} holds no weights: no {SAFETENSORS_FILE} and no {INDEX_FILE}")


def check_weights(folder: Path, config: ModelConfig) -> None:
    """Raises ConfigurationError where a tensor that `config` calls for is missing. Reads headers only; of a model that
    transformers computes it is not known which tensors that takes."""
    if isinstance(config, ForeignConfig):
        open_weights(folder)
        return
    missing = sorted(set(expected_names(config)) - open_weights(folder).names())
    if missing:
        raise ConfigurationError(f"{folder} lacks {len(missing)} of the model's tensors, the first is {missing[0]}")


def expected_names(config: DecoderConfig) -> list[str]:
    """Every tensor of a checkpoint of this shape, under Hugging Face's names."""
    leaves = ["input_layernorm.weight", "post_attention_layernorm.weight"]
    leaves += [f"self_attn.{p}_proj.weight" for p in "qkvo"] + [f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")]
    if config.qkv_bias:
        leaves += [f"self_attn.{p}_proj.bias" for p in "qkv"]
    if config.output_bias:
        leaves.append("self_attn.o_proj.bias")
    if config.mlp_bias:
        leaves += [f"mlp.{p}_proj.bias" for p in ("gate", "up", "down")]
    if config.qk_norm:
        leaves += [f"self_attn.{p}_norm.weight" for p in "qk"]
    roots = ["model.embed_tokens.weight", "model.norm.weight"]
    if not config.tied_embeddings:
        roots.append("lm_head.weight")
    return roots + [f"model.layers.{layer}.{leaf}" for layer in range(config.num_layers) for leaf in leaves]
