"""Digests of blocks that this node has served, each remembered for one life of its block.

Knows a memory and its lives; not who asks. A block is served under a hold, when its bytes are final, and it gets other
bytes only in another life (`memory.py`): so it is digested when it first leaves, and not again. Invariants: a digest is
of the life that the block has; a block that was changed without a new life does not have its digest any more, and no
receiver takes it. At most one digest a block.
"""

from kvcache.memory import BlockMemory
from kvcache.transfer import block_digest


class ServedDigests:
    def __init__(self, memory: BlockMemory) -> None:
        self._memory = memory
        self._known: dict[int, tuple[int, int, bytes]] = {}
        """Where a block begins, to its life, its length and its digest."""

    def digest(self, block: memoryview) -> bytes:
        """Of a block of the memory, or the beginning of one, held and final."""
        at, size = self._memory.place(block), len(block)
        block_id = at // self._memory.block_bytes
        life = self._memory.life(block_id)
        known = self._known.get(at)
        if known is not None and known[0] == life and known[1] == size:
            return known[2]
        digest = block_digest(block)
        if self._memory.life(block_id) == life:
            self._known[at] = life, size, digest
        return digest
