"""Events lost, late, twice and out of order: after the snapshot that is asked for, the index is the node's truth."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.contents import CacheContents
from kvcache.hashing import BlockHash, index_keys
from kvcache.journal import CacheChange, Removed, RunStored
from orchestrator.holdings import ASKS_AGAIN_S, Holdings
from pipelines.node.block_feed import BlockFeed, events_of
from pipelines.types.frames import BlockEvents
from pronghorn.counters import Counters
from pronghorn.ids import Incarnation

NODE = Incarnation("node.life")


def digest(path: tuple[int, ...]) -> BlockHash:
    return BlockHash(hash(path).to_bytes(8, "little", signed=True) * 4)


class Node:
    """A cache that stores chains and evicts leaves, and the feed of one orchestrator."""

    def __init__(self) -> None:
        self.held: set[tuple[int, ...]] = set()
        self.contents = CacheContents()
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

    def _change(self, change: CacheChange) -> None:
        self.contents.apply([change])
        self.feed.add(events_of([change]))


paths = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)
fates = st.sampled_from(["arrives"] * 6 + ["lost", "twice", "late"])
moves = st.tuples(st.sampled_from(["store", "store", "evict"]), paths, fates)


@pytest.mark.field("llm-d-router#1737", "llm-d-router#1887", "Mooncake#4159")
@settings(max_examples=200, deadline=None)
@given(moves=st.lists(moves, max_size=40))
def test_the_index_becomes_the_nodes_truth_whatever_happened_to_its_frames(
    moves: list[tuple[str, tuple[int, ...], str]],
) -> None:
    node, holdings, now_s = Node(), Holdings(1 << 24, Counters()), 0.0
    late: list[BlockEvents] = []

    def receive(frame: BlockEvents) -> None:
        nonlocal now_s
        now_s += ASKS_AGAIN_S
        if holdings.events(NODE, frame, now_s):
            node.feed.resend()
        holdings.check()

    for what, path, fate in moves:
        (node.store if what == "store" else node.evict)(path)
        frame = node.feed.take(node.contents)
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
        while (frame := node.feed.take(node.contents)) is not None:
            receive(frame)
    truth = {int.from_bytes(index_keys([digest(p)]), "little") for p in node.held}
    assert holdings.dump() == {NODE: truth}
