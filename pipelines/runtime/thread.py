"""The engine as a thread of its node's process: for tests, which want no child process.

Inbound blocks would cost a real model a third to a half of its steps here; `process.py` is what serves. A thread cannot
be killed: a stuck one is named in the log and left behind as a daemon.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from kvcache.memory import BlockMemory
from pipelines.runtime.config import EngineConfig
from pipelines.runtime.loop import BuildEngine, EngineLoop, InboxClosed
from pipelines.runtime.messages import FREES, EngineCommand, EngineMessage, EngineReady, StepReport, Stop
from pipelines.runtime.reports import CAPACITY, Reports
from pronghorn.clock import SystemClock
from pronghorn.errors import EngineDied, Overloaded, PronghornError

log = logging.getLogger(__name__)

T = TypeVar("T")


class _CommandQueue:
    """The loop's inbox. `ThreadEngine.send` bounds it."""

    def __init__(self) -> None:
        self._commands: deque[EngineCommand] = deque()
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._commands)

    def put(self, command: EngineCommand) -> None:
        with self._changed:
            self._commands.append(command)
            self._changed.notify()

    def take(self, timeout_s: float) -> list[EngineCommand]:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._commands), timeout_s)
            commands = list(self._commands)
            self._commands.clear()
        return commands


class ThreadEngine:
    def __init__(
        self,
        build: BuildEngine,
        config: EngineConfig,
        seed: bytes,
        memory: BlockMemory,
        *,
        name: str = "engine",
        checked: bool = True,
    ) -> None:
        """Takes `memory` over: `stop` closes it. With `checked` the pool's invariants are asserted every round."""
        self.memory = memory
        self._build = build
        self._config = config
        self._seed = seed
        self._name = name
        self._checked = checked
        self._inbox = _CommandQueue()
        self._room = threading.Semaphore(CAPACITY)
        self._reports = Reports(name, config.stall_timeout_s, on_room=self._room.release)
        self._stopping = False
        self._thread: threading.Thread | None = None

    async def start(self) -> EngineReady:
        assert self._thread is None, "an engine is started once"
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[EngineReady] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name=f"{self._name}-engine", daemon=True)
        self._thread.start()
        return await self._ready

    def send(self, command: EngineCommand) -> None:
        if (death := self._reports.ended) is not None:
            raise EngineDied(death.message)
        if len(self._inbox) >= self._config.max_waiting and not isinstance(command, FREES):
            raise Overloaded(f"{len(self._inbox)} commands wait for the engine of {self._name} already")
        self._reports.note_command()
        self._inbox.put(command)

    async def receive(self) -> StepReport:
        return await self._reports.next()

    async def stop(self, grace_s: float) -> None:
        self._stopping = True
        if self._thread is not None:
            self._inbox.put(Stop())
            self._room.release()
            await asyncio.to_thread(self._thread.join, grace_s)
            if self._thread.is_alive():
                log.error("the engine thread of %s did not end within %.1f s", self._name, grace_s)
        self._reports.end(EngineDied(f"the engine of {self._name} was stopped"))
        self.memory.close()

    # --- on the engine's thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            parts = self._build(self._config, self._seed, self.memory)
            self.put(parts.ready)
            EngineLoop(
                parts.scheduler,
                parts.pipeline,
                self.memory,
                self._inbox,
                self,
                SystemClock(),
                self._config.report_period_s,
                checked=self._checked,
            ).run()
            self._on_loop(self._died, EngineDied("it was asked to stop"))
        except InboxClosed:
            pass
        except Exception as error:  # this thread's outermost edge stands for a process's
            if not isinstance(error, PronghornError):
                log.exception("the engine of %s failed", self._name)
            self._on_loop(self._died, error)

    def put(self, message: EngineMessage) -> None:
        """The loop's outbox."""
        if self._stopping:
            return
        self._room.acquire()
        if not self._stopping and not self._on_loop(self._arrived, message):
            raise InboxClosed

    def _on_loop(self, function: Callable[[T], None], argument: T) -> bool:
        try:
            self._loop.call_soon_threadsafe(function, argument)
        except RuntimeError:  # the loop is closed: nobody is left to hear of it
            return False
        return True

    # --- on the asyncio loop -----------------------------------------------------------------------------------------

    def _arrived(self, message: EngineMessage) -> None:
        if isinstance(message, StepReport):
            self._reports.push(message)
        elif isinstance(message, EngineReady) and not self._ready.done():
            self._room.release()
            self._ready.set_result(message)

    def _died(self, error: Exception) -> None:
        if not self._ready.done():
            self._ready.set_exception(error)
        self._reports.end(EngineDied(f"the engine of {self._name} ended: {error}"))
