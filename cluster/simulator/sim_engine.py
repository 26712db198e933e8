"""The engine as a simulated process of its own: the real scheduler and the real loop, each step taking virtual time.

Knows the loop's rounds, a timing model, and death. What the scheduler asserts or the canary finds is kept in `bugs`:
nothing that a simulation does to an engine makes either happen.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.simulator.canary import VOCAB_SIZE, CanaryPipeline, block_bytes, canary_layout
from cluster.simulator.process import SimClock, SimProcess
from kvcache.hashing import BlockHasher
from kvcache.memory import BlockMemory
from kvcache.prefix_cache import PrefixCache
from pipelines.runtime.config import EngineConfig
from pipelines.runtime.loop import EngineLoop
from pipelines.runtime.messages import FREES, EngineCommand, EngineMessage, EngineReady, StepReport
from pipelines.runtime.replicas import new_caches
from pipelines.runtime.reports import Reports
from pipelines.runtime.scheduler import Batch, Scheduler
from pronghorn.errors import EngineDied, Overloaded

NewScheduler = Callable[[EngineConfig, Sequence[PrefixCache], BlockHasher], Scheduler]


@dataclass(frozen=True)
class EngineTiming:
    """How long an engine takes, in virtual seconds."""

    startup_s: float
    step_s: float
    """Of every step."""
    token_s: float
    """Of every token that a step computes."""

    def step(self, batch: Batch) -> float:
        return self.step_s + self.token_s * batch.input_tokens


class SimEngine:
    """`pipelines.runtime.port.EnginePort`. Made within its node's process; what it computes runs in its own."""

    def __init__(
        self,
        process: SimProcess,
        clock: SimClock,
        new_scheduler: NewScheduler,
        config: EngineConfig,
        seed: bytes,
        timing: EngineTiming,
    ) -> None:
        self.process = process
        self.bugs: list[str] = []
        self.memory = BlockMemory.create(config.num_blocks, block_bytes(config.block_tokens))
        layout = canary_layout(config.block_tokens)
        hasher = BlockHasher(config.hash_algo, seed, config.model_name, None, layout)
        self._caches = new_caches(config, hasher, self.memory)
        self.scheduler = new_scheduler(config, self._caches, hasher)
        self._pipeline = CanaryPipeline(
            self.memory, self.scheduler, config.block_tokens, max_batch_size=config.max_batch_size
        )
        self._ready = EngineReady(layout, VOCAB_SIZE, 4096, timing.startup_s)
        self._config = config
        self._clock = clock
        self._timing = timing
        self._inbox: list[EngineCommand] = []
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._reports = Reports(process.name, config.stall_timeout_s, on_room=self._room.set)
        self._stopped = False

    def cached_hashes(self) -> set[bytes]:
        return {block_hash for cache in self._caches for block_hash in cache.findable()}

    # --- the port -----------------------------------------------------------------------------------------------------

    async def start(self) -> EngineReady:
        await asyncio.sleep(self._timing.startup_s)
        self.process.start(self._run(), "rounds")
        return self._ready

    def send(self, command: EngineCommand) -> None:
        if (death := self._reports.ended) is not None:
            raise EngineDied(death.message)
        if len(self._inbox) >= self._config.max_waiting and not isinstance(command, FREES):
            raise Overloaded(f"{len(self._inbox)} commands wait for the engine of {self.process.name} already")
        self._reports.note_command()
        self._inbox.append(command)
        self._arrived.set()

    async def receive(self) -> StepReport:
        return await self._reports.next()

    async def stop(self, grace_s: float) -> None:
        self._end("it was stopped")
        self.memory.close()

    def crash(self) -> None:
        """Killed from outside; its node sees the end of the socket."""
        self._end("it was killed")

    def _end(self, reason: str) -> None:
        self._stopped = True
        self.process.kill()
        self._reports.end(EngineDied(f"the engine of {self.process.name} ended: {reason}"))

    # --- the loop's own process ---------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            await self._rounds()
        except Exception as error:  # this simulated process's outermost edge
            self.bugs.append(f"{self.process.name}: {error!r}")
            self._end(repr(error))

    async def _rounds(self) -> None:
        period_s = self._config.report_period_s
        loop = EngineLoop(self.scheduler, self._pipeline, self.memory, self, self, self._clock, period_s, checked=True)
        stepped = False
        for batch in loop.rounds():
            if batch is not None:
                stepped = True
                await asyncio.sleep(self._timing.step(batch))
                continue
            if not stepped:
                await self._wait(period_s)
            stepped = False
            while self._reports.full:
                self._room.clear()
                await self._room.wait()

    async def _wait(self, timeout_s: float) -> None:
        """For a command, or until the next report is due."""
        if self._inbox:
            return
        self._arrived.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._arrived.wait()
        except TimeoutError:
            pass

    def take(self, timeout_s: float) -> list[EngineCommand]:
        """The loop's inbox: never waits, `_wait` has."""
        commands, self._inbox = self._inbox, []
        return commands

    def put(self, message: EngineMessage) -> None:
        """The loop's outbox."""
        if not self._stopped and isinstance(message, StepReport):
            self._reports.push(message)
