"""Engines over the canary pipeline, and what tests of them need: configurations, memories, contexts."""

from collections.abc import Callable, Sequence
from urllib.parse import parse_qsl, urlsplit

import numpy as np

from kvcache.hashing import BlockHasher
from kvcache.memory import BlockMemory
from kvcache.prefix_cache import PrefixCache
from pipelines.runtime.config import EngineConfig
from pipelines.runtime.loop import EngineParts
from pipelines.runtime.messages import EngineReady
from pipelines.runtime.scheduler import Scheduler
from pipelines.types.eos import EOSTracker
from pipelines.types.text_context import TextContext
from pipelines.types.token_buffer import TokenBuffer
from pronghorn.errors import ConfigurationError
from pronghorn.ids import RequestID
from tests.fakes.canary_pipeline import VOCAB_SIZE, CanaryPipeline, block_bytes, canary_layout

SEED = bytes(range(32))
MAX_LENGTH = 4096


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
        "stall_timeout_s": 5.0,
    }
    return EngineConfig(**(fields | changes))  # type: ignore[arg-type]  # the caller's names are the fields'


def canary_memory(config: EngineConfig) -> BlockMemory:
    return BlockMemory.create(config.num_blocks, block_bytes(config.block_tokens))


def canary_cache(config: EngineConfig) -> tuple[PrefixCache, BlockHasher]:
    layout = canary_layout(config.block_tokens)
    hasher = BlockHasher(config.hash_algo, SEED, config.model_name, None, layout)
    return PrefixCache(config.num_blocks, hasher, enable_prefix_caching=config.enable_prefix_caching), hasher


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
    new_scheduler: Callable[[EngineConfig, PrefixCache, BlockHasher], Scheduler],
) -> EngineParts:
    """Raises ConfigurationError, as a real engine does, for a model that it cannot serve."""
    path = urlsplit(config.model_path)
    if path.scheme != "canary":
        raise ConfigurationError(f"model {config.model_path} is not a canary")
    options = {name: float(value) for name, value in parse_qsl(path.query)}
    layout = canary_layout(config.block_tokens)
    hasher = BlockHasher(config.hash_algo, seed, config.model_name, None, layout)
    cache = PrefixCache(config.num_blocks, hasher, enable_prefix_caching=config.enable_prefix_caching)
    scheduler = new_scheduler(config, cache, hasher)
    pipeline = CanaryPipeline(
        memory,
        scheduler,
        config.block_tokens,
        max_batch_size=config.max_batch_size,
        step_s=options.get("step_s", 0.0),
        token_s=options.get("token_s", 0.0),
        break_on=int(options["break_on"]) if "break_on" in options else None,
    )
    return EngineParts(scheduler, pipeline, EngineReady(layout, VOCAB_SIZE, MAX_LENGTH, 0.0))
