"""Engines over the canary pipeline, and what tests of them need: configurations, memories, contexts."""

from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import numpy as np

from kvcache.hashing import BlockHasher
from kvcache.memory import BlockMemory
from kvcache.prefix_cache import PrefixCache
from pipelines.runtime.config import EngineConfig
from pipelines.runtime.loop import EngineParts
from pipelines.runtime.messages import EngineReady
from pipelines.runtime.replicas import new_caches
from pipelines.runtime.replicated_pipeline import ReplicatedPipeline
from pipelines.runtime.scheduler import Scheduler
from pipelines.types.eos import EOSTracker
from pipelines.types.text_context import TextContext
from pipelines.types.token_buffer import TokenBuffer
from pronghorn.errors import ConfigurationError
from pronghorn.ids import RequestID
from tests.fakes.canary_pipeline import VOCAB_SIZE, BlockTables, CanaryPipeline, block_bytes, canary_layout

SEED = bytes(range(32))
MAX_LENGTH = 4096

NewScheduler = Callable[[EngineConfig, Sequence[PrefixCache], BlockHasher], Scheduler]


def canary_config(**changes: object) -> EngineConfig:
    """Small: blocks of 4 tokens, steps of 16. `model_path` is `canary:`, with options of CanaryPipeline as in
    `canary:?step_s=0.01&break_on=666`."""
    fields: dict[str, object] = {
        "model_path": "canary:",
        "model_name": "canary",
        "num_blocks": 64,
        "block_tokens": 4,
        "max_batch_size": 8,
        "max_batch_input_tokens": 16,
        "max_waiting": 32,
        "report_period_s": 0.05,
        "stall_timeout_s": 60.0,
    }
    return EngineConfig(**(fields | changes))  # type: ignore[arg-type]  # the caller's names are the fields'


def canary_memory(config: EngineConfig) -> BlockMemory:
    return BlockMemory.create(config.total_blocks, block_bytes(config.block_tokens))


def canary_caches(
    config: EngineConfig, seed: bytes = SEED, memory: BlockMemory | None = None
) -> tuple[list[PrefixCache], BlockHasher]:
    hasher = BlockHasher(config.hash_algo, seed, config.model_name, None, canary_layout(config.block_tokens))
    return new_caches(config, hasher, memory), hasher


def canary_pipelines(
    config: EngineConfig, memory: BlockMemory, tables: BlockTables, **options: Any
) -> list[CanaryPipeline]:
    """One a replica."""
    return [
        CanaryPipeline(
            memory,
            tables,
            config.block_tokens,
            max_batch_size=config.max_batch_size,
            own_blocks=range(index * config.num_blocks, (index + 1) * config.num_blocks),
            **options,
        )
        for index in range(config.data_parallel)
    ]


def canary_pipeline(pipelines: Sequence[CanaryPipeline]) -> CanaryPipeline | ReplicatedPipeline:
    return pipelines[0] if len(pipelines) == 1 else ReplicatedPipeline(pipelines)


def canary_context(
    prompt: Sequence[int],
    new_tokens: int = 8,
    *,
    request_id: str | None = None,
    eos: Sequence[int] = (),
    salt: str | None = None,
) -> TextContext:
    return TextContext(
        request_id=RequestID() if request_id is None else RequestID(request_id),
        tokens=TokenBuffer(np.array(prompt, dtype=np.int64)),
        max_length=len(prompt) + new_tokens,
        eos_tracker=EOSTracker(eos_token_ids=set(eos)),
        vocab_size=VOCAB_SIZE,
        cache_salt=salt,
        model_name="canary",
    )


def build_canary_engine(
    config: EngineConfig,
    seed: bytes,
    memory: BlockMemory,
    new_scheduler: NewScheduler,
) -> EngineParts:
    """Raises ConfigurationError, as a real engine does, for a model that it cannot serve."""
    path = urlsplit(config.model_path)
    if path.scheme != "canary":
        raise ConfigurationError(f"model {config.model_path} is not a canary")
    options = {name: float(value) for name, value in parse_qsl(path.query)}
    caches, hasher = canary_caches(config, seed, memory)
    scheduler = new_scheduler(config, caches, hasher)
    pipelines = canary_pipelines(
        config,
        memory,
        scheduler,
        step_s=options.get("step_s", 0.0),
        token_s=options.get("token_s", 0.0),
        break_on=int(options["break_on"]) if "break_on" in options else None,
    )
    ready = EngineReady(canary_layout(config.block_tokens), VOCAB_SIZE, MAX_LENGTH, 0.0)
    return EngineParts(scheduler, canary_pipeline(pipelines), ready)
