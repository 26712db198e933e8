"""The prefix cache against dicts and lists.

The model knows nothing of hashes: each block remembers the text (salt and all tokens up to its end) for which it was
computed, as a stand-in for its bytes. A reader of any shared block must find exactly its own text in it.
"""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcache.hashing import BlockHasher
from kvcache.prefix_cache import PoolStats, PrefixCache
from pronghorn.errors import InsufficientBlocks

TOTAL, BLOCK = 7, 2
HASHER = BlockHasher("sha256", bytes(32), "m", None, {"block_tokens": str(BLOCK)})
TEXTS = st.sampled_from([[0, 0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1, 1, 1]]).flatmap(
    lambda text: st.integers(0, len(text)).map(lambda length: text[:length])
)
"""Prompts that share their start: random ones would hardly ever meet."""


class Sequence:
    def __init__(self, salt, tokens):
        self.salt, self.tokens = salt, tokens
        self.table, self.cached, self.valid = [], 0, 0

    def array(self):
        return np.array(self.tokens, dtype=np.int64)

    def text(self, position):
        return (self.salt, tuple(self.tokens[: (position + 1) * BLOCK]))


class PrefixCacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(TOTAL, HASHER)
        self.free = list(range(TOTAL))
        self.bytes = {}  # block -> the text that it was computed for, whether or not it can be found
        self.findable = set()
        self.sequences = {}
        self.next_owner = 0

    owners = st.runner().flatmap(lambda self: st.sampled_from(sorted(self.sequences)))
    have_owners = precondition(lambda self: self.sequences)

    @rule(salt=st.sampled_from([None, "tenant"]), tokens=TEXTS)
    def claim(self, salt, tokens):
        self.cache.claim(self.next_owner, HASHER.root(salt))
        self.sequences[self.next_owner] = Sequence(salt, tokens)
        self.next_owner += 1

    @rule(salt=st.sampled_from([None, "tenant"]), tokens=TEXTS)
    def serve(self, salt, tokens):
        """A whole prompt at once, where it fits."""
        owner = self.next_owner
        self.claim(salt, tokens)
        self.match(owner)
        self.reserve(owner, 0)
        self._compute(owner, min(len(tokens), len(self.sequences[owner].table) * BLOCK))

    @have_owners
    @rule(owner=owners)
    def match(self, owner):
        mine = self.sequences[owner]
        if len(mine.table) > mine.cached:
            return
        cached = self.cache.match(owner, mine.array())
        known = {self.bytes[block] for block in self.findable}
        expected = mine.cached
        while (expected + 1) * BLOCK < len(mine.tokens) and mine.text(expected) in known:
            expected += 1
        assert cached == expected * BLOCK
        for position, block in list(enumerate(self.cache.table(owner)))[mine.cached :]:
            assert block in self.findable and self.bytes[block] == mine.text(position)
            if block in self.free:
                self.free.remove(block)
        mine.table = list(self.cache.table(owner))
        mine.cached = expected
        mine.valid = max(mine.valid, cached)

    @have_owners
    @rule(owner=owners, extra=st.integers(0, 3))
    def reserve(self, owner, extra):
        mine = self.sequences[owner]
        wanted = len(mine.tokens) + extra
        missing = max(0, -(-wanted // BLOCK) - len(mine.table))
        assert self.cache.missing_blocks(owner, wanted) == missing
        assert self.cache.can_reserve(owner, wanted) == (missing <= len(self.free))
        try:
            self.cache.reserve(owner, wanted)
        except InsufficientBlocks:
            assert missing > len(self.free)
            return
        taken, self.free = self.free[:missing], self.free[missing:]
        mine.table += taken
        for block in taken:
            self.findable.discard(block)
            self.bytes.pop(block, None)

    @have_owners
    @rule(owner=owners, token=st.integers(0, 1))
    def generate(self, owner, token):
        self.sequences[owner].tokens = [*self.sequences[owner].tokens, token]

    @have_owners
    @rule(owner=owners, data=st.data())
    def compute(self, owner, data):
        mine = self.sequences[owner]
        self._compute(owner, data.draw(st.integers(0, min(len(mine.tokens), len(mine.table) * BLOCK))))

    def _compute(self, owner, valid):
        """Write the positions below `valid` that are not written yet, then commit them."""
        mine = self.sequences[owner]
        for position in range(mine.valid // BLOCK, -(-valid // BLOCK)):
            block = mine.table[position]
            assert block not in self.findable, "a findable block is written"
            assert sum(block in other.table for other in self.sequences.values()) == 1, "a shared block is written"
        self.cache.commit(owner, mine.array(), valid)
        for position in range(mine.valid // BLOCK, valid // BLOCK):
            self.bytes[mine.table[position]] = mine.text(position)
            self.findable.add(mine.table[position])
        mine.valid = max(mine.valid, valid)

    @have_owners
    @rule(owner=owners)
    def release(self, owner):
        self.cache.release(owner)
        gone = self.sequences.pop(owner)
        held = {block for mine in self.sequences.values() for block in mine.table}
        for block in reversed(gone.table):
            if block not in held:
                self.free.insert(len(self.free) if block in self.findable else 0, block)

    @rule()
    def reset(self):
        forgotten = [block for block in self.free if block in self.findable]
        assert self.cache.reset() == len(forgotten)
        self.findable -= set(forgotten)

    @invariant()
    def agrees(self):
        self.cache.check()
        assert list(self.cache.owners) == list(self.sequences)
        for owner, mine in self.sequences.items():
            assert self.cache.table(owner) == mine.table
            assert self.cache.cached_blocks(owner) == mine.cached
        cached = sum(block in self.findable for block in self.free)
        assert self.cache.stats() == PoolStats(TOTAL, len(self.free), TOTAL - len(self.free), cached)

    @invariant()
    def what_can_be_found_can_be_reached(self):
        known = {self.bytes[block] for block in self.findable}
        for salt, tokens in known:
            assert len(tokens) == BLOCK or (salt, tokens[:-BLOCK]) in known


TestPrefixCache = PrefixCacheMachine.TestCase
TestPrefixCache.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
