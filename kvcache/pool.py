"""The blocks of one engine: which are free, which are held and how often, and which can be found by their hash.

Knows blocks, counts and hashes; not sequences, tokens or bytes. Invariants (`check`):

- free + held = total; a block is in the free queue exactly while nobody holds it;
- a block is in the prefix map exactly while it has a hash; it gets one once, and loses it only when its bytes are
  given away (`take`) or forgotten (`forget_free`).

Eviction is lazy: a released block keeps its hash, and can be held again, until `take` needs it.

Two blocks may carry the same hash: two sequences that computed the same tokens side by side, or a prompt whose last
block had to be computed again for its last token. They are not merged. Merging would replace an entry of a table that
a running batch, or a transfer, has already read; so tables only ever grow at their end. The price is a duplicate that
lives until it is evicted. The copies stay findable one after the other, which keeps the map closed under prefixes:
where a block can be found, so can all before it. A run from the middle of a sequence, as it is lent to be copied, goes
back before the block that it follows where that is free by then; where it is gone, nobody could find the run.
"""

from collections.abc import Callable, KeysView, Sequence
from dataclasses import dataclass

from kvcache.block import Block, BlockId
from kvcache.free_queue import FreeQueue
from kvcache.hashing import BlockHash
from kvcache.journal import CacheJournal


@dataclass(frozen=True)
class PoolStats:
    """`free + held == total`; `cached` counts the free blocks whose bytes can still be reused."""

    total: int
    free: int
    held: int
    cached: int


