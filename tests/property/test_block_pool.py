"""The block pool against a list of free ids and a dict of hashes, in any order of calls."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcache.hashing import BlockHash
from kvcache.pool import BlockPool, PoolStats

TOTAL = 6
HASHES = [BlockHash(bytes([n]) * 4) for n in range(4)]


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL)
        self.free = list(range(TOTAL))
        self.holders = dict.fromkeys(range(TOTAL), 0)
        self.hash: dict[int, BlockHash] = {}
        self.tables: list[list[int]] = []

    @rule(count=st.integers(0, TOTAL))
    def take(self, count):
        if count > len(self.free):
            return
        expected, self.free = self.free[:count], self.free[count:]
        assert self.pool.take(count) == expected
        for block in expected:
            self.holders[block] = 1
            self.hash.pop(block, None)
        self.tables.append(expected)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), block_hash=st.sampled_from(HASHES))
    def publish(self, data, block_hash):
        block = data.draw(st.sampled_from([b for table in self.tables for b in table]))
        if block not in self.hash:
            self.pool.publish(block, block_hash)
            self.hash[block] = block_hash

    @rule(wanted=st.lists(st.sampled_from(HASHES), unique=True))
    def hold(self, wanted):
        table = []
        for block_hash in wanted:
            block = self.pool.find(block_hash)
            copies = [b for b, h in self.hash.items() if h == block_hash]
            assert (block is None) == (not copies)
            if block is None:
                continue
            assert block == next((copy for copy in copies if self.holders[copy]), copies[-1])
            self.pool.hold(block)
            if block in self.free:
                self.free.remove(block)
            self.holders[block] += 1
            table.append(block)
        self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data):
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)
        for block in reversed(table):
            self.holders[block] -= 1
            if self.holders[block] == 0:
                self.free.insert(len(self.free) if block in self.hash else 0, block)

    @rule()
    def forget(self):
        forgotten = [block for block in self.free if block in self.hash]
        assert self.pool.forget_free() == len(forgotten)
        for block in forgotten:
            del self.hash[block]

    @invariant()
    def agrees(self):
        self.pool.check()
        assert self.pool.free_order() == self.free
        assert [self.pool.holders(b) for b in range(TOTAL)] == list(self.holders.values())
        assert {b: self.pool.hash_of(b) for b in range(TOTAL) if self.pool.hash_of(b)} == self.hash
        cached = sum(block in self.hash for block in self.free)
        assert self.pool.stats() == PoolStats(TOTAL, len(self.free), TOTAL - len(self.free), cached)


TestBlockPool = PoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
