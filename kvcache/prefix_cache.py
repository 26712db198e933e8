"""Who holds which blocks, in what order, and what of a sequence is cached already.

Knows owners (any hashable name), their tokens as numbers, and tables of blocks; never a request. Invariants (`check`):

- a block's holders are exactly the tables that list it;
- only full blocks whose keys and values are final are published or shared; a partially filled block belongs to one
  table alone;
- a shared block is never written: it is full, and every position of it lies below its owners' valid tokens;
- a table only grows at its end (duplicates are not merged: `pool.py` says why);
- where a block can be found by its hash, so can every block before it.

The last token of a sequence is never reusable: its logits have to be computed, so at least one token is.
Work per call is proportional to the new blocks, never to the length of the sequence: each owner keeps its hash chain.
"""

from collections import Counter
from collections.abc import Callable, Hashable, KeysView, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvcache.block import BlockCopy, BlockId
from kvcache.hashing import BlockHash, BlockHasher, pack_tokens
from kvcache.journal import CacheJournal
from kvcache.pool import BlockPool, PoolStats
from pronghorn.errors import InsufficientBlocks

__all__ = ["PoolStats", "PrefixCache"]


@dataclass(slots=True)
class _Table:
    root: bytes
    blocks: list[BlockId] = field(default_factory=list)
    """In position order."""
    hashes: list[BlockHash] = field(default_factory=list)
    """Chain of the sequence's full blocks, as far as it was needed."""
    cached: int = 0
    """Leading blocks that `match` attached or `copy_from` took over."""
    published: int = 0
    """Leading blocks that are full, final and findable, those of `match` included."""
    shared: int = 0
    """Leading blocks that `fork` shared out: full and final, findable or not."""
    lent_behind: Sequence[BlockId] = ()
    """Of a lease from the middle of a sequence: what nobody else held of the blocks before it, in position order."""
    promised: list[BlockHash] = field(default_factory=list)
    """What `promise` said will be published from this table, as far as it has not been; next one first."""