class BlockPool:
    def __init__(
        self,
        num_blocks: int,
        first_block: int = 0,
        journal: CacheJournal | None = None,
        begin_life: Callable[[BlockId], None] | None = None,
    ) -> None:
        """Its blocks are `first_block` .. `first_block + num_blocks - 1` of the memory. What becomes findable, and what
        is no longer, is written to `journal`; each block that `take` gives away is told to `begin_life` first."""
        if num_blocks < 1:
            raise ValueError(f"a pool has at least 1 block, not {num_blocks}")
        self._first = first_block
        self._blocks = [Block(BlockId(first_block + i)) for i in range(num_blocks)]
        self._free = FreeQueue(self._blocks)
        self._by_hash: dict[BlockHash, list[Block]] = {}
        self._cached = 0
        self._journal = journal
        self._begin_life = begin_life

    @property
    def num_free(self) -> int:
        return len(self._free)

    def stats(self) -> PoolStats:
        total, free = len(self._blocks), len(self._free)
        return PoolStats(total, free, total - free, self._cached)

    def free_order(self) -> list[BlockId]:
        """Free blocks in the order in which they will be taken. O(free): for tests and diagnosis."""
        return [block.block_id for block in self._free]

    def holders(self, block_id: BlockId) -> int:
        return self._at(block_id).holders

    def hash_of(self, block_id: BlockId) -> BlockHash | None:
        return self._at(block_id).hash

    def find(self, block_hash: BlockHash) -> BlockId | None:
        """A block with these bytes: one that is held where there is one (it costs no free block), else the newest."""
        copies = self._by_hash.get(block_hash)
        if copies is None:
            return None
        for block in copies:
            if block.holders:
                return block.block_id
        return copies[-1].block_id

    def findable(self) -> KeysView[BlockHash]:
        """A live view."""
        return self._by_hash.keys()

    def hold(self, block_id: BlockId) -> None:
        """One more holder of a block that has a hash, or that somebody holds."""
        block = self._at(block_id)
        assert block.hash is not None or block.holders, f"{block} is free and holds nothing that can be shared"
        if block.holders == 0:
            self._free.remove(block)
            self._cached -= 1
        block.holders += 1

    def hold_free_before(self, block_id: BlockId) -> list[BlockId]:
        """One more holder of each block before this one in its sequence, up to one that somebody holds already, who
        holds what is before that; in the sequence's order."""
        found: list[BlockId] = []
        parent = self._at(block_id).parent
        while parent is not None and (before_id := self.find(parent)) is not None:
            before = self._at(before_id)
            if before.holders:
                break
            self.hold(before.block_id)
            found.append(before.block_id)
            parent = before.parent
        found.reverse()
        return found

    def take(self, count: int) -> list[BlockId]:
        """`count` blocks for one new holder each; what they cached is forgotten. The caller asked `num_free` first."""
        assert count <= len(self._free), f"{count} blocks asked, {len(self._free)} free"
        taken: list[BlockId] = []
        for _ in range(count):
            block = self._free.popleft()
            if block.hash is not None:
                self._unmap(block)
                self._cached -= 1
            if self._begin_life is not None:
                self._begin_life(block.block_id)
            block.holders = 1
            taken.append(block.block_id)
        return taken

    def publish(self, block_id: BlockId, block_hash: BlockHash, parent: BlockHash | None = None) -> None:
        """Make a held, full, finished block findable. Once per life of its bytes. `parent` is the hash of the block
        before it in its sequence."""
        block = self._at(block_id)
        assert block.holders > 0, f"{block} is free and cannot be published"
        assert block.hash is None, f"{block} is published already"
        block.hash, block.parent = block_hash, parent
        self._by_hash.setdefault(block_hash, []).append(block)
        if self._journal is not None:
            self._journal.stored(block_hash, parent)

    def release(self, table: Sequence[BlockId]) -> None:
        """One holder less for each block of a table, from its end to its start."""
        follows = self._at(table[0]).parent if table else None
        before = self._by_hash.get(follows, []) if follows is not None else None
        lost = before is not None and not before
        place = before[-1] if before and not any(block.holders for block in before) else None
        for block_id in reversed(table):
            block = self._at(block_id)
            assert block.holders > 0, f"{block} is released more often than held"
            block.holders -= 1
            if block.holders:
                continue
            if lost and block.hash is not None:
                self._unmap(block)
            if block.hash is None:
                self._free.prepend(block)
                continue
            self._cached += 1
            if place is None:
                self._free.append(block)
            else:
                self._free.insert(block, place)

    def forget_free(self) -> int:
        """Drop the hash of every free block; how many there were. Held blocks stay findable."""
        forgotten = [block for block in self._free if block.hash is not None]
        for block in forgotten:
            self._unmap(block)
        self._cached = 0
        return len(forgotten)

    def check(self) -> None:
        """AssertionError where an invariant of this file does not hold. O(total)."""
        free = list(self._free)
        assert len(free) == len(self._free) == len({block.block_id for block in free}), "the free queue is damaged"
        for block in free:
            assert block.next is not None and block.next.previous is block, f"{block} is badly linked"
            assert block.holders == 0, f"{block} is free and held"
        held = [block for block in self._blocks if block.holders]
        assert len(free) + len(held) == len(self._blocks), f"{len(free)} free + {len(held)} held != total"
        assert all(block.holders > 0 and block.next is None for block in held), "a held block is in the free queue"
        mapped = [(h, block) for h, copies in self._by_hash.items() for block in copies]
        assert all(block.hash == h for h, block in mapped), "the map names a block by a hash that is not its own"
        assert all(self._by_hash.values()), "the map keeps a hash without a block"
        hashed = {block.block_id for block in self._blocks if block.hash is not None}
        assert len(mapped) == len(hashed) and hashed == {b.block_id for _, b in mapped}, "map and blocks differ"
        assert self._cached == sum(block.hash is not None for block in free), "the count of cached blocks is off"

    def _at(self, block_id: BlockId) -> Block:
        return self._blocks[block_id - self._first]

    def _unmap(self, block: Block) -> None:
        assert block.hash is not None
        copies = self._by_hash[block.hash]
        copies.remove(block)
        if not copies:
            del self._by_hash[block.hash]
        if self._journal is not None:
            self._journal.removed(block.hash)
        block.hash = block.parent = None
