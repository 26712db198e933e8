"""Puts a text engine together: hasher, pools, scheduler, a model on each replica; the same for every kind of node.

The only thing that differs is the scheduler, which the caller names.
"""

import time
from collections.abc import Callable, Sequence

import msgspec

from kvcache.hashing import BlockHasher
from kvcache.memory import BlockMemory
from kvcache.prefix_cache import PrefixCache
from pipelines.runtime.config import EngineConfig
from pipelines.runtime.loop import EngineParts
from pipelines.runtime.messages import EngineReady
from pipelines.runtime.replicas import new_caches
from pipelines.runtime.replicated_pipeline import ReplicatedPipeline
from pipelines.runtime.scheduler import Scheduler
from pipelines.runtime.text_pipeline import TextGenerationPipeline, layout_of
from pronghorn.errors import ConfigurationError

NewScheduler = Callable[[EngineConfig, Sequence[PrefixCache], BlockHasher], Scheduler]
"""The caches are the replicas', in order."""


def build_text_engine(
    config: EngineConfig, seed: bytes, memory: BlockMemory, new_scheduler: NewScheduler
) -> EngineParts:
    """Raises ConfigurationError where the model cannot be served, or was not meant for this memory."""
    started_s = time.monotonic()
    layout = layout_of(config)
    if memory.block_bytes != layout.block_bytes or memory.num_blocks != config.total_blocks:
        raise ConfigurationError(
            f"the block memory was made for {memory.num_blocks} blocks of {memory.block_bytes} bytes, the engine has "
            f"{config.total_blocks} of {layout.block_bytes}"
        )
    hasher = BlockHasher(config.hash_algo, seed, config.model_name, None, layout.fingerprint())
    scheduler = new_scheduler(config, new_caches(config, hasher, memory), hasher)
    pipelines = [TextGenerationPipeline(of_replica(config, r), memory, scheduler) for r in range(config.data_parallel)]
    for pipeline in pipelines:
        pipeline.canary()
    first = pipelines[0]
    try:
        config.check_total_tokens(first.max_length)
    except ValueError as error:
        raise ConfigurationError(str(error), param="max_batch_total_tokens") from error
    ready = EngineReady(layout.fingerprint(), first.vocab_size, first.max_length, time.monotonic() - started_s)
    return EngineParts(scheduler, first if len(pipelines) == 1 else ReplicatedPipeline(pipelines), ready)


def of_replica(config: EngineConfig, index: int) -> EngineConfig:
    """`config` as the pipeline of one replica takes it: on a device of its own where devices are numbered."""
    if config.data_parallel == 1:
        return config
    device = config.device if config.device == "cpu" else f"{config.device}:{index}"
    return msgspec.structs.replace(config, data_parallel=1, device=device)
