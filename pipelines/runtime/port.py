"""The engine as its node sees it. Two versions: a child process (`process.py`), a thread for tests (`thread.py`)."""

from typing import Protocol

from kvcache.memory import BlockMemory
from pipelines.runtime.messages import EngineCommand, EngineReady, StepReport


class EnginePort(Protocol):
    memory: BlockMemory
    """Every block of the pool, shared with the engine. Valid from `start` to `stop`."""

    async def start(self) -> EngineReady:
        """Start the engine and wait for its canary. Raises the engine's own error, or EngineDied."""

    def send(self, command: EngineCommand) -> None:
        """Queue a command; never blocks. Raises Overloaded where the bounded queue is full, EngineDied after death.

        `FREES` are always taken: what frees is never refused.
        """

    async def receive(self) -> StepReport:
        """The next report, in order. Raises EngineDied when the engine has ended, or is stuck: has work and has
        reported nothing for `EngineConfig.stall_timeout_s`."""

    async def stop(self, grace_s: float) -> None:
        """End the engine within `grace_s`, killing it if need be. Idempotent."""
