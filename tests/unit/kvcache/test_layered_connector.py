"""Tiers of one's own before other nodes: who is asked for what, and what the bytes are said to come from."""

from collections.abc import Sequence
from typing import Any

import pytest

from kvcache.connector import Landed, Located, NullConnector
from kvcache.hashing import BlockHash
from kvcache.layered_connector import LayeredConnector
from pronghorn.clock import ManualClock
from pronghorn.counters import Counters

HASHES = [BlockHash(bytes([n]) * 32) for n in range(1, 11)]
SIZE = 8
HINT = {"version": 1, "instances": []}


class Layer(NullConnector):
    """Says that it has the first `has`, and brings the first `brings`; writes its name."""

    def __init__(self, name: str, clock: ManualClock, has: int, brings: int = 99, takes_s: float = 0.0) -> None:
        super().__init__(Counters())
        self._name, self._clock = name, clock
        self._has, self._brings, self._takes_s = has, brings, takes_s
        self.lookups: list[tuple[int, int, Any]] = []
        self.loads: list[tuple[int, int, float]] = []
        self.touched = self.resets = self.closed = 0

    async def lookup(self, hashes: Sequence[BlockHash], known: int, metadata: Any) -> Located:
        self.lookups.append((len(hashes), known, metadata))
        return Located(max(known, self._has))

    async def load(self, located, hashes, start, destinations, budget_s) -> Landed:
        self.loads.append((start, len(destinations), budget_s))
        self._clock.advance(self._takes_s)
        count = max(0, min(len(destinations), self._brings - start))
        for destination in destinations[:count]:
            destination[:] = self._name.encode() * SIZE
        return Landed(count, {self._name: count * SIZE} if count else {})

    def touch(self, hashes: Sequence[BlockHash]) -> None:
        self.touched += len(hashes)

    def reset(self) -> None:
        self.resets += 1

    async def close(self) -> None:
        self.closed += 1


class Play:
    def __init__(self, near: dict[str, Any], far: dict[str, Any]) -> None:
        self.clock = ManualClock()
        self.near, self.far = Layer("n", self.clock, **near), Layer("f", self.clock, **far)
        self.both = LayeredConnector(self.near, self.far, self.clock)

    async def load(self, known: int = 0, start: int | None = None, budget_s: float = 5.0) -> tuple[str, Landed]:
        """Who wrote each block, and what is said of it."""
        located = await self.both.lookup(HASHES, known, HINT)
        start = known if start is None else start
        destinations = [memoryview(bytearray(b"-" * SIZE)) for _ in range(located.blocks - start)]
        landed = await self.both.load(located, HASHES[: located.blocks], start, destinations, budget_s)
        return b"".join(bytes(d[:1]) for d in destinations).decode(), landed


async def test_what_is_near_is_not_asked_of_the_far_one_and_the_rest_is() -> None:
    play = Play({"has": 4}, {"has": 9})
    assert await play.load(known=1) == ("nnnfffff", Landed(8, {"n": 3 * SIZE, "f": 5 * SIZE}))
    assert play.far.lookups == [(10, 4, HINT)] and [load[:2] for load in play.far.loads] == [(4, 5)]


async def test_the_far_one_is_asked_for_nothing_where_all_is_near() -> None:
    play = Play({"has": 10}, {"has": 10})
    assert await play.load() == ("n" * 10, Landed(10, {"n": 10 * SIZE}))
    assert not play.far.lookups and not play.far.loads


async def test_what_is_near_does_where_the_far_one_has_less() -> None:
    assert await Play({"has": 4}, {"has": 0}).load() == ("nnnn", Landed(4, {"n": 4 * SIZE}))
    assert await Play({"has": 0}, {"has": 4}).load() == ("ffff", Landed(4, {"f": 4 * SIZE}))
    assert await Play({"has": 0}, {"has": 0}).load() == ("", Landed(0))


@pytest.mark.parametrize("far_has", [6, 10])
async def test_a_block_that_was_lost_near_is_brought_from_afar_and_what_follows_too(far_has: int) -> None:
    play = Play({"has": 6, "brings": 2}, {"has": far_has})
    assert await play.load() == (
        "nn" + "f" * (far_has - 2),
        Landed(far_has, {"n": 2 * SIZE, "f": (far_has - 2) * SIZE}),
    )
    assert play.far.lookups[-1] == (10, 2, HINT)  # with the whole chain, to whose end a hint may point


async def test_blocks_that_have_come_meanwhile_are_brought_from_nowhere() -> None:
    play = Play({"has": 4}, {"has": 8})
    assert await play.load(start=6) == ("ff", Landed(2, {"f": 2 * SIZE}))
    assert not play.near.loads


async def test_both_together_keep_to_the_budget() -> None:
    play = Play({"has": 4, "takes_s": 3.0}, {"has": 8})
    await play.load(budget_s=5.0)
    assert play.far.loads == [(4, 4, 2.0)]
    late = Play({"has": 4, "takes_s": 5.0}, {"has": 8})
    assert await late.load(budget_s=5.0) == ("nnnn----", Landed(4, {"n": 4 * SIZE}))
    assert not late.far.loads


async def test_both_are_touched_reset_and_closed() -> None:
    play = Play({"has": 1}, {"has": 1})
    play.both.touch(HASHES)
    play.both.reset()
    await play.both.close()
    for layer in (play.near, play.far):
        assert (layer.touched, layer.resets, layer.closed) == (10, 1, 1)
