"""Whatever happens in an engine's pools, what a reader of the node's block events holds is what can be found there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.contents import CacheContents
from kvcache.hashing import BlockHash, index_keys
from kvcache.journal import CacheJournal
from kvcache.pool import BlockPool
from pipelines.node.block_feed import BlockFeed, events_of
from pipelines.types.frames import BlockEvents, BlocksCleared, BlocksRemoved, BlocksStored

TOTAL = 5
CHAIN = [BlockHash(bytes([n]) * 32) for n in range(1, 7)]


class Reader:
    """An orchestrator's side: a set of keys, and the number of the frame before."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.sequence = 0
        self.synced = False

    def read(self, frame: BlockEvents) -> None:
        assert frame.sequence == self.sequence + 1
        self.sequence = frame.sequence
        if frame.snapshot:
            self.keys = set()
        for event in frame.events:
            match event:
                case BlocksStored():
                    assert event.parent is None or event.parent.to_bytes(8, "little") in self.keys
                    self.keys |= _split(event.keys)
                case BlocksRemoved():
                    assert _split(event.keys) <= self.keys
                    self.keys -= _split(event.keys)
                case BlocksCleared():
                    self.keys = set()
        self.synced = not frame.more


def _split(keys: bytes) -> set[bytes]:
    return {keys[i : i + 8] for i in range(0, len(keys), 8)}


@pytest.mark.field("llm-d-router#1737")
@pytest.mark.field("Mooncake#4159")
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 5)), max_size=60), st.integers(1, 6))
def test_a_reader_holds_what_the_pools_hold_whatever_was_dropped_in_between(steps, max_waiting):
    journal = CacheJournal()
    pools = [BlockPool(TOTAL, 0, journal), BlockPool(TOTAL, TOTAL, journal)]
    contents, feed, reader = CacheContents(), BlockFeed(max_waiting), Reader()
    tables = []
    for kind, number in steps:
        pool = pools[number % 2]
        if kind < 2 and pool.num_free > number:
            table = pool.take(number + 1)
            for position, block in enumerate(table):
                pool.publish(block, CHAIN[position], CHAIN[position - 1] if position else None)
            tables.append((pool, table))
        elif kind == 2 and tables:
            owner, table = tables.pop(number % len(tables))
            owner.release(table)
        elif kind == 3:
            pool.forget_free()
        elif kind == 4:
            changes = journal.take()
            contents.apply(changes)
            feed.add(events_of(changes))
        elif kind == 5:
            feed.resend()
        elif (frame := feed.take(contents, {})) is not None:
            reader.read(frame)
    changes = journal.take()
    contents.apply(changes)
    feed.add(events_of(changes))
    while (frame := feed.take(contents, {})) is not None:
        reader.read(frame)
    truth = [h for h in CHAIN if any(pool.find(h) is not None for pool in pools)]
    assert reader.synced and reader.keys == _split(index_keys(truth))
    assert len(contents) == len(truth) and all(h in contents for h in truth)
