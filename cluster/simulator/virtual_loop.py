"""An asyncio event loop on virtual time: no sockets, no threads; when nothing is ready, time jumps to the next timer.

Knows callbacks and the simulated process that each belongs to. Invariants: the order of callbacks is a function of the
program and of `random` alone; callbacks of one process keep asyncio's order among themselves, those of different
processes may be taken in any order, which `random` chooses.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from contextvars import Context
from random import Random
from typing import Any

from cluster.simulator.process import CURRENT, SimProcess

MAX_CALLBACKS = 1_000_000
"""A simulation that runs more than this many turns in circles."""


TICK_S = 1e-7
"""What a round of callbacks takes. Where time stood still, a program that waits for a rounding error of its clock would
turn in circles, which no real one does."""


class SimulationStuck(AssertionError):
    """Nothing is ready, no timer is set, and the simulation has not ended; or it does not end."""


class _Call(asyncio.Handle):
    """A handle that can tell its context."""

    __slots__ = ("owner",)

    def __init__(
        self, callback: Callable[..., Any], args: tuple[Any, ...], loop: "VirtualLoop", context: Context | None
    ) -> None:
        super().__init__(callback, args, loop, context)
        self.owner = _owner(self)


class _Timer(asyncio.TimerHandle):
    __slots__ = ("owner",)

    def __init__(
        self,
        when_s: float,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        loop: "VirtualLoop",
        context: Context | None,
    ) -> None:
        super().__init__(when_s, callback, args, loop, context)
        self.owner = _owner(self)


def _owner(handle: asyncio.Handle) -> SimProcess | None:
    context: Context = handle._context  # type: ignore[attr-defined]  # asyncio's own slot; it has no public name
    return context.get(CURRENT)


class VirtualLoop(asyncio.BaseEventLoop):
    def __init__(self, random: Random | None = None) -> None:
        super().__init__()
        self._now_s = 0.0
        self._random = random
        self._due: deque[_Call | _Timer] = deque()
        self._timers: list[tuple[float, int, _Timer]] = []
        self._sequence = 0
        self.callbacks = 0
        """How many have run: of two equal runs, equal."""
        self._tasks: dict[SimProcess, list[asyncio.Task[Any]]] = {}
        self.set_task_factory(self._new_task)
        self.burying = False
        """Whether what belongs to dead processes runs after all: to end a simulation, when all has been judged."""

    def time(self) -> float:
        return self._now_s

    # --- asyncio's side -----------------------------------------------------------------------------------------------

    def call_soon(  # type: ignore[override]  # the stubs' signature is generic in the arguments
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        call = _Call(callback, args, self, context)
        self._due.append(call)
        return call

    call_soon_threadsafe = call_soon  # type: ignore[assignment]  # there is one thread

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = _Timer(when, callback, args, self, context)
        self._sequence += 1
        heapq.heappush(self._timers, (when, self._sequence, timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Nothing: a cancelled timer is dropped when its time comes."""

    def _run_once(self) -> None:
        if not self._due:
            self._advance()
        self._now_s += TICK_S
        batch = list(self._due)
        self._due.clear()
        if self._random is not None and len(batch) > 1:
            batch = _shuffled(batch, self._random)
        for call in batch:
            self._run(call)

    def _new_task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Any, context: Context | None = None
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(coroutine, loop=loop, context=context)
        owner = CURRENT.get() if context is None else context.get(CURRENT)
        if owner is not None:
            self._tasks.setdefault(owner, []).append(task)
        return task

    # --- ours ---------------------------------------------------------------------------------------------------------

    def tasks_of(self, process: SimProcess) -> list[str]:
        """The names of its tasks that have not ended."""
        running = self._tasks[process] = [t for t in self._tasks.get(process, ()) if not t.done()]
        return [task.get_name() for task in running]

    def resume(self, process: SimProcess) -> None:
        for handle in process.resume():
            assert isinstance(handle, _Call | _Timer)
            self._due.append(handle)

    def _run(self, call: _Call | _Timer) -> None:
        if call.cancelled():
            return
        owner = call.owner
        if owner is not None and not owner.running and not self.burying:
            owner.backlog.append(call)
            return
        self.callbacks += 1
        if self.callbacks > MAX_CALLBACKS and not self.burying:
            raise SimulationStuck(f"{self.callbacks} callbacks have run, and the simulation has not ended")
        call._run()

    def _advance(self) -> None:
        timers = self._timers
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        if not timers:
            raise SimulationStuck(f"nothing is left to happen at {self._now_s:.3f} s")
        self._now_s = max(self._now_s, timers[0][0])
        while timers and timers[0][0] <= self._now_s:
            self._due.append(heapq.heappop(timers)[2])


def _shuffled(batch: list[_Call | _Timer], random: Random) -> list[_Call | _Timer]:
    """The same calls, process by process, in a random order of processes."""
    by_owner: dict[SimProcess | None, list[_Call | _Timer]] = {}
    for call in batch:
        by_owner.setdefault(call.owner, []).append(call)
    if len(by_owner) == 1:
        return batch
    groups = list(by_owner.values())
    random.shuffle(groups)
    return [call for group in groups for call in group]
