"""Puts a text engine together: hasher, prefix cache, scheduler, model; the same for every kind of node.

The only thing that differs is the scheduler, which the caller names.
"""

import time
from collections.abc import Callable

from kvcache.hashing import BlockHasher
from kvcache.memory import BlockMemory
from kvcache.prefix_cache import PrefixCache
from pipelines.runtime.config import EngineConfig
from pipelines.runtime.loop import EngineParts
from pipelines.runtime.messages import EngineReady
from pipelines.runtime.scheduler import Scheduler
from pipelines.runtime.text_pipeline import TextGenerationPipeline, layout_of
from pronghorn.errors import ConfigurationError

NewScheduler = Callable[[EngineConfig, PrefixCache, BlockHasher], Scheduler]


def build_text_engine(
    config: EngineConfig, seed: bytes, memory: BlockMemory, new_scheduler: NewScheduler
) -> EngineParts:
    """Raises ConfigurationError where the model cannot be served, or was not meant for this memory."""
    started_s = time.monotonic()
    layout = layout_of(config)
    if memory.block_bytes != layout.block_bytes:
        raise ConfigurationError(
            f"the block memory was made for blocks of {memory.block_bytes} bytes, the model's have {layout.block_bytes}"
        )
    hasher = BlockHasher(config.hash_algo, seed, config.model_name, None, layout.fingerprint())
    cache = PrefixCache(config.num_blocks, hasher, enable_prefix_caching=config.enable_prefix_caching)
    scheduler = new_scheduler(config, cache, hasher)
    pipeline = TextGenerationPipeline(config, memory, scheduler)
    pipeline.canary()
    ready = EngineReady(layout.fingerprint(), pipeline.vocab_size, pipeline.max_length, time.monotonic() - started_s)
    return EngineParts(scheduler, pipeline, ready)
