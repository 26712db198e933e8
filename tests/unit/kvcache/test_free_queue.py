import pytest

from kvcache.block import Block, BlockId
from kvcache.free_queue import FreeQueue


def order(queue):
    return [block.block_id for block in queue]


@pytest.fixture
def blocks():
    return [Block(BlockId(i)) for i in range(4)]


def test_blocks_leave_in_the_order_in_which_they_came(blocks):
    queue = FreeQueue(blocks)
    assert [queue.popleft().block_id for _ in range(4)] == [0, 1, 2, 3]
    assert len(queue) == 0 and order(queue) == []


@pytest.mark.parametrize(("removed", "left"), [(0, [1, 2, 3]), (2, [0, 1, 3]), (3, [0, 1, 2])])
def test_any_block_can_be_removed(blocks, removed, left):
    queue = FreeQueue(blocks)
    queue.remove(blocks[removed])
    assert order(queue) == left and len(queue) == 3


def test_front_and_back(blocks):
    queue = FreeQueue(blocks[:2])
    queue.prepend(blocks[2])
    queue.append(blocks[3])
    assert order(queue) == [2, 0, 1, 3]


def test_a_block_is_in_the_queue_at_most_once(blocks):
    queue = FreeQueue(blocks)
    with pytest.raises(AssertionError, match="already"):
        queue.append(blocks[1])
    queue.remove(blocks[1])
    with pytest.raises(AssertionError, match="not in the free queue"):
        queue.remove(blocks[1])


def test_an_empty_queue_gives_nothing():
    with pytest.raises(AssertionError, match="no free block"):
        FreeQueue([]).popleft()
