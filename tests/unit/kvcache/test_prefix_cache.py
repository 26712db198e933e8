import numpy as np
import pytest

from kvcache.hashing import BlockHasher, pack_tokens
from kvcache.prefix_cache import PoolStats, PrefixCache
from pronghorn.errors import InsufficientBlocks

HASHER = BlockHasher("sha256", bytes(32), "m", None, {"block_tokens": "4"})
ROOT = HASHER.root(None)


def tokens(count, start=0):
    return np.arange(start, start + count, dtype=np.int64)


@pytest.fixture
def cache():
    made = PrefixCache(10, HASHER)
    yield made
    made.check()


def run(cache, owner, prompt, root=ROOT):
    """Compute a whole prompt and keep its blocks; how many tokens were cached."""
    cache.claim(owner, root)
    cached = cache.match(owner, prompt)
    cache.reserve(owner, len(prompt))
    cache.commit(owner, prompt, len(prompt))
    cache.check()
    return cached


def test_a_finished_prompt_is_reused_by_full_blocks(cache):
    assert run(cache, "a", tokens(10)) == 0
    assert run(cache, "b", tokens(14)) == 8
    assert cache.table("b")[:2] == cache.table("a")[:2]
    assert cache.table("b")[2] != cache.table("a")[2], "the partial block belongs to one table alone"
    assert cache.cached_blocks("b") == 2


@pytest.mark.conformance(31)
@pytest.mark.parametrize(("length", "reusable"), [(1, 0), (3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12)])
def test_the_last_token_is_never_reusable(cache, length, reusable):
    run(cache, "a", tokens(length))
    assert run(cache, "b", tokens(length)) == reusable


def test_a_prompt_that_diverges_shares_what_comes_before(cache):
    run(cache, "a", tokens(12))
    other = tokens(12)
    other[5] = 99
    assert run(cache, "b", other) == 4


@pytest.mark.conformance(33)
def test_different_roots_share_nothing(cache):
    run(cache, "a", tokens(9))
    assert run(cache, "b", tokens(9), HASHER.root("tenant")) == 0


@pytest.mark.conformance(30)
def test_released_blocks_stay_cached_until_they_are_needed(cache):
    run(cache, "a", tokens(9))
    cache.release("a")
    assert cache.stats() == PoolStats(total=10, free=10, held=0, cached=2)
    assert run(cache, "b", tokens(9)) == 8
    cache.release("b")
    cache.claim("big", ROOT)
    cache.reserve("big", 9 * 4)
    assert cache.stats() == PoolStats(total=10, free=1, held=9, cached=1)
    cache.release("big")
    assert run(cache, "c", tokens(9)) == 4, "the tail of the sequence was evicted before its head"


def test_generated_tokens_are_published_as_their_blocks_fill(cache):
    run(cache, "a", tokens(6))
    for length in range(7, 14):
        cache.reserve("a", length)
        cache.commit("a", tokens(length), length - 1)
        cache.check()
    assert len(cache.table("a")) == 4
    assert run(cache, "b", tokens(20)) == 12


def test_only_committed_blocks_can_be_found(cache):
    cache.claim("a", ROOT)
    cache.reserve("a", 12)
    cache.commit("a", tokens(12), 7)
    cache.check()
    assert run(cache, "b", tokens(12)) == 4


def test_tables_only_grow_at_their_end_even_where_another_computed_the_same(cache):
    for owner in ("a", "b"):
        cache.claim(owner, ROOT)
        cache.match(owner, tokens(9))
        cache.reserve(owner, 9)
    before = list(cache.table("b"))
    for owner in ("a", "b"):
        cache.commit(owner, tokens(9), 9)
    assert cache.table("b") == before
    assert not set(cache.table("a")) & set(before)
    cache.release("a")
    cache.claim("big", ROOT)
    cache.reserve("big", 7 * 4)  # every free block: the first copy is gone, the second still serves
    cache.release("big")
    assert run(cache, "c", tokens(9)) == 8


def test_match_may_be_repeated_until_something_is_reserved(cache):
    cache.claim("late", ROOT)
    assert cache.match("late", tokens(13)) == 0
    run(cache, "a", tokens(9))
    assert cache.match("late", tokens(13)) == 8
    assert cache.match("late", tokens(13)) == 8
    cache.reserve("late", 13)
    with pytest.raises(ValueError, match="reserved"):
        cache.match("late", tokens(13))


