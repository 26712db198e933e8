"""What can be found in an engine's pools, as its shell knows it from the engine's journal.

Knows hashes and which follows which; not blocks. As large as the pools' hashes, never larger. What it says may be a
step old: a block named here may be gone when it is asked for, which is a miss.
"""

from collections.abc import Iterable, Iterator

from kvcache.hashing import BlockHash
from kvcache.journal import AllRemoved, CacheChange, Removed, RunStored


class CacheContents:
    def __init__(self) -> None:
        self._parents: dict[BlockHash, BlockHash | None] = {}
        """By hash, in the order in which they came."""

    def __len__(self) -> int:
        return len(self._parents)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._parents

    def parent(self, block_hash: BlockHash) -> BlockHash | None:
        """The hash that this one, which can be found, follows; None: it begins a chain."""
        return self._parents[block_hash]

    def apply(self, changes: Iterable[CacheChange]) -> None:
        for change in changes:
            match change:
                case RunStored(parent=parent, hashes=hashes):
                    before = None if parent is None else BlockHash(parent)
                    for block_hash in map(BlockHash, hashes):
                        self._parents[block_hash] = before
                        before = block_hash
                case Removed(hashes=hashes):
                    for block_hash in map(BlockHash, hashes):
                        self._parents.pop(block_hash, None)
                case AllRemoved():
                    self._parents.clear()

    def leading(self, hashes: Iterable[BlockHash]) -> int:
        """How many of the first of these can be found, up to the first that cannot."""
        count = 0
        for block_hash in hashes:
            if block_hash not in self._parents:
                break
            count += 1
        return count

    def runs(self, max_blocks: int) -> Iterator[RunStored]:
        """Everything, parents before what follows them, in runs of at most `max_blocks`. Not while it changes."""
        run: RunStored | None = None
        for block_hash, parent in self._parents.items():
            if run is not None and parent is not None and parent == run.hashes[-1] and len(run.hashes) < max_blocks:
                run.hashes.append(block_hash)
                continue
            if run is not None:
                yield run
            run = RunStored(parent, [block_hash])
        if run is not None:
            yield run
