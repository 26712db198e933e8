"""What goes to a node's own tiers: never behind a gap, and nothing twice."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from kvcache.contents import CacheContents
from kvcache.fetch_plan import BlockPrices, Rates
from kvcache.hashing import BlockHash
from kvcache.journal import CacheChange, Removed, RunStored
from kvcache.memory import BlockMemory
from kvcache.tiers import local_connector
from pipelines.node import offloader
from pipelines.node.offloader import Offloader
from pronghorn.clock import ManualClock
from pronghorn.counters import Counters
from pronghorn.errors import Overloaded
from pronghorn.tasks import Owner

SIZE = 64
A, B, C, D = (BlockHash(letter.encode() * 32) for letter in "ABCD")


class Play:
    """An offloader over real tiers and an engine that leases what `pool` names."""

    def __init__(self, room: int = 100) -> None:
        self.counters = Counters()
        self.memory = BlockMemory.create(4, SIZE)
        self.pool = {A: 0, B: 1, C: 2, D: 3}
        self.leased: list[list[BlockHash]] = []
        self.refuses = False
        self.contents = CacheContents()
        self.tiers = local_connector("n", room * SIZE, BlockPrices(Rates(), SIZE, 16), self.counters, ManualClock())
        self.offloader = Offloader(self.tiers, self.contents, self, self.memory, self.counters)  # type: ignore[arg-type]  # holds
        self.owner = Owner("test")
        self.task = self.owner.start(self.offloader.run(), "offload")

    @asynccontextmanager
    async def lease(self, hashes: Sequence[BlockHash]) -> AsyncIterator[SimpleNamespace]:
        if self.refuses:
            raise Overloaded("full")
        self.leased.append(list(hashes))
        found = []
        for each in hashes:
            if each not in self.pool:
                break
            found.append(self.pool[each])
        yield SimpleNamespace(blocks=found)

    async def note(self, *changes: CacheChange) -> None:
        self.contents.apply(changes)
        self.offloader.note(changes)
        async with asyncio.timeout(30.0):
            while not self.offloader.idle:  # noqa: ASYNC110  # which no event tells
                await asyncio.sleep(0)

    def kept(self) -> str:
        return "".join(letter for letter, each in zip("ABCD", (A, B, C, D), strict=True) if self.tiers.has(each))

    async def close(self) -> None:
        await self.owner.stop(1.0)
        await self.tiers.close()
        self.memory.close()


@pytest.fixture
async def play() -> AsyncIterator[Play]:
    made = Play()
    yield made
    await made.close()


async def test_what_was_left_out_goes_before_what_follows_it(play: Play) -> None:
    play.refuses = True
    await play.note(RunStored(None, [A, B]))
    assert play.kept() == "" and play.counters.value("offload_skipped") == 1
    play.refuses = False
    await play.note(RunStored(B, [C]))
    assert play.kept() == "ABC" and play.leased == [[A, B, C]]


async def test_what_is_kept_is_not_copied_again(play: Play) -> None:
    await play.note(RunStored(None, [A, B]))
    await play.note(Removed([B]), RunStored(A, [B, C]))
    assert play.leased == [[A, B], [C]] and play.kept() == "ABC"
    await play.note(Removed([C]), RunStored(B, [C]))
    assert play.leased == [[A, B], [C]]


async def test_nothing_is_taken_behind_a_gap_of_the_pool(play: Play) -> None:
    await play.note(RunStored(C, [D]))
    assert play.kept() == "" and play.leased == [] and play.counters.value("offload_skipped") == 1


async def test_a_chain_longer_than_the_tier_is_tried_a_piece_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloader, "BLOCKS_AT_ONCE", 1)
    play = Play(room=1)
    await play.note(RunStored(None, [A, B, C, D]))
    assert play.kept() == "A"
    assert play.leased[:2] == [[A], [B]] and [B, C] not in play.leased
    await play.close()
