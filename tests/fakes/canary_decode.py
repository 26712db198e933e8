"""The canary as the engine of a decode node: `python -m tests.fakes.canary_decode`, or `build` for a ThreadEngine."""

import sys

from decode_nodes.scheduler import DecodeScheduler
from kvcache.memory import BlockMemory
from pipelines.runtime.child import serve
from pipelines.runtime.config import EngineConfig
from pipelines.runtime.loop import EngineParts
from tests.fakes.canary_engine import build_canary_engine


def build(config: EngineConfig, seed: bytes, memory: BlockMemory) -> EngineParts:
    return build_canary_engine(config, seed, memory, DecodeScheduler)


if __name__ == "__main__":
    sys.exit(serve(build))
