"""Events lost, late, twice and out of order: after the snapshot that is asked for, the index is the node's truth, of
its pool and of its tiers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.contents import CacheContents
from kvcache.hashing import BlockHash, index_keys
from kvcache.journal import CacheChange, Removed, RunStored
from kvcache.tier_order import TIERS, Tier
from kvcache.tier_reach import TierReach
from orchestrator.holdings import ASKS_AGAIN_S, Holdings
from pipelines.node.block_feed import BlockFeed, events_of
from pipelines.types.frames import BlockEvents
from pronghorn.counters import Counters
from pronghorn.ids import Incarnation

NODE = Incarnation("node.life")


def digest(path: tuple[int, ...]) -> BlockHash:
    return BlockHash(hash(path).to_bytes(8, "little", signed=True) * 4)


class Node:
    """A cache that stores chains and evicts leaves, tiers that take copies and give them up, and the feed of one
    orchestrator."""

    def __init__(self, tiers: list[Tier]) -> None:
        self.held: set[tuple[int, ...]] = set()
        self.kept: dict[Tier, set[tuple[int, ...]]] = {tier: set() for tier in tiers}
        self.contents = CacheContents()
        self.reach = TierReach(tiers)
        self.feed = BlockFeed()

    def store(self, path: tuple[int, ...]) -> None:
        new = [path[: i + 1] for i in range(len(path)) if path[: i + 1] not in self.held]
        if new:
            self.held |= set(new)
            parent = new[0][:-1]
            self._change(RunStored(digest(parent) if parent else None, [digest(p) for p in new]))

    def evict(self, path: tuple[int, ...]) -> None:
        gone = sorted((p for p in self.held if p[: len(path)] == path), key=len, reverse=True)
        if gone:
            self.held -= set(gone)
            self._change(Removed([digest(p) for p in gone]))

    def keep(self, tier: Tier, path: tuple[int, ...]) -> None:
        """A copy of what the pool has of it."""
        if tier in self.kept and path in self.held:
            for each in (path[: i + 1] for i in range(len(path))):
                self.kept[tier].add(each)
                self.reach.kept(tier, digest(each), digest(each[:-1]) if len(each) > 1 else None)
            self._tell()

    def give_up(self, tier: Tier, path: tuple[int, ...]) -> None:
        gone = sorted((p for p in self.kept.get(tier, ()) if p[: len(path)] == path), key=len, reverse=True)
        for each in gone:
            self.kept[tier].discard(each)
            self.reach.lost(tier, digest(each))
        self._tell()

    def do(self, what: str, path: tuple[int, ...]) -> None:
        match what.split():
            case ["store"]:
                self.store(path)
            case ["evict"]:
                self.evict(path)
            case ["keep", tier]:
                self.keep(tier, path)  # type: ignore[arg-type]  # one of TIERS
            case ["give_up", tier]:
                self.give_up(tier, path)  # type: ignore[arg-type]  # likewise

    def take(self) -> BlockEvents | None:
        return self.feed.take(self.contents, self.reach.contents)

    def _change(self, change: CacheChange) -> None:
        self.contents.apply([change])
        self.feed.add(events_of([change]))
        self.reach.pool_changed([change])
        self._tell()

    def _tell(self) -> None:
        self.feed.add([], {tier: events_of(changes) for tier, changes in self.reach.take().items()})

    def reached(self, tier: Tier) -> set[tuple[int, ...]]:
        nearer = TIERS[: TIERS.index(tier) + 1]
        held = self.held.union(*(kept for each, kept in self.kept.items() if each in nearer))
        return {path for path in held if all(path[:depth] in held for depth in range(1, len(path)))}


paths = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)
fates = st.sampled_from(["arrives"] * 6 + ["lost", "twice", "late"])
deeds = ["store", "store", "store", "evict", "evict", *(f"{do} {tier}" for do in ("keep", "give_up") for tier in TIERS)]
moves = st.tuples(st.sampled_from(deeds), paths, fates)


@pytest.mark.field("llm-d-router#1737", "llm-d-router#1887", "Mooncake#4159")
@settings(max_examples=200, deadline=None)
@given(moves=st.lists(moves, max_size=40), tiers=st.lists(st.sampled_from(TIERS), unique=True))
def test_the_index_becomes_the_nodes_truth_whatever_happened_to_its_frames(
    moves: list[tuple[str, tuple[int, ...], str]], tiers: list[Tier]
) -> None:
    node, holdings, now_s = Node(tiers), Holdings(1 << 24, Counters()), 0.0
    late: list[BlockEvents] = []

    def receive(frame: BlockEvents) -> None:
        nonlocal now_s
        now_s += ASKS_AGAIN_S
        if holdings.events(NODE, frame, now_s):
            node.feed.resend()
        holdings.check()

    for what, path, fate in moves:
        node.do(what, path)
        frame = node.take()
        if frame is None:
            continue
        if fate == "late":
            late.append(frame)
        elif fate != "lost":
            receive(frame)
            if fate == "twice":
                receive(frame)
            while late:
                receive(late.pop())
    for path in [(7,), (8,), (9,)]:  # traffic goes on, and what was lost shows
        node.store(path)
        while (frame := node.take()) is not None:
            receive(frame)

    def keys(held: set[tuple[int, ...]]) -> set[int]:
        return {int.from_bytes(index_keys([digest(p)]), "little") for p in held}

    assert holdings.dump() == {NODE: keys(node.held)}
    for tier in TIERS:
        assert holdings.dump_kept(tier) == ({NODE: keys(node.reached(tier))} if tier in tiers else {})
    asked = index_keys([digest((7,))])
    assert holdings.find_kept(asked, [NODE]) == ({NODE: dict.fromkeys(tiers, 1)} if tiers else {})
    holdings.lost(NODE)
    assert holdings.dump() == {} and not any(holdings.dump_kept(tier) for tier in TIERS)
    assert holdings.find_kept(asked, [NODE]) == {}
    holdings.check()