def test_reserve_takes_all_or_nothing_and_says_how_much_is_there(cache):
    run(cache, "a", tokens(24))
    cache.claim("b", ROOT)
    cache.reserve("b", 4)
    assert cache.missing_blocks("b", 17) == 4
    assert not cache.can_reserve("b", 17) and cache.can_reserve("b", 16)
    with pytest.raises(InsufficientBlocks, match="17 tokens of b need 4 more blocks; 3 of 10 are free") as error:
        cache.reserve("b", 17)
    assert "restart" not in error.value.message
    assert len(cache.table("b")) == 1


def test_a_sequence_longer_than_the_pool_is_told_so(cache):
    cache.claim("a", ROOT)
    with pytest.raises(InsufficientBlocks, match="holds 40 tokens.*restart with more blocks"):
        cache.reserve("a", 41)


def test_reserving_less_than_is_held_changes_nothing(cache):
    cache.claim("a", ROOT)
    cache.reserve("a", 8)
    cache.reserve("a", 3)
    assert cache.missing_blocks("a", 3) == 0 and len(cache.table("a")) == 2


def test_commit_is_bounded_by_tokens_and_blocks_and_never_goes_back(cache):
    cache.claim("a", ROOT)
    cache.reserve("a", 8)
    for valid, given in [(9, 12), (8, 7), (-1, 8)]:
        with pytest.raises(ValueError, match=f"{valid} valid tokens"):
            cache.commit("a", tokens(given), valid)
    cache.commit("a", tokens(8), 8)
    cache.commit("a", tokens(8), 2)
    assert run(cache, "b", tokens(9)) == 8


def test_without_prefix_caching_nothing_is_shared_and_accounts_hold():
    cache = PrefixCache(10, HASHER, enable_prefix_caching=False)
    assert run(cache, "a", tokens(9)) == run(cache, "b", tokens(9)) == 0
    cache.release("a")
    assert cache.stats() == PoolStats(total=10, free=7, held=3, cached=0)
    cache.check()


def test_reset_forgets_what_nobody_holds(cache):
    run(cache, "a", tokens(9))
    run(cache, "b", tokens(13))
    cache.release("b")
    assert cache.reset() == 1
    assert run(cache, "c", tokens(13)) == 8


@pytest.mark.conformance(30)
def test_owners_are_claimed_once_and_known_until_released(cache):
    cache.claim("a", ROOT)
    assert list(cache.owners) == ["a"]
    with pytest.raises(ValueError, match="already"):
        cache.claim("a", ROOT)
    cache.release("a")
    assert not cache.owners
    for use in (cache.table, cache.release, cache.cached_blocks):
        with pytest.raises(ValueError, match="claimed no blocks"):
            use("a")


