"""Gives what the engine computes to the connector's own tiers, while it is still there to be read.

Knows runs of hashes and leases; not where copies go. Runs are taken in the order in which they were stored, each under
a lease for as long as copying takes; a run that was evicted before its turn is cut where the gap is. What waits is
bounded: beyond it the oldest run is left out, and counted.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Iterable

from kvcache.connector import KVConnector
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


class Offloader:
    def __init__(self, connector: KVConnector, holds: EngineHolds, memory: BlockMemory, counters: Counters) -> None:
        self._connector = connector
        self._holds = holds
        self._memory = memory
        self._counters = counters
        self._runs: deque[list[BlockHash]] = deque()
        self._arrived = asyncio.Event()
        self._resets = 0

    def reset(self) -> None:
        """What was stored before is not given away any more."""
        self._runs.clear()
        self._resets += 1

    def note(self, changes: Iterable[CacheChange]) -> None:
        for change in changes:
            match change:
                case RunStored(hashes=hashes):
                    for start in range(0, len(hashes), BLOCKS_AT_ONCE):
                        self._runs.append([BlockHash(h) for h in hashes[start : start + BLOCKS_AT_ONCE]])
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
            while self._runs:
                run, resets = self._runs.popleft(), self._resets
                try:
                    async with self._holds.lease(run) as lease:
                        blocks = [self._memory.block(block) for block in lease.blocks]
                        if resets == self._resets:
                            self._connector.offload(run[: len(blocks)], blocks)
                except (Unavailable, Overloaded, EngineDied) as error:
                    self._counters.count("offload_skipped")
                    log.debug("a run of %d blocks was not offloaded: %s", len(run), error)
                await asyncio.sleep(0)  # others' turn
