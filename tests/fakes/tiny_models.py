"""Random checkpoints of a few thousand weights, in every shape that the decoder must get right."""

from pathlib import Path
from typing import Any

from cluster.random_models import RANDOM_MODELS, RandomModel, write_random_model

SHAPES: dict[str, RandomModel] = {
    **RANDOM_MODELS,
    "one_kv_head": RandomModel("llama", {"num_key_value_heads": 1}),
    "every_head_its_own": RandomModel("llama", {"num_key_value_heads": 4}),
    "heads_of_8": RandomModel("llama", {"head_dim": 8}),
    "heads_of_80": RandomModel("llama", {"head_dim": 80}),
    "window_of_1": RandomModel("mistral", {"sliding_window": 1}),
    "window_of_blocks": RandomModel("mistral", {"sliding_window": 32}),
}


def tiny_model(shape: str, folder: Path) -> Any:
    """The transformers model of SHAPES[shape], saved in `folder` as float32 safetensors."""
    return write_random_model(SHAPES[shape], folder)
