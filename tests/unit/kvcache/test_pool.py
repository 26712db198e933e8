import pytest

from kvcache.hashing import BlockHash
from kvcache.pool import BlockPool, PoolStats

A, B, C = (BlockHash(bytes([n]) * 32) for n in range(3))


@pytest.fixture
def pool():
    made = BlockPool(6)
    yield made
    made.check()


def test_a_new_pool_is_all_free_and_nothing_cached(pool):
    assert pool.stats() == PoolStats(total=6, free=6, held=0, cached=0)
    assert pool.free_order() == [0, 1, 2, 3, 4, 5]


@pytest.mark.conformance(30)
def test_released_blocks_with_a_hash_go_to_the_back_tail_first(pool):
    table = pool.take(3)
    for block_id, block_hash in zip(table, [A, B, C], strict=True):
        pool.publish(block_id, block_hash)
    pool.release(table)
    assert pool.free_order() == [3, 4, 5, 2, 1, 0]
    assert pool.stats() == PoolStats(total=6, free=6, held=0, cached=3)


def test_released_blocks_without_a_hash_are_taken_next(pool):
    table = pool.take(3)
    pool.publish(table[0], A)
    pool.release(table)
    assert pool.free_order() == [1, 2, 3, 4, 5, 0]


@pytest.mark.conformance(30)
def test_a_free_block_can_be_found_until_it_is_taken(pool):
    table = pool.take(1)
    pool.publish(table[0], A)
    pool.release(table)
    assert pool.find(A) == 0
    pool.take(5)
    assert pool.find(A) == 0
    assert pool.take(1) == [0]
    assert pool.find(A) is None and pool.hash_of(0) is None


def test_holding_a_free_block_takes_it_out_of_the_queue(pool):
    table = pool.take(1)
    pool.publish(table[0], A)
    pool.release(table)
    pool.hold(table[0])
    assert pool.free_order() == [1, 2, 3, 4, 5] and pool.holders(0) == 1
    pool.hold(table[0])
    pool.release(table)
    assert pool.holders(0) == 1 and pool.stats().held == 1


@pytest.mark.conformance(30)
def test_duplicates_are_kept_and_a_held_copy_is_found_first(pool):
    one, two = pool.take(1), pool.take(1)
    pool.publish(one[0], A)
    pool.publish(two[0], A)
    pool.release(one)
    assert pool.find(A) == two[0]
    pool.release(two)
    pool.take(5)  # the four fresh ones, then the copy that was released first
    assert pool.find(A) == two[0]


def test_forgetting_drops_free_hashes_and_keeps_held_ones(pool):
    table = pool.take(2)
    pool.publish(table[0], A)
    pool.publish(table[1], B)
    pool.hold(table[0])
    pool.release(table)
    assert pool.forget_free() == 1
    assert pool.find(A) == table[0] and pool.find(B) is None
    assert pool.stats().cached == 0


def test_misuse_is_an_assertion(pool):
    table = pool.take(1)
    with pytest.raises(AssertionError, match="nothing that can be shared"):
        pool.hold(pool.free_order()[0])
    pool.publish(table[0], A)
    with pytest.raises(AssertionError, match="published already"):
        pool.publish(table[0], B)
    with pytest.raises(AssertionError, match="5 free"):
        pool.take(6)
    pool.release(table)
    with pytest.raises(AssertionError, match="more often than held"):
        pool.release(table)


def test_check_notices_a_block_that_is_neither_free_nor_held():
    pool = BlockPool(2)
    pool._free.popleft()
    with pytest.raises(AssertionError, match="total"):
        pool.check()


def test_a_pool_has_at_least_one_block():
    with pytest.raises(ValueError, match="not 0"):
        BlockPool(0)


# --- a run from the middle of a sequence ------------------------------------------------------------------------------


def chain(pool: BlockPool) -> list[int]:
    """Three blocks, each behind the one before, that nobody holds."""
    table = pool.take(3)
    for block_id, block_hash, parent in zip(table, [A, B, C], [None, A, B], strict=True):
        pool.publish(block_id, block_hash, parent)
    pool.release(table)
    return table


def test_a_run_that_was_lent_is_evicted_before_what_it_follows(pool):
    a, b, c = chain(pool)
    pool.hold(b)
    pool.hold(c)
    pool.release([b, c])
    assert pool.free_order() == [3, 4, 5, c, b, a]
    pool.hold(b)
    pool.release([b])
    assert pool.free_order() == [3, 4, 5, c, b, a]


def test_a_run_whose_beginning_is_held_goes_to_the_back(pool):
    a, b, c = chain(pool)
    for block_id in (a, b, c):
        pool.hold(block_id)
    pool.release([b, c])
    assert pool.free_order() == [3, 4, 5, c, b]
    pool.release([a])
    assert pool.free_order() == [3, 4, 5, c, b, a]


def test_a_run_whose_beginning_is_gone_cannot_be_found_any_more(pool):
    a, b, c = chain(pool)
    for block_id in (b, c, c):
        pool.hold(block_id)
    pool.take(4)
    assert pool.find(A) is None
    pool.release([b, c])
    assert pool.find(B) is None and pool.find(C) == c
    assert pool.free_order() == [b] and pool.stats().cached == 0
    pool.release([c])
    assert pool.stats() == PoolStats(total=6, free=2, held=4, cached=0)


def test_what_a_run_follows_is_held_with_it_up_to_what_somebody_holds_already(pool):
    a, b, c = chain(pool)
    assert pool.hold_free_before(a) == []
    assert pool.hold_free_before(c) == [a, b]
    assert pool.free_order() == [3, 4, 5, c]
    assert pool.hold_free_before(c) == []
    pool.release([a, b])
    pool.hold(b)
    assert pool.hold_free_before(c) == []
    assert pool.holders(a) == 0 and pool.holders(b) == 1
