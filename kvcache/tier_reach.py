"""What a node could bring back, by tier: the blocks that can be found from their chain's start in the pool, in that
tier, or in one that is brought back sooner.

Pure; knows hashes, which follows which, and where each is. The pool's part is as old as the changes that it was told.
Invariants: what a tier reaches has no gap, whatever order its changes came in; the changes taken so far, applied in
order, give exactly `contents`; what "host" reaches, "disk" reaches too.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kvcache.contents import CacheContents
from kvcache.hashing import BlockHash
from kvcache.journal import AllRemoved, CacheChange, Removed, RunStored
from kvcache.tier_order import TIERS, Tier

Place = Literal["pool", "host", "disk"]
_BITS: Mapping[Place, int] = {"pool": 1, "host": 2, "disk": 4}


@dataclass(slots=True)
class _Block:
    parent: BlockHash | None
    places: int
    reached: bool = False


class Reach:
    """Of one set of places."""

    def __init__(self) -> None:
        self.contents = CacheContents()
        """What can be found, as far as the changes were taken."""
        self._blocks: dict[BlockHash, _Block] = {}
        self._kids: dict[BlockHash, dict[BlockHash, None]] = {}
        """By a block that may be missing itself: those that follow it."""
        self._changes: list[CacheChange] = []
        self._count = 0

    def add(self, place: Place, block_hash: BlockHash, parent: BlockHash | None) -> None:
        block = self._blocks.get(block_hash)
        if block is not None:
            block.places |= _BITS[place]
            return
        self._blocks[block_hash] = _Block(parent, _BITS[place])
        if parent is not None:
            self._kids.setdefault(parent, {})[block_hash] = None
        before = None if parent is None else self._blocks.get(parent)
        if parent is None or (before is not None and before.reached):
            self._reach(block_hash)

    def remove(self, place: Place, block_hash: BlockHash) -> None:
        block = self._blocks.get(block_hash)
        if block is None:
            return
        block.places &= ~_BITS[place]
        if block.places:
            return
        if block.reached:
            self._lose(block_hash)
        del self._blocks[block_hash]
        if block.parent is not None:
            kids = self._kids[block.parent]
            del kids[block_hash]
            if not kids:
                del self._kids[block.parent]

    def clear(self, *places: Place) -> None:
        """None of these has anything any more."""
        for place in places:
            bit = _BITS[place]
            for block_hash in [name for name, block in self._blocks.items() if block.places & bit]:
                self.remove(place, block_hash)

    def take(self) -> list[CacheChange]:
        """The changes since the last call, in order."""
        changes, self._changes = self._changes, []
        self.contents.apply(changes)
        return changes

    def _reach(self, block_hash: BlockHash) -> None:
        """It can be found now, and what follows it."""
        found = [block_hash]
        while found:
            each = found.pop()
            block = self._blocks[each]
            block.reached = True
            self._count += 1
            last = self._changes[-1] if self._changes else None
            if isinstance(last, RunStored) and block.parent is not None and last.hashes[-1] == block.parent:
                last.hashes.append(each)
            else:
                self._changes.append(RunStored(block.parent, [each]))
            found += self._kids.get(each, ())

    def _lose(self, block_hash: BlockHash) -> None:
        """It cannot be found any more, nor what follows it."""
        lost = [block_hash]
        for each in lost:  # which grows
            lost += self._kids.get(each, ())
        for each in lost:
            self._blocks[each].reached = False
        self._count -= len(lost)
        last = self._changes[-1] if self._changes else None
        if not self._count:
            self._changes = [AllRemoved()]
        elif isinstance(last, Removed):
            last.hashes.extend(reversed(lost))
        else:
            self._changes.append(Removed([*reversed(lost)]))


class TierReach:
    """Of every tier that a node has."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._tiers = [tier for tier in TIERS if tier in tiers]
        self._reaches = {tier: Reach() for tier in self._tiers}
        self._told = True
        self.on_change: Callable[[], None] = lambda: None
        """Called at the first change since the last `take`."""

    @property
    def contents(self) -> Mapping[str, CacheContents]:
        """What each tier reaches, as far as the changes were taken."""
        return {tier: reach.contents for tier, reach in self._reaches.items()}

    def pool_changed(self, changes: Iterable[CacheChange]) -> None:
        for change in changes:
            for reach in self._reaches.values():
                match change:
                    case RunStored(parent=parent, hashes=hashes):
                        before = None if parent is None else BlockHash(parent)
                        for block_hash in map(BlockHash, hashes):
                            reach.add("pool", block_hash, before)
                            before = block_hash
                    case Removed(hashes=hashes):
                        for block_hash in map(BlockHash, hashes):
                            reach.remove("pool", block_hash)
                    case AllRemoved():
                        reach.clear("pool")
        self._changed()

    def kept(self, tier: Tier, block_hash: BlockHash, parent: BlockHash | None) -> None:
        for reach in self._of(tier):
            reach.add(tier, block_hash, parent)
        self._changed()

    def lost(self, tier: Tier, block_hash: BlockHash) -> None:
        for reach in self._of(tier):
            reach.remove(tier, block_hash)
        self._changed()

    def cleared(self) -> None:
        """No tier has anything any more."""
        for reach in self._reaches.values():
            reach.clear(*TIERS)
        self._changed()

    def take(self) -> dict[str, list[CacheChange]]:
        """The changes of each tier since the last call; those that have none are left out."""
        self._told = True
        taken = {tier: reach.take() for tier, reach in self._reaches.items()}
        return {tier: changes for tier, changes in taken.items() if changes}

    def _of(self, tier: Tier) -> Iterable[Reach]:
        """Those to which the tier counts: its own, and those of tiers that are brought back later."""
        return [self._reaches[each] for each in self._tiers[self._tiers.index(tier) :]]

    def _changed(self) -> None:
        if self._told:
            self._told = False
            self.on_change()
