"""Time as something that is passed in: a port with one method, and the system's version of it."""

import time
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float:
        """Monotonic seconds. Only differences mean anything, and only within one process."""


class SystemClock:
    def now_s(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves when it is told to."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        self._now_s += seconds
