"""One block of the pool: its identity, and what the pool knows of it.

A block holds the keys and values of `block_tokens` consecutive tokens of one sequence, all layers. The bytes lie in
`memory.py`; this is only the bookkeeping.
"""

from typing import NamedTuple, NewType

from kvcache.hashing import BlockHash

BlockId = NewType("BlockId", int)
"""Index of a block in its memory; a pool has a contiguous range of them."""


class BlockCopy(NamedTuple):
    """The bytes of one block, to be put into another of the same memory."""

    source: BlockId
    destination: BlockId


class Block:
    """Bookkeeping of one block. `previous` and `next` belong to the free queue, everything else to the pool."""

    __slots__ = ("block_id", "holders", "hash", "parent", "previous", "next")

    def __init__(self, block_id: BlockId) -> None:
        self.block_id = block_id
        self.holders = 0
        """How many tables list this block. At 0 it is in the free queue."""
        self.hash: BlockHash | None = None
        """Set while the block is in the prefix map: it is full, its bytes are final, anyone may share it."""
        self.parent: BlockHash | None = None
        """While it has a hash: that of the block before it in its sequence; None: it begins one."""
        self.previous: Block | None = None
        self.next: Block | None = None

    def __repr__(self) -> str:
        known = "-" if self.hash is None else self.hash.hex()[:8]
        return f"Block({self.block_id}, holders={self.holders}, hash={known})"
