"""The KV layout that a model has under an engine's configuration: from config.json, without weights or torch."""

from pathlib import Path

from kvcache.layout import KVLayout
from pipelines.models.config import DecoderConfig, read_config
from pipelines.runtime.config import EngineConfig


def layout_of(config: EngineConfig) -> KVLayout:
    """Raises ConfigurationError where the model is missing or not supported."""
    return layout_for(config, read_config(Path(config.model_path)))


def layout_for(config: EngineConfig, model: DecoderConfig) -> KVLayout:
    return KVLayout(
        model=config.model_name,
        dtype=config.dtype,
        block_tokens=config.block_tokens,
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
    )
