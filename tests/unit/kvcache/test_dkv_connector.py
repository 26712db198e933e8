"""What a node asks of whom, over a source and a directory that a test holds."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from kvcache import dkv_connector
from kvcache.dkv_connector import DIRECTORY_PAUSE_S, DKVConnector, Fetched
from kvcache.fetch_plan import COMPUTE, BlockPrices, Rates
from kvcache.hashing import BlockHash
from kvcache.memory_directory import MemoryDirectory
from kvcache.registry import NodeRecord
from pronghorn.clock import ManualClock
from pronghorn.counters import Counters
from pronghorn.ids import Incarnation, NodeName

HASHES = [BlockHash(bytes([n]) * 32) for n in range(1, 21)]
US = NodeName("us")


def record(name: str) -> NodeRecord:
    return NodeRecord(NodeName(name), "decode", "m", f"{name}:1", Incarnation(name * 4), {}, "s", {}, "h", 1, 1.0)


def hint(**blocks: int) -> dict[str, Any]:
    instances = [{"name": n, "blocks": b, "last_hash": HASHES[b - 1].hex()} for n, b in blocks.items()]
    return {"version": 1, "instances": instances}


class Source:
    def __init__(self) -> None:
        self.asked: list[tuple[str, list[BlockHash], float]] = []
        self.gives: dict[str, int] = {}
        """How many of the blocks asked for each gives; all where it is not named."""

    async def fetch(
        self,
        holder: NodeRecord,
        hashes: Sequence[BlockHash],
        destinations: Sequence[memoryview],
        budget_s: float,
        patience_s: float,
    ) -> Fetched:
        self.asked.append((holder.name, list(hashes), patience_s))
        count = min(len(hashes), self.gives.get(holder.name, len(hashes)))
        return Fetched(count, 100 * count, 0.1, None if count == len(hashes) else "node_lost")


class Slow(MemoryDirectory):
    """Never answers."""

    questions = 0

    async def depths(self, hashes: Sequence[BlockHash]) -> dict[Incarnation, int]:
        self.questions += 1
        await asyncio.Event().wait()
        return {}


class Play:
    def __init__(self, directory: MemoryDirectory | None = None) -> None:
        self.clock, self.counters, self.rates, self.source = ManualClock(), Counters(), Rates(), Source()
        self.connector = DKVConnector(
            name=US,
            peers=lambda: {r.name: r for r in map(record, "abc")},
            source=self.source,
            directory=directory,
            prices=BlockPrices(self.rates, 100, 16),
            clock=self.clock,
            counters=self.counters,
        )

    async def load(self, metadata: dict[str, Any] | None, known: int = 0) -> int:
        located = await self.connector.lookup(HASHES, known, metadata)
        destinations = [memoryview(bytearray(100)) for _ in range(located.blocks - known)]
        return (await self.connector.load(located, HASHES, known, destinations, 5.0)).blocks


async def test_a_holder_is_asked_for_what_is_missing_and_nothing_more() -> None:
    play = Play()
    assert await play.load(hint(a=10), known=4) == 6
    assert [(name, asked) for name, asked, _ in play.source.asked] == [("a", HASHES[4:10])]


async def test_what_comes_after_a_gap_is_not_used() -> None:
    play = Play()
    play.source.gives = {"a": 3}
    assert await play.load(hint(a=20, b=20)) == 3
    assert play.counters.value("fetch_failed", "node_lost") == 1


async def test_nobody_is_asked_where_computing_is_sooner() -> None:
    play = Play()
    play.rates.note(COMPUTE, 1e6, 1.0, 0.0)
    play.rates.note(record("a").incarnation, 10.0, 1.0, 0.0)
    assert await play.load(hint(a=10)) == 0 and not play.source.asked
    assert play.counters.value("fetch_declined", "cheaper_to_compute") == 1
    play.clock.advance(60.0)  # measured too long ago to count
    assert await play.load(hint(a=10)) == 10


async def test_without_a_hint_the_directory_says_who_has_what() -> None:
    directory = MemoryDirectory(ManualClock())
    await directory.open(NodeName("b"), record("b").incarnation, 1.0)
    await directory.stored(NodeName("b"), record("b").incarnation, HASHES[2:7])
    play = Play(directory)
    assert await play.load(None, known=2) == 5
    [(name, _, patience_s)] = play.source.asked
    assert (name, patience_s) == ("b", 0.0)  # what it does not have any more is not waited for


@pytest.mark.field("LMCache#2017")
async def test_a_directory_that_does_not_answer_stalls_one_prompt_for_a_moment_and_the_next_not_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dkv_connector, "DIRECTORY_TIMEOUT_S", 0.01)
    directory = Slow(ManualClock())
    play = Play(directory)
    for _ in range(3):
        assert await play.load(None) == 0
    assert directory.questions == 1 and play.counters.value("directory_miss", "no_answer") == 1
    play.clock.advance(DIRECTORY_PAUSE_S)
    await play.load(None)
    assert directory.questions == 2


async def test_replaying_the_hint_of_another_tenant_is_as_much_work_as_making_one_up() -> None:
    """What is done, asked and counted does not depend on what the other tenant has, so that no time tells of it."""
    others = [BlockHash(bytes([100 + n]) * 32) for n in range(10)]
    told = []
    for last_hash in (others[-1], BlockHash(bytes(32))):
        directory = Slow(ManualClock())
        await directory.open(NodeName("a"), record("a").incarnation, 1.0)
        await directory.stored(NodeName("a"), record("a").incarnation, others)
        play = Play(directory)
        replayed = {"version": 1, "instances": [{"name": "a", "blocks": 10, "last_hash": last_hash.hex()}]}
        assert await play.load(replayed) == 0
        told.append((play.source.asked, directory.questions, play.counters.snapshot()))
    assert told[0] == told[1]
    asked, questions, counts = told[0]
    assert not asked and not questions and counts["cache_hint_miss.wrong_hash"] == 1
