"""A few threads that compute one thing together: each runs the same kernel; tickets share work, barriers join it.

Kernels run without the GIL. Members wait for each other by spinning inside a run (a decode step has some 200 barriers,
so a wait must cost less than a microsecond) and yield the core when the wait is long; between runs they sleep. One pool
of ours instead of OpenMP's: its workers go on spinning after each region and so take the core from whoever comes next.
"""

import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from pipelines.runtime.atomics import atomic_add, atomic_load
from pipelines.runtime.jit import compiled

Sync = NDArray[np.int64]

_LINE = 8  # int64 cells in a cache line
_ARRIVED, _RELEASED, _TICKET = 0, _LINE, 2 * _LINE
_SPINS_BEFORE_YIELD = 4000
_sched_yield = types.ExternalFunction("sched_yield", types.int32())


@compiled
def take_ticket(sync: Sync) -> int:
    """The next number since the last barrier: 0, 1, ... each goes to one member."""
    return atomic_add(sync, _TICKET, 1)  # type: ignore[no-any-return]  # numba has no types


@compiled
def meet(sync: Sync, members: int) -> None:
    """Wait until every member is here. What they wrote before is seen by all after; tickets start again at 0."""
    if members == 1:
        sync[_TICKET] = 0
        return
    round_ = atomic_load(sync, _RELEASED)
    if atomic_add(sync, _ARRIVED, 1) == members - 1:
        sync[_ARRIVED] = 0
        sync[_TICKET] = 0
        atomic_add(sync, _RELEASED, 1)
        return
    spins = 0
    while atomic_load(sync, _RELEASED) == round_:
        spins += 1
        if spins > _SPINS_BEFORE_YIELD:
            _sched_yield()


class Team:
    """`threads` members, the caller being the first. Not thread-safe: one thread calls `run`."""

    def __init__(self, threads: int) -> None:
        self.members = threads
        self._sync: Sync = np.zeros(3 * _LINE, dtype=np.int64)
        self._work: list[queue.SimpleQueue[Callable[[], None] | None]] = []
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        for member in range(1, threads):
            work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
            self._work.append(work)
            threading.Thread(target=self._help, args=(work,), name=f"team-{member}", daemon=True).start()

    def run(self, kernel: Callable[..., None], *args: Any) -> None:
        """`kernel(member, members, sync, *args)` on every member; returns when all have. Raises what one raised."""
        self._sync[:] = 0
        for member, work in enumerate(self._work, start=1):
            work.put(lambda member=member: kernel(member, self.members, self._sync, *args))  # type: ignore[misc]
        try:
            kernel(0, self.members, self._sync, *args)
        finally:
            failures = [self._done.get() for _ in self._work]
        for failure in failures:
            if failure is not None:
                raise failure

    def close(self) -> None:
        """End the other threads. Idempotent."""
        for work in self._work:
            work.put(None)
        self._work.clear()

    def _help(self, work: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
        while (task := work.get()) is not None:
            try:
                task()
                self._done.put(None)
            except BaseException as failure:  # handed to the thread that called `run`
                self._done.put(failure)
