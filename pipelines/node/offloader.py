"""Gives what the engine computes to the connector's own tiers, while it is still there to be read.

Knows runs of hashes and leases; not where copies go. Runs are taken in the order in which they were stored, each under
a lease for as long as copying takes; a run that was evicted before its turn is cut where the gap is. Before a run goes
what it follows, where that is not kept: nobody could find the run behind a gap. What waits is bounded: beyond it the
oldest run is left out, and counted.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Iterable

from kvcache.connector import KVConnector
from kvcache.contents import CacheContents
from kvcache.hashing import BlockHash
from kvcache.journal import AllRemoved, CacheChange, Removed, RunStored
from kvcache.memory import BlockMemory
from pipelines.node.engine_holds import EngineHolds
from pronghorn.counters import Counters
from pronghorn.errors import EngineDied, Overloaded, Unavailable

log = logging.getLogger(__name__)

MAX_WAITING_RUNS = 1024
BLOCKS_AT_ONCE = 64
"""So that copying holds up the node's other streams for a moment only."""

Run = tuple[BlockHash | None, list[BlockHash]]
"""What it follows, None where a chain begins; and the blocks."""


class Offloader:
    def __init__(
        self,
        connector: KVConnector,
        contents: CacheContents,
        holds: EngineHolds,
        memory: BlockMemory,
        counters: Counters,
    ) -> None:
        self._connector = connector
        self._contents = contents
        self._holds = holds
        self._memory = memory
        self._counters = counters
        self._runs: deque[Run] = deque()
        self._arrived = asyncio.Event()
        self._working = False
        self._resets = 0

    @property
    def idle(self) -> bool:
        """Whether it has copied everything that it was told of, or left it out."""
        return not (self._working or self._arrived.is_set())

    def reset(self) -> None:
        """What was stored before is not given away any more."""
        self._runs.clear()
        self._resets += 1

    def note(self, changes: Iterable[CacheChange]) -> None:
        for change in changes:
            match change:
                case RunStored(parent=parent, hashes=hashes):
                    self._runs.extend(
                        _pieces(None if parent is None else BlockHash(parent), list(map(BlockHash, hashes)))
                    )
                case Removed() | AllRemoved():
                    pass  # a lease finds out
        while len(self._runs) > MAX_WAITING_RUNS:
            self._runs.popleft()
            self._counters.count("offload_skipped")
        self._arrived.set()

    async def run(self) -> None:
        """For ever."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            self._working = True
            while self._runs:
                resets = self._resets
                for parent, hashes in _pieces(*self._lacking(*self._runs.popleft())):
                    if await self._copied(parent, hashes, resets) < len(hashes):
                        break
            self._working = False

    def _lacking(self, parent: BlockHash | None, hashes: list[BlockHash]) -> Run:
        """The run less what the connector has of its beginning, behind what it lacks of that before it."""
        known = 0
        while known < len(hashes) and self._connector.has(hashes[known]):
            known += 1
        if known:
            self._connector.touch(hashes[:known])
            return hashes[known - 1], hashes[known:]
        before: list[BlockHash] = []
        while parent is not None and not self._connector.has(parent):
            if parent not in self._contents:
                self._counters.count("offload_skipped")
                return parent, []
            before.append(parent)
            parent = self._contents.parent(parent)
        return parent, [*reversed(before), *hashes]

    async def _copied(self, parent: BlockHash | None, hashes: list[BlockHash], resets: int) -> int:
        """How many of the first are kept now."""
        taken = 0
        try:
            async with self._holds.lease(hashes) as lease:
                blocks = [self._memory.block(block) for block in lease.blocks]
                if resets == self._resets:
                    taken = self._connector.offload(parent, hashes[: len(blocks)], blocks)
        except (Unavailable, Overloaded, EngineDied) as error:
            self._counters.count("offload_skipped")
            log.debug("a run of %d blocks was not offloaded: %s", len(hashes), error)
        await asyncio.sleep(0)  # others' turn
        return taken


def _pieces(parent: BlockHash | None, hashes: list[BlockHash]) -> list[Run]:
    """Of `BLOCKS_AT_ONCE` at most."""
    starts = range(0, len(hashes), BLOCKS_AT_ONCE)
    return [(hashes[at - 1] if at else parent, hashes[at : at + BLOCKS_AT_ONCE]) for at in starts]