def test_each_token_is_hashed_once(cache, monkeypatch):
    hashed = []
    chain = HASHER.chain
    monkeypatch.setattr(
        HASHER, "chain", lambda packed, parent: hashed.append(len(packed) // 4) or chain(packed, parent)
    )
    run(cache, "a", tokens(18))
    for length in range(19, 31):
        cache.reserve("a", length)
        cache.commit("a", tokens(length), length)
    assert hashed == [16, 4, 4, 4]


def test_check_notices_a_partial_block_in_the_map():
    cache = PrefixCache(4, HASHER)
    cache.claim("a", ROOT)
    cache.reserve("a", 6)
    cache._pool.publish(cache.table("a")[1], HASHER.chain(bytes(16), ROOT)[0])
    with pytest.raises(AssertionError, match="before it was committed"):
        cache.check()


def test_check_notices_a_table_that_the_counts_do_not_know():
    cache = PrefixCache(4, HASHER)
    cache.claim("a", ROOT)
    cache.reserve("a", 6)
    cache.table("a").pop()
    with pytest.raises(AssertionError, match="counts 1 holders and is in 0 tables"):
        cache.check()


# --- several pools over one memory -----------------------------------------------------------------------------------


@pytest.fixture
def pair():
    made = [PrefixCache(10, HASHER), PrefixCache(10, HASHER, first_block=10)]
    yield made
    for cache in made:
        cache.check()


def take_over(cache, others, owner, prompt):
    cache.claim(owner, ROOT)
    cache.match(owner, prompt)
    cache.reserve(owner, len(prompt))
    return cache.copy_from(owner, others)


def test_pools_over_one_memory_have_blocks_of_their_own(pair):
    for cache in pair:
        run(cache, "a", tokens(40))
    assert sorted(pair[0].table("a")) == list(range(10))
    assert sorted(pair[1].table("a")) == list(range(10, 20))


def test_what_another_pool_has_is_copied_into_fresh_blocks_and_can_be_found_at_once(pair):
    here, there = pair
    run(there, "a", tokens(14))
    copies = take_over(here, [there], "b", tokens(16))
    assert copies == list(zip(there.table("a")[:3], here.table("b")[:3], strict=True))
    assert here.cached_blocks("b") == 3
    assert run(here, "c", tokens(13)) == 12 and here.table("c")[:3] == here.table("b")[:3]


def test_only_what_lies_behind_the_local_run_is_copied_and_the_first_miss_ends_it(pair):
    here, there = pair
    run(here, "local", tokens(9))
    run(there, "remote", tokens(17))
    copies = take_over(here, [there], "b", tokens(25))
    assert [copy.source for copy in copies] == there.table("remote")[2:4]
    assert [copy.destination for copy in copies] == here.table("b")[2:4]
    assert here.cached_blocks("b") == 4


def test_the_block_of_the_last_token_is_never_copied(pair):
    here, there = pair
    run(there, "a", tokens(8))
    assert len(take_over(here, [there], "b", tokens(8))) == 1


def test_roots_differ_and_caching_off_means_no_copies(pair):
    here, there = pair
    run(there, "a", tokens(9), HASHER.root("tenant"))
    assert take_over(here, [there], "b", tokens(9)) == []
    off = PrefixCache(10, HASHER, first_block=20, enable_prefix_caching=False)
    assert take_over(off, [there], "b", tokens(9)) == []
    off.check()


def test_what_was_copied_is_released_and_reused_as_any_block_is(pair):
    here, there = pair
    run(there, "a", tokens(9))
    take_over(here, [there], "b", tokens(9))
    here.commit("b", tokens(9), 9)
    here.release("b")
    there.release("a")
    assert (here.stats(), there.stats()) == (PoolStats(10, 10, 0, 2), PoolStats(10, 10, 0, 2))
    assert run(here, "c", tokens(9)) == 8


# --- forks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("length", "copies"), [(8, 0), (10, 1)])
def test_a_fork_shares_full_blocks_and_copies_the_partial_one(caching, length, copies):
    cache = PrefixCache(10, HASHER, enable_prefix_caching=caching)
    run(cache, "a", tokens(length))
    ordered = cache.fork("a", "b", length)
    cache.check()
    assert cache.table("b")[:2] == cache.table("a")[:2]
    assert [(copy.source, copy.destination) for copy in ordered] == list(
        zip(cache.table("a")[2:], cache.table("b")[2:], strict=True)
    )
    assert len(ordered) == copies and cache.stats().held == 2 + 2 * copies
    cache.release("a")
    cache.check()
    assert cache.stats().held == 2 + copies, "what is shared stays for whoever is left"
    cache.release("b")
    cache.check()
    assert cache.stats().free == 10


def test_forks_grow_apart_and_publish_what_is_their_own(cache):
    prompt = tokens(6)
    run(cache, "a", prompt)
    cache.fork("a", "b", 6)
    mine, theirs = np.append(prompt, tokens(6, 50)), np.append(prompt, tokens(6, 70))
    for owner, sequence in (("a", mine), ("b", theirs)):
        cache.reserve(owner, 12)
        cache.commit(owner, sequence, 12)
        cache.check()
    cache.release("a")
    cache.release("b")
    assert run(cache, "c", np.append(theirs, 1)) == 12
    assert run(cache, "d", np.append(mine, 1)) == 12


def test_whether_a_fork_finds_room_is_asked_first(cache):
    run(cache, "a", tokens(34))
    assert cache.can_fork(34, spare_blocks=0) and not cache.can_fork(34, spare_blocks=1)
    assert cache.can_fork(32, spare_blocks=1)


def test_a_run_that_was_lent_is_evicted_before_all_that_it_follows_whoever_let_go_of_that_meanwhile(cache):
    run(cache, "a", tokens(12))
    run(cache, "b", tokens(5))
    first, second, third = cache.table("a")
    hashes = HASHER.chain(pack_tokens(tokens(12)), ROOT)
    cache.release("a")
    assert cache.lease("lent", hashes[2:]) == 1
    cache.check()
    cache.release("b")
    cache.release("lent")
    assert cache._pool.free_order()[-3:] == [third, second, first]
