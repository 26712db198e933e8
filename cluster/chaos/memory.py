"""How the resident memory of processes grew while they were watched. Pure: who is how large is passed in.

A slope is that of a straight line through what was seen (least squares) after the first third, in which caches fill.
"""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

LEAST_SAMPLES = 10
MIB = 1 << 20


class Life(NamedTuple):
    pid: int
    began_s: float
    """When it was started, since pids come again."""


class Growth(msgspec.Struct, frozen=True):
    title: str
    pid: int
    watched_s: float
    rss_mib: float
    """In the end."""
    mib_per_minute: float


class Memory:
    def __init__(self) -> None:
        self._seen: dict[Life, list[tuple[float, int]]] = {}
        self._titles: dict[Life, str] = {}

    def see(self, at_s: float, sizes: Iterable[tuple[Life, str, int]]) -> None:
        """The processes that live at `at_s`: life, title, resident bytes."""
        for life, title, rss_bytes in sizes:
            self._seen.setdefault(life, []).append((at_s, rss_bytes))
            self._titles[life] = title

    def growths(self) -> list[Growth]:
        """Of every process that was seen often enough, the fastest first."""
        found = []
        for life, samples in self._seen.items():
            settled = samples[len(samples) // 3 :]
            if len(settled) < LEAST_SAMPLES:
                continue
            watched_s = settled[-1][0] - settled[0][0]
            size = settled[-1][1] / MIB
            found.append(Growth(self._titles[life], life.pid, watched_s, size, _slope(settled) * 60 / MIB))
        return sorted(found, key=lambda growth: -growth.mib_per_minute)


def _slope(samples: list[tuple[float, int]]) -> float:
    """Bytes a second."""
    mean_s = sum(at_s for at_s, _ in samples) / len(samples)
    mean = sum(size for _, size in samples) / len(samples)
    spread = sum((at_s - mean_s) ** 2 for at_s, _ in samples)
    return sum((at_s - mean_s) * (size - mean) for at_s, size in samples) / spread if spread else 0.0
