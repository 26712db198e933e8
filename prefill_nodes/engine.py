"""The engine process of a prefill node: `python -m prefill_nodes.engine`, started by `pipelines/runtime/process.py`."""

import sys

from kvcache.memory import BlockMemory
from pipelines.runtime.child import serve
from pipelines.runtime.config import EngineConfig
from pipelines.runtime.loop import EngineParts
from pipelines.runtime.text_engine import build_text_engine
from prefill_nodes.scheduler import PrefillScheduler


def build(config: EngineConfig, seed: bytes, memory: BlockMemory) -> EngineParts:
    """What `ThreadEngine` takes, too. Raises ConfigurationError where the model cannot be served."""
    return build_text_engine(config, seed, memory, PrefillScheduler)


if __name__ == "__main__":
    sys.exit(serve(build))
