"""The digests of a pool's blocks, made where the bytes are and kept beside them for one life of each block.

Knows a memory; not who computes a block, nor who asks for one. The engine seals a block that it has computed, so that
nothing is digested while somebody waits for it, and a bit that flips later is found by whoever receives the block. What
came from elsewhere is digested when it first leaves. Invariants: only a block whose bytes are final has a digest; one
that was changed without a new life does not have its digest any more, and no receiver takes it.
"""

from kvcache.memory import BlockMemory
from kvcache.transfer import block_digest


class BlockDigests:
    def __init__(self, memory: BlockMemory) -> None:
        self._memory = memory

    def seal(self, block_id: int) -> bytes:
        """This block has been computed, and is written no more in this life; its digest."""
        digest = block_digest(self._memory.block(block_id))
        self._memory.note_digest(block_id, digest)
        return digest

    def digest(self, block: memoryview) -> bytes:
        """Of a block of the memory, or of a part of one, held and final."""
        block_id, offset = divmod(self._memory.place(block), self._memory.block_bytes)
        if offset or len(block) != self._memory.block_bytes:
            return block_digest(block)
        return self._memory.digest(block_id) or self.seal(block_id)
