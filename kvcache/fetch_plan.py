"""Whether blocks are cheaper to fetch than to compute, from whom, and how long one waits for them. Pure.

Knows sizes and speeds that were measured while running; time is passed in. A speed that is not known, or was measured
too long ago, counts as good: only trying it tells, and a bad one is found out in one fetch.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

FADES_S = 30.0
"""A measurement this old says nothing any more: a link that was slow is tried again."""
KEPT = 0.7
"""Weight of what was measured before the newest."""
MIN_SEGMENT_BLOCKS = 8
"""Fewer blocks are not worth a stream of their own."""
MAX_WAIT_FACTOR = 2.0
"""Blocks are waited for at most this many times as long as computing them would take."""
UNKNOWN_WAIT_S = 5.0
"""The same, where it is not known how long computing takes."""
MIN_WAIT_S = 0.5
MAX_PATIENCE_S = 0.5
PATIENCE_SHARE = 0.25
"""Of the time that computing the blocks takes: how long one waits for a promised holder to have anything at all."""


class Rates:
    """Amounts a second, by name, each over its latest measurements."""

    def __init__(self) -> None:
        self._measured: dict[Hashable, tuple[float, float, float]] = {}
        """Amount, seconds, when; the oldest first."""

    def note(self, name: Hashable, amount: float, took_s: float, now_s: float) -> None:
        if amount <= 0 or took_s <= 0:
            return
        before_amount, before_s, _ = self._fresh(name, now_s) or (0.0, 0.0, now_s)
        self._measured.pop(name, None)
        self._measured[name] = (KEPT * before_amount + amount, KEPT * before_s + took_s, now_s)
        self._fresh(next(iter(self._measured)), now_s)  # the oldest: nobody may ever ask for it again

    def rate(self, name: Hashable, now_s: float) -> float | None:
        found = self._fresh(name, now_s)
        return None if found is None else found[0] / found[1]

    def _fresh(self, name: Hashable, now_s: float) -> tuple[float, float, float] | None:
        found = self._measured.get(name)
        if found is None or now_s - found[2] > FADES_S:
            self._measured.pop(name, None)
            return None
        return found


Source = TypeVar("Source", bound=Hashable)

COMPUTE = "compute"
"""The name of this node's own engine among `Rates`, in prompt tokens a second."""


@dataclass(frozen=True)
class BlockPrices:
    """What blocks of this node's layout cost, to bring and to compute, by what was measured of both."""

    rates: Rates
    block_bytes: int
    block_tokens: int

    def cheaper_to_bring(self, blocks: Mapping[Source, int], latency_s: float, now_s: float) -> bool:
        """Than to compute: so many blocks from each source, one source after another. Yes where a speed is not known:
        only trying it tells."""
        tokens_per_s = self.rates.rate(COMPUTE, now_s)
        bringing_s = latency_s
        for source, count in blocks.items():
            bytes_per_s = self.rates.rate(source, now_s)
            if bytes_per_s is None or tokens_per_s is None:
                return True
            bringing_s += count * self.block_bytes / bytes_per_s
        return tokens_per_s is None or bringing_s < sum(blocks.values()) * self.block_tokens / tokens_per_s


def wait_s(num_tokens: int, tokens_per_s: float | None) -> float:
    """How long a fetch of `num_tokens` may take in all, those that the holder is still computing included."""
    if tokens_per_s is None:
        return UNKNOWN_WAIT_S
    return max(MIN_WAIT_S, MAX_WAIT_FACTOR * num_tokens / tokens_per_s)


def patience_s(num_tokens: int, tokens_per_s: float | None) -> float:
    """How long a holder of whom these tokens are promised may have none of them, nor compute any."""
    if tokens_per_s is None:
        return MAX_PATIENCE_S
    return min(MAX_PATIENCE_S, PATIENCE_SHARE * num_tokens / tokens_per_s)


@dataclass(frozen=True)
class Segment:
    """Ask `name` for the blocks at positions `start` up to `stop`."""

    name: str
    start: int
    stop: int


def segments(start: int, holders: Sequence[tuple[str, int, float | None]]) -> list[Segment]:
    """Share the blocks from `start` on out to holders (name, how many leading blocks it has, its speed): adjacent runs,
    the shallow holders first, each about as long as its speed deserves. Unknown speeds count as the best known one."""
    deep = sorted((h for h in holders if h[1] > start), key=lambda holder: holder[1])
    if not deep:
        return []
    total = deep[-1][1] - start
    deep = deep[-max(1, total // MIN_SEGMENT_BLOCKS) :]
    best = max((speed for _, _, speed in deep if speed is not None), default=1.0)
    speeds = [best if speed is None else speed for _, _, speed in deep]
    found: list[Segment] = []
    position = start
    for index, (name, depth, _) in enumerate(deep):
        share = round((deep[-1][1] - position) * speeds[index] / sum(speeds[index:]))
        stop = depth if index == len(deep) - 1 else min(depth, position + share)
        if stop > position:
            found.append(Segment(name, position, stop))
            position = stop
    return found
