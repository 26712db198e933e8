"""The KV layout that an engine will have, from its configuration and the model's config.json; without torch.

A node's shell makes the block memory before its engine exists, and must agree with it on the size of a block.
"""

from pathlib import Path

from kvcache.layout import KVLayout
from pipelines.models.config import read_config
from pipelines.runtime.config import EngineConfig


def layout_of(config: EngineConfig) -> KVLayout:
    """Raises ConfigurationError where the model cannot be read or is not supported."""
    model = read_config(Path(config.model_path))
    return KVLayout(
        model=config.model_name,
        dtype=config.dtype,
        block_tokens=config.block_tokens,
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
    )
