"""Which blocks the tiers of one node keep, which follows which, and in what order they go: the end of a chain first.

Pure; knows hashes and names of tiers, not bytes. Invariants: a block is kept only while the block before it is, and in
memory only while that is in memory, so that what is kept can be found from its chain's start; a block leaves memory
only after those there that follow it, and leaves altogether only after all that follow it; among those that may leave,
the least recently used goes first.

A block is as recent as the most recent of what followed it: what leaves gives its time to the block before it. So a use
costs one entry, however long its chain is.
"""

import heapq
from dataclasses import dataclass, field
from typing import Literal

from kvcache.hashing import BlockHash

Tier = Literal["host", "disk"]
TIERS: tuple[Tier, ...] = ("host", "disk")
"""From what is brought back soonest."""


@dataclass(slots=True)
class _Kept:
    parent: BlockHash | None
    tier: Tier
    used: int
    kids: dict[BlockHash, None] = field(default_factory=dict)
    """Those that are kept and follow it."""
    host_kids: int = 0
    """Those of them that the host tier has."""


class TierOrder:
    def __init__(self) -> None:
        self._kept: dict[BlockHash, _Kept] = {}
        self._ends: dict[Tier, list[tuple[int, BlockHash]]] = {tier: [] for tier in TIERS}
        """Heaps of who may leave; entries that are not true any more are passed over, or put right, when met."""
        self._counts: dict[Tier, int] = dict.fromkeys(TIERS, 0)
        self._uses = 0

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._kept

    def count(self, tier: Tier) -> int:
        return self._counts[tier]

    def tier(self, block_hash: BlockHash) -> Tier | None:
        kept = self._kept.get(block_hash)
        return None if kept is None else kept.tier

    def parent(self, block_hash: BlockHash) -> BlockHash | None:
        """What this one, which is kept, follows; None: it begins a chain."""
        return self._kept[block_hash].parent

    def add(self, block_hash: BlockHash, parent: BlockHash | None, tier: Tier) -> None:
        """`parent` (None: a chain begins) is kept, for "host" in memory; the block is not yet."""
        self._kept[block_hash] = _Kept(parent, tier, 0)
        self._counts[tier] += 1
        if parent is not None:
            before = self._kept[parent]
            before.kids[block_hash] = None
            before.host_kids += tier == "host"
        self.touch(block_hash)

    def touch(self, block_hash: BlockHash) -> None:
        """It was used, and with it all before it."""
        self._uses += 1
        kept = self._kept[block_hash]
        kept.used = self._uses
        self._offer(block_hash, kept)

    def demote(self, block_hash: BlockHash) -> None:
        """It goes to disk, the end of what its chain has in memory."""
        kept = self._kept[block_hash]
        assert kept.tier == "host" and self._may_leave(kept), "it is in memory, and nothing there follows it"
        kept.tier = "disk"
        self._counts["host"] -= 1
        self._counts["disk"] += 1
        self._offer(block_hash, kept)
        if kept.parent is not None:
            self._kept[kept.parent].host_kids -= 1
            self._has_left(kept.parent, kept)

    def oldest(self, tier: Tier) -> BlockHash | None:
        """Who leaves that tier next; None where it keeps nothing."""
        ends = self._ends[tier]
        while ends:
            used, block_hash = ends[0]
            kept = self._kept.get(block_hash)
            if kept is not None and kept.used == used and self._may_leave(kept) and kept.tier == tier:
                return block_hash
            heapq.heappop(ends)
        return None

    def drop(self, block_hash: BlockHash) -> list[BlockHash]:
        """It is kept no longer, nor what follows it: all of them, each before the one that it follows."""
        kept = self._kept[block_hash]
        gone = [block_hash]
        for each in gone:  # which grows
            gone += self._kept[each].kids
        gone.reverse()
        for each in gone:
            self._counts[self._kept.pop(each).tier] -= 1
        if kept.parent is not None:
            before = self._kept[kept.parent]
            del before.kids[block_hash]
            before.host_kids -= kept.tier == "host"
            self._has_left(kept.parent, kept)
        return gone

    def clear(self) -> None:
        self._kept.clear()
        for tier in TIERS:
            self._ends[tier].clear()
            self._counts[tier] = 0

    @staticmethod
    def _may_leave(kept: _Kept) -> bool:
        return not (kept.host_kids if kept.tier == "host" else kept.kids)

    def _offer(self, block_hash: BlockHash, kept: _Kept) -> None:
        if not self._may_leave(kept):
            return
        ends = self._ends[kept.tier]
        heapq.heappush(ends, (kept.used, block_hash))
        if len(ends) > 2 * self._counts[kept.tier] + 64:  # mostly entries of uses since
            true = [
                (each.used, name)
                for name, each in self._kept.items()
                if each.tier == kept.tier and self._may_leave(each)
            ]
            ends[:] = true
            heapq.heapify(ends)

    def _has_left(self, parent: BlockHash, kept: _Kept) -> None:
        """What it follows is as recent as it was, and may be the next to leave."""
        before = self._kept[parent]
        before.used = max(before.used, kept.used)
        self._offer(parent, before)
