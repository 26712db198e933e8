"""Runs from the middle of sequences are lent, and given back the last one first: where a block can be found, so can all
before it."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.hashing import BlockHasher, pack_tokens
from kvcache.prefix_cache import PrefixCache

TOTAL, BLOCK = 8, 2
HASHER = BlockHasher("sha256", bytes(32), "m", None, {"block_tokens": str(BLOCK)})
ROOT = HASHER.root(None)
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(lambda path: [t for t in path for _ in range(BLOCK)])
moves = st.tuples(st.sampled_from(["serve", "serve", "lend", "end", "reset"]), prompts, st.integers(0, 4))


@settings(max_examples=300, deadline=None)
@given(moves=st.lists(moves, max_size=40))
def test_the_cache_has_no_gap_whatever_is_lent(moves: list[tuple[str, list[int], int]]) -> None:
    cache, lent = PrefixCache(TOTAL, HASHER), []
    parents = {}
    for number, (what, prompt, at) in enumerate(moves):
        tokens = np.array(prompt, dtype=np.int64)
        hashes = HASHER.chain(pack_tokens(tokens), ROOT)
        parents |= dict(zip(hashes, [None, *hashes], strict=False))
        if what == "serve":
            cache.claim(number, ROOT)
            cache.match(number, tokens)
            if cache.can_reserve(number, len(prompt)):
                cache.reserve(number, len(prompt))
                cache.commit(number, tokens, len(prompt))
            cache.release(number)
        elif what == "lend" and len(hashes) > at:
            cache.lease(number, hashes[at:])
            lent.append(number)
        elif what == "end" and lent:
            cache.release(lent.pop())
        elif what == "reset":
            cache.reset()
        cache.check()
        found = set(cache.findable())
        assert all(parents[each] is None or parents[each] in found for each in found)
    for owner in reversed(lent):
        cache.release(owner)
    cache.check()