class PrefixCache:
    """Not thread-safe: one engine loop owns it. Any method but `claim` on an unknown owner is a ValueError."""

    def __init__(
        self,
        num_blocks: int,
        hasher: BlockHasher,
        *,
        first_block: int = 0,
        enable_prefix_caching: bool = True,
        journal: CacheJournal | None = None,
        begin_life: Callable[[BlockId], None] | None = None,
        seal: Callable[[BlockId], object] | None = None,
    ) -> None:
        """Over the blocks from `first_block` on. Without prefix caching nothing is hashed, published or matched; tables
        and accounting stay the same. `journal` is told what can be found, `begin_life` which block gets other bytes,
        `seal` which one that was computed here can be found, and gets no others while it can."""
        self.num_blocks = num_blocks
        self.first_block = first_block
        self.block_tokens = hasher.block_tokens
        self._hasher = hasher
        self._caching = enable_prefix_caching
        self.journal = journal or CacheJournal()
        self._pool = BlockPool(num_blocks, first_block, self.journal, begin_life)
        self._seal = seal
        self._tables: dict[Hashable, _Table] = {}
        self._promised: Counter[BlockHash] = Counter()

    @property
    def owners(self) -> KeysView[Hashable]:
        """A live view, in order of claim."""
        return self._tables.keys()

    @property
    def held_fraction(self) -> float:
        """Of its blocks, those that somebody holds."""
        return 1.0 - self._pool.num_free / self.num_blocks

    def stats(self) -> PoolStats:
        return self._pool.stats()

    def claim(self, owner: Hashable, root: bytes, chain: list[BlockHash] | None = None) -> None:
        """Open an empty table. `root` is `BlockHasher.root(salt)`; `chain`, what is known of the sequence's hashes, is
        kept up to date. ValueError where `owner` has a table already."""
        if owner in self._tables:
            raise ValueError(f"{owner} holds blocks already")
        self._tables[owner] = _Table(root, hashes=[] if chain is None else chain)

    def match(self, owner: Hashable, tokens: NDArray[np.int64]) -> int:
        """Attach the longest cached run of blocks that leads `tokens`; how many tokens they hold.

        May be called again as long as nothing was reserved: it then adds what has been cached since.
        """
        table = self._table(owner)
        if len(table.blocks) != table.cached:
            raise ValueError(f"{owner} has reserved blocks; a cached run cannot be attached behind them")
        if not self._caching:
            return 0
        reusable = self.reusable_blocks(len(tokens))
        self._extend_chain(table, tokens, reusable)
        self._hold_found(table, reusable)
        return table.cached * self.block_tokens

    def reusable_blocks(self, num_tokens: int) -> int:
        """Of a prompt of so many tokens, the blocks that `match` could attach."""
        return max(0, num_tokens - 1) // self.block_tokens

    def missing_blocks(self, owner: Hashable, num_tokens: int) -> int:
        """How many more blocks `owner` needs so that its first `num_tokens` tokens fit."""
        return max(0, -(-num_tokens // self.block_tokens) - len(self._table(owner).blocks))

    def can_reserve(self, owner: Hashable, num_tokens: int) -> bool:
        return self.missing_blocks(owner, num_tokens) <= self._pool.num_free

    def reserve(self, owner: Hashable, num_tokens: int) -> None:
        """Hold blocks for the first `num_tokens` tokens: all that are missing, or InsufficientBlocks and none."""
        missing = self.missing_blocks(owner, num_tokens)
        if missing > self._pool.num_free:
            raise self._insufficient(owner, num_tokens, missing)
        self._table(owner).blocks += self._pool.take(missing)

    # --- what is being computed --------------------------------------------------------------------------------------

    def promise(self, owner: Hashable) -> None:
        """The blocks that `match` looked for in vain will be computed in this table, and can be waited for until they
        are published or the table is closed."""
        table = self._table(owner)
        table.promised = table.hashes[table.published : len(table.blocks)]
        self._promised.update(table.promised)

    def break_promise(self, owner: Hashable) -> None:
        table = self._table(owner)
        self._settle_promises(table, len(table.promised))

    def awaited(self, root: bytes, chain: list[BlockHash], tokens: NDArray[np.int64]) -> BlockHash | None:
        """The block of `tokens` that is the first to be missing here, where it is promised. Extends `chain`."""
        if not self._caching or not self._promised:
            return None
        reusable = self.reusable_blocks(len(tokens))
        self._extend_chain(_Table(root, hashes=chain), tokens, reusable)
        found = self.found_run(chain[:reusable])
        return chain[found] if found < reusable and self.is_promised(chain[found]) else None

    def is_promised(self, block_hash: BlockHash) -> bool:
        return self._promised[block_hash] > 0

    def promised_run(self, hashes: Sequence[BlockHash]) -> int:
        """How many of the first of these are promised, and cannot be found yet."""
        count = 0
        while count < len(hashes) and self._promised[hashes[count]] and self._pool.find(hashes[count]) is None:
            count += 1
        return count

    def _settle_promises(self, table: _Table, count: int) -> None:
        kept, table.promised = table.promised[:count], table.promised[count:]
        for block_hash in kept:
            self._promised[block_hash] -= 1
            if not self._promised[block_hash]:
                del self._promised[block_hash]

    # --- blocks for others -------------------------------------------------------------------------------------------

    def found_run(self, hashes: Sequence[BlockHash]) -> int:
        """How many of the first of these can be found."""
        count = 0
        while count < len(hashes) and self._pool.find(hashes[count]) is not None:
            count += 1
        return count

    def lease(self, owner: Hashable, hashes: Sequence[BlockHash]) -> int:
        """Hold the run of blocks that leads `hashes` for `owner`, as far as they can be found, or, where `owner` holds
        some already, what has become findable behind them; how many are held. They are read, never written. What they
        follow stays findable as well, as long as whoever holds it, or for as long as they do."""
        if owner not in self._tables:
            self._tables[owner] = _Table(b"", hashes=list(hashes))
        table = self._table(owner)
        held = len(table.blocks)
        self._hold_found(table, len(table.hashes))
        if table.blocks and not held:
            table.lent_behind = self._pool.hold_free_before(table.blocks[0])
        return len(table.blocks)

    def import_run(self, owner: Hashable, hashes: Sequence[BlockHash], keep_free: int) -> int | None:
        """Hold blocks for all of `hashes`, the chain of a sequence from its start: those that can be found, and empty
        ones behind them, to be written. How many were found; None, and nothing held, where fewer than `keep_free`
        blocks would stay free."""
        table = self._tables[owner] = _Table(b"", hashes=list(hashes))
        self._hold_found(table, len(hashes))
        missing = len(hashes) - len(table.blocks)
        if not self._caching or self._pool.num_free - missing < keep_free:
            self.release(owner)
            return None
        found = len(table.blocks)
        table.blocks += self._pool.take(missing)
        return found

    def publish_imported(self, owner: Hashable, blocks: int) -> None:
        """The first `blocks` of what `import_run` holds have their bytes."""
        table = self._table(owner)
        assert table.published <= blocks <= len(table.hashes), f"{owner} imported {blocks} of {len(table.hashes)}"
        for position in range(table.published, blocks):
            self._publish(table, position)
        table.published = blocks

    def _hold_found(self, table: _Table, end: int) -> None:
        for block_hash in table.hashes[len(table.blocks) : end]:
            block_id = self._pool.find(block_hash)
            if block_id is None:
                break
            self._pool.hold(block_id)
            table.blocks.append(block_id)
        table.cached = table.published = len(table.blocks)

    # -----------------------------------------------------------------------------------------------------------------

    def copy_from(self, owner: Hashable, others: Sequence["PrefixCache"]) -> list[BlockCopy]:
        """Take over what `others` have of the run that `match` began: the copies to make into blocks that `owner` has
        reserved, in position order, as far as each block can be found.

        Those blocks count as attached by `match` and can be found here from now on. So the copies must be made before
        anybody reads or writes a block, in the order of the calls; `others` give nothing up.
        """
        table = self._table(owner)
        copies: list[BlockCopy] = []
        for position in range(table.cached, min(len(table.hashes), len(table.blocks))):
            block_hash, destination = table.hashes[position], table.blocks[position]
            source = next((found for cache in others if (found := cache._pool.find(block_hash)) is not None), None)
            if source is None:
                break
            self._publish(table, position)
            copies.append(BlockCopy(source, destination))
        table.cached = table.published = table.cached + len(copies)
        return copies

    def can_fork(self, num_tokens: int, spare_blocks: int) -> bool:
        """Whether `fork` finds a block for what is left of `num_tokens`, and leaves `spare_blocks` free."""
        return (num_tokens % self.block_tokens > 0) + spare_blocks <= self._pool.num_free

    def fork(self, owner: Hashable, child: Hashable, num_tokens: int) -> list[BlockCopy]:
        """Open a table for `child` over the first `num_tokens` of `owner`, whose keys and values are final.

        Full blocks are shared. What lies in a partial one comes in a copy, to be made before anybody writes a block,
        into a block of the child's own; the caller asked `can_fork` first. ValueError where `child` holds blocks.
        """
        parent = self._table(owner)
        full = num_tokens // self.block_tokens
        assert num_tokens <= len(parent.blocks) * self.block_tokens, f"{owner} does not hold {num_tokens} tokens"
        self.claim(child, parent.root)
        table = self._table(child)
        for block_id in parent.blocks[:full]:
            self._pool.hold(block_id)
        table.blocks += parent.blocks[:full]
        table.hashes += parent.hashes[:full]
        table.published = min(parent.published, full)
        table.shared, parent.shared = full, max(parent.shared, full)
        if num_tokens % self.block_tokens == 0:
            return []
        table.blocks += self._pool.take(1)
        return [BlockCopy(parent.blocks[full], table.blocks[full])]

    def commit(
        self, owner: Hashable, tokens: NDArray[np.int64], valid_tokens: int, *, computed_here: bool = True
    ) -> None:
        """Publish the full blocks among the first `valid_tokens`, whose keys and values are final: computed here, or
        come from elsewhere.

        `tokens` is the sequence from its start. From here on nobody writes those blocks again. Committing less than
        before changes nothing. ValueError where `valid_tokens` exceeds the tokens given or the blocks held.
        """
        table = self._table(owner)
        if not 0 <= valid_tokens <= min(len(tokens), len(table.blocks) * self.block_tokens):
            raise ValueError(
                f"{owner}: {valid_tokens} valid tokens, with {len(tokens)} tokens in {len(table.blocks)} blocks"
            )
        full = valid_tokens // self.block_tokens
        if not self._caching or full <= table.published:
            return
        self._extend_chain(table, tokens, full)
        for position in range(table.published, full):
            self._publish(table, position)
            if computed_here and self._seal is not None:
                self._seal(table.blocks[position])
        self._settle_promises(table, full - table.published)
        table.published = full

    def table(self, owner: Hashable) -> list[BlockId]:
        """The owner's blocks in position order: the live list, which grows at its end; read it, do not change it."""
        return self._table(owner).blocks

    def cached_blocks(self, owner: Hashable) -> int:
        """How many leading blocks `match` attached and `copy_from` took over."""
        return self._table(owner).cached

    def release(self, owner: Hashable) -> None:
        """Close the table and give its blocks back, the last one first: it will be the first to be evicted."""
        table = self._table(owner)
        self._settle_promises(table, len(table.promised))
        self._pool.release([*table.lent_behind, *table.blocks] if table.lent_behind else table.blocks)
        del self._tables[owner]

    def findable(self) -> KeysView[BlockHash]:
        """The hash of every block that can be found: a live view."""
        return self._pool.findable()

    def reset(self) -> int:
        """Forget what free blocks cache; how many did. Blocks that are held stay findable."""
        return self._pool.forget_free()

    def check(self) -> None:
        """AssertionError where an invariant of this file or of the pool does not hold. O(total)."""
        self._pool.check()
        holders = Counter(
            block_id for table in self._tables.values() for block_id in (*table.blocks, *table.lent_behind)
        )
        for block_id in range(self.first_block, self.first_block + self.num_blocks):
            counted, listed = self._pool.holders(BlockId(block_id)), holders[BlockId(block_id)]
            assert counted == listed, f"block {block_id} counts {counted} holders and is in {listed} tables"
        for owner, table in self._tables.items():
            self._check_table(owner, table)
        promised = Counter(block_hash for table in self._tables.values() for block_hash in table.promised)
        assert promised == self._promised, "the count of promised blocks is off"

    def _check_table(self, owner: Hashable, table: _Table) -> None:
        assert 0 <= table.cached <= table.published <= len(table.blocks), f"{owner}: {table}"
        assert len(set(table.blocks)) == len(table.blocks), f"{owner} lists a block twice"
        assert table.published <= len(table.hashes), f"{owner} published blocks that it did not hash"
        for position, block_id in enumerate(table.blocks):
            block_hash = self._pool.hash_of(block_id)
            if position < table.published:
                assert block_hash == table.hashes[position], f"{owner}: block {block_id} has another's hash"
                assert self._pool.find(table.hashes[position]) is not None, f"{owner}: {position} cannot be found"
            else:
                assert block_hash is None, f"{owner}: block {block_id} is findable before it was committed"
                held_alone = position < table.shared or self._pool.holders(block_id) == 1
                assert held_alone, f"{owner}: unfinished block {block_id} is shared"

    def _table(self, owner: Hashable) -> _Table:
        table = self._tables.get(owner)
        if table is None:
            raise ValueError(f"{owner} has claimed no blocks")
        return table

    def _publish(self, table: _Table, position: int) -> None:
        parent = table.hashes[position - 1] if position else None
        self._pool.publish(table.blocks[position], table.hashes[position], parent)

    def _extend_chain(self, table: _Table, tokens: NDArray[np.int64], full_blocks: int) -> None:
        known = len(table.hashes)
        if full_blocks > known:
            new = pack_tokens(tokens[known * self.block_tokens : full_blocks * self.block_tokens])
            table.hashes += self._hasher.chain(new, table.hashes[-1] if known else table.root)

    def _insufficient(self, owner: Hashable, num_tokens: int, missing: int) -> InsufficientBlocks:
        stats = self._pool.stats()
        text = f"{num_tokens} tokens of {owner} need {missing} more blocks; {stats.free} of {stats.total} are free"
        if num_tokens > stats.total * self.block_tokens:
            text += (
                f"; the whole pool holds {stats.total * self.block_tokens} tokens, so this can only succeed after a "
                "restart with more blocks"
            )
        return InsufficientBlocks(text)
