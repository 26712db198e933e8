"""A simulated operating-system process: which callbacks are its own, whether they run, and what its clock shows.

A process is known by a context variable: whatever is started within `enter` belongs to it, and so does every task and
timer that follows from it. Invariants: a dead process never runs again; a paused one runs nothing until it is resumed,
and then runs everything in the order in which it became due.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from enum import Enum
from typing import Any, TypeVar

from pronghorn.tasks import Owner

T = TypeVar("T")


class ProcessState(Enum):
    RUNNING = "running"
    PAUSED = "paused"
    DEAD = "dead"


class SimProcess:
    def __init__(self, name: str) -> None:
        self.name = name
        self.state = ProcessState.RUNNING
        self.pauses = 0
        """How often it has been paused: tells one pause from the next."""
        self.backlog: list[asyncio.Handle] = []
        """What became due while it was paused, or after its death, which is never run."""
        self.failures: list[str] = []
        self._owner = Owner(name, self._on_failure)
        self._context: Context = copy_context()
        self._context.run(CURRENT.set, self)

    @property
    def running(self) -> bool:
        return self.state is ProcessState.RUNNING

    @property
    def alive(self) -> bool:
        return self.state is not ProcessState.DEAD

    def context(self) -> Context:
        """A fresh copy: callbacks that run in it belong to this process."""
        return self._context.copy()

    def enter(self, function: Callable[..., T], *args: Any) -> T:
        """Call `function` as this process."""
        return self.context().run(function, *args)

    def start(self, coroutine: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        return self.enter(self._owner.start, coroutine, name)

    @property
    def tasks(self) -> list[str]:
        return self._owner.running

    def pause(self) -> None:
        if self.running:
            self.state = ProcessState.PAUSED
            self.pauses += 1

    def resume(self) -> list[asyncio.Handle]:
        """What is to run now. The loop's `resume` is what calls this."""
        if self.state is not ProcessState.PAUSED:
            return []
        self.state = ProcessState.RUNNING
        due, self.backlog = self.backlog, []
        return due

    def kill(self) -> None:
        self.state = ProcessState.DEAD

    def _on_failure(self, task: str, error: BaseException) -> None:
        self.failures.append(f"{task}: {error!r}")


CURRENT: ContextVar[SimProcess | None] = ContextVar("simulated_process", default=None)


class SimClock:
    """`pronghorn.clock.Clock` of one process: the loop's time, shifted and running at a rate of its own."""

    def __init__(self, loop: asyncio.AbstractEventLoop, offset_s: float = 0.0, rate: float = 1.0) -> None:
        self._loop = loop
        self._offset_s = offset_s
        self._rate = rate

    def now_s(self) -> float:
        return self._loop.time() * self._rate + self._offset_s

    def unix_s(self) -> float:
        return 1.7e9 + self.now_s()
