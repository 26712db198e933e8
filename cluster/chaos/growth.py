"""What processes take, and how that grew while they were watched. Pure: who takes how much is passed in.

The first third is left out, in which caches fill. What a process holds goes up and down with its load, so that of each
minute the least counts, and a slope is that of a straight line through those (least squares). What faults empty (an
index) goes up again afterwards: of that the most of the last third counts, beside the most of the second.
"""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

MIB = 1 << 20
FLOOR_S = 60.0
LEAST_FLOORS = 3
JUDGED_S = 600.0
"""A growth counts where it was watched for so long. Nodes that faults had replaced, watched for half of that, grew by
up to 6 MiB a minute on a busy machine, and prefill nodes ended at 217 to 234 MiB whatever their age."""


class Life(NamedTuple):
    pid: int
    began_s: float
    """When it was started, since pids come again."""


class Bound(NamedTuple):
    per_minute: float
    share_per_minute: float = 0.0
    """Of what there is; the larger of both is the bound."""
    emptied: bool = False
    """Faults empty it."""


BOUNDS: dict[str, Bound] = {
    "own MiB": Bound(1.0),
    "MiB": Bound(math.inf),
    "threads": Bound(0.5),
    "descriptors": Bound(0.5),
    "tasks": Bound(0.5),
    "index KiB": Bound(4.0, 0.03, emptied=True),
    "stray rows": Bound(4.0),
}
"""By what is taken, with its unit: by how much it may grow. Own memory is resident memory that is shared with nobody;
all of it grows for as long as there are blocks that were never written, and is shown."""


class Taken(NamedTuple):
    """What one process takes at a moment."""

    life: Life
    title: str
    amounts: Mapping[str, float]
    """By a name of `BOUNDS`."""


class Growth(msgspec.Struct, frozen=True):
    title: str
    pid: int
    what: str
    watched_s: float
    last: float
    per_minute: float

    @property
    def bound(self) -> float:
        bound = BOUNDS[self.what]
        return max(bound.per_minute, bound.share_per_minute * self.last)

    @property
    def is_clear(self) -> bool:
        return self.watched_s >= JUDGED_S and self.per_minute > self.bound


class Watch:
    def __init__(self) -> None:
        self._seen: dict[tuple[Life, str], list[tuple[float, float]]] = {}
        self._titles: dict[Life, str] = {}

    def see(self, at_s: float, taken: Iterable[Taken]) -> None:
        """Of the processes that live at `at_s`."""
        for life, title, amounts in taken:
            self._titles[life] = title
            for what, amount in amounts.items():
                self._seen.setdefault((life, what), []).append((at_s, amount))

    def growths(self) -> list[Growth]:
        """Of what was watched long enough for a slope, the fastest by its bound first."""
        found = []
        for (life, what), samples in self._seen.items():
            settled = _settled(samples)
            watched_s = settled[-1][0] - settled[0][0]
            slope = (_of_ceilings if BOUNDS[what].emptied else _of_floors)(settled)
            if slope is not None:
                last = settled[-1][1]
                found.append(Growth(self._titles[life], life.pid, what, watched_s, last, 60 * slope))
        return sorted(found, key=lambda growth: -growth.per_minute / growth.bound)


Samples = list[tuple[float, float]]
"""(when, how much)"""


def _settled(samples: Samples) -> Samples:
    from_s = samples[0][0] + (samples[-1][0] - samples[0][0]) / 3
    return [sample for sample in samples if sample[0] >= from_s]


def _of_floors(samples: Samples) -> float | None:
    """A second; None where there are too few."""
    began_s, watched_s = samples[0][0], samples[-1][0] - samples[0][0]
    if (count := int(watched_s / FLOOR_S)) < LEAST_FLOORS:
        return None
    floors: dict[int, tuple[float, float]] = {}
    for at_s, amount in samples:
        minute = min(count - 1, int((at_s - began_s) * count / watched_s))
        if minute not in floors or amount < floors[minute][1]:
            floors[minute] = (at_s, amount)
    mean_s = sum(at_s for at_s, _ in floors.values()) / len(floors)
    mean = sum(amount for _, amount in floors.values()) / len(floors)
    spread = sum((at_s - mean_s) ** 2 for at_s, _ in floors.values())
    return sum((at_s - mean_s) * (amount - mean) for at_s, amount in floors.values()) / spread if spread else None


def _of_ceilings(samples: Samples) -> float | None:
    """A second; None where it was watched for less than the floors need."""
    watched_s = samples[-1][0] - samples[0][0]
    if watched_s < LEAST_FLOORS * FLOOR_S:
        return None
    half_s = samples[0][0] + watched_s / 2
    before = max(amount for at_s, amount in samples if at_s <= half_s)
    after = max(amount for at_s, amount in samples if at_s >= half_s)
    return (after - before) / (watched_s / 2)
