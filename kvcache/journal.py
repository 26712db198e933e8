"""What became findable in an engine's pools, and what is no longer: a journal that its reader empties.

Knows hashes; not blocks, nor who reads. One journal serves all pools of an engine: a hash counts as stored from the
first block that has it until the last, in whatever pool, has lost it. Invariant: the changes taken so far, applied in
order, give exactly the hashes that can be found.
"""

import msgspec

from kvcache.hashing import BlockHash


class RunStored(msgspec.Struct, frozen=True, tag=True):
    """A run of one chain. `parent` is the hash before its first; None at the start of a sequence."""

    parent: bytes | None
    hashes: list[bytes]


class Removed(msgspec.Struct, frozen=True, tag=True):
    hashes: list[bytes]


class AllRemoved(msgspec.Struct, frozen=True, tag=True):
    """Nothing can be found any more."""


CacheChange = RunStored | Removed | AllRemoved


class CacheJournal:
    def __init__(self) -> None:
        self._blocks: dict[BlockHash, int] = {}
        """How many blocks have each hash."""
        self._changes: list[CacheChange] = []
        self._last: BlockHash | None = None
        """The hash that a run at the end of the changes ends with."""

    def stored(self, block_hash: BlockHash, parent: BlockHash | None) -> None:
        count = self._blocks.get(block_hash, 0)
        self._blocks[block_hash] = count + 1
        if count:
            return
        run = self._changes[-1] if self._changes else None
        if isinstance(run, RunStored) and parent is not None and parent == self._last:
            run.hashes.append(block_hash)
        else:
            self._changes.append(RunStored(parent, [block_hash]))
        self._last = block_hash

    def removed(self, block_hash: BlockHash) -> None:
        count = self._blocks[block_hash] - 1
        if count:
            self._blocks[block_hash] = count
            return
        del self._blocks[block_hash]
        last = self._changes[-1] if self._changes else None
        if not self._blocks:
            self._changes = [AllRemoved()]
        elif isinstance(last, Removed):
            last.hashes.append(block_hash)
        else:
            self._changes.append(Removed([block_hash]))

    def take(self) -> list[CacheChange]:
        """The changes since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes
