"""Blocks that nobody holds, in the order in which they will be taken: a doubly linked list through the blocks.

Order is eviction order. Released blocks with a hash go to the back, the tail of a sequence before its head, so that
what is taken first is the least recently used, and of one sequence the part that the fewest others can share.
Released blocks without a hash go to the front: nothing is lost with them.

A list through the blocks, because a `deque` cannot give up an element from its middle in O(1), and every hit on a
free cached block does that. Nothing is allocated after construction.
"""

from collections.abc import Iterable, Iterator

from kvcache.block import Block, BlockId


class FreeQueue:
    """Every operation but iteration is O(1). A block is in the queue at most once."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._end = Block(BlockId(-1))  # closes the ring: its next is the front, its previous the back
        self._end.previous = self._end.next = self._end
        self._size = 0
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Block]:
        block = self._end.next
        while block is not None and block is not self._end:
            yield block
            block = block.next

    def append(self, block: Block) -> None:
        """Put at the back: taken last."""
        back = self._end.previous
        assert back is not None
        self._link(back, block, self._end)

    def prepend(self, block: Block) -> None:
        """Put at the front: taken next."""
        front = self._end.next
        assert front is not None
        self._link(self._end, block, front)

    def insert(self, block: Block, before: Block) -> None:
        """Put so that it is taken next before another that is in the queue."""
        place = before.previous
        assert place is not None, f"{before} is not in the free queue"
        self._link(place, block, before)

    def popleft(self) -> Block:
        """Take the front. Only for a queue that is not empty."""
        assert self._size > 0, "no free block"
        block = self._end.next
        assert block is not None
        self.remove(block)
        return block

    def remove(self, block: Block) -> None:
        before, after = block.previous, block.next
        assert before is not None and after is not None, f"{block} is not in the free queue"
        before.next, after.previous = after, before
        block.previous = block.next = None
        self._size -= 1

    def _link(self, before: Block, block: Block, after: Block) -> None:
        assert block.previous is None and block.next is None, f"{block} is in the free queue already"
        before.next = after.previous = block
        block.previous, block.next = before, after
        self._size += 1
