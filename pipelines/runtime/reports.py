"""What has come from an engine and its shell has not taken yet, and the verdict that the engine is stuck.

Lives on one asyncio loop. Knows reports and silence; not where they come from. Bounded by its feeder: `full` says when
to stop feeding, `on_room` when to go on.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from pipelines.runtime.messages import StepReport
from pronghorn.errors import EngineDied

CAPACITY = 64
"""Reports that may wait; the engine waits at the next one."""

SLICES = 4
"""The stall timeout is waited for in this many pieces, each of which must pass in silence. A pause that also stops
this process (a frozen container, a suspended machine) fills one piece at most, and so condemns nobody."""


class Reports:
    def __init__(self, name: str, stall_timeout_s: float, on_room: Callable[[], None] = lambda: None) -> None:
        self._name = name
        self._stall_timeout_s = stall_timeout_s
        self._on_room = on_room
        self._waiting: deque[StepReport] = deque()
        self._arrived = asyncio.Event()
        self._end: EngineDied | None = None
        self._commanded = False
        self._loaded = False

    @property
    def full(self) -> bool:
        return len(self._waiting) >= CAPACITY

    @property
    def ended(self) -> EngineDied | None:
        return self._end

    def push(self, report: StepReport) -> None:
        self._waiting.append(report)
        self._commanded = False
        self._loaded = report.load.waiting + report.load.running > 0
        self._arrived.set()

    def note_command(self) -> None:
        """The engine was sent something: it has work until it reports again."""
        self._commanded = True

    def end(self, error: EngineDied) -> None:
        """No report follows: `next` gives out those that came before, then raises the first `error` given."""
        if self._end is None:
            self._end = error
        self._arrived.set()

    async def next(self) -> StepReport:
        """Raises the error given to `end`, or EngineDied: nothing came for the stall timeout while work was there.

        For one caller at a time; cancelling it loses nothing."""
        silent_slices = 0
        while not self._waiting:
            if self._end is not None:
                raise self._end
            self._arrived.clear()
            try:
                async with asyncio.timeout(self._stall_timeout_s / SLICES):
                    await self._arrived.wait()
            except TimeoutError:
                silent_slices = silent_slices + 1 if self._commanded or self._loaded else 0
                if silent_slices == SLICES:
                    silence = f"has work and has reported nothing for {self._stall_timeout_s} s"
                    raise EngineDied(f"the engine of {self._name} is stuck: it {silence}") from None
        report = self._waiting.popleft()
        self._on_room()
        return report
