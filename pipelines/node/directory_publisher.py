"""A node's rows in the directory of blocks, kept true off the path of every request.

Knows what has changed and what is written; not who reads. Everything is written anew where the directory has forgotten
the node, where it was away for longer than the changes that may wait, and at the start. Invariants: changes are written
in order; what waits is bounded; a life that another has replaced, or that has left, writes nothing more.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Iterable

from kvcache.contents import CacheContents
from kvcache.directory import BlockDirectory
from kvcache.hashing import BlockHash
from kvcache.journal import AllRemoved, CacheChange, Removed, RunStored
from pronghorn.counters import Counters
from pronghorn.errors import NodeRefused, Unavailable
from pronghorn.ids import Incarnation, NodeName

log = logging.getLogger(__name__)

REFRESH_PERIOD_S = 1.0
GATHER_S = 0.05
"""Changes of this long are written together."""
RETRY_S = 0.5
MAX_WAITING_BLOCKS = 65_536
"""Beside those that the node has: everything is written through the same queue."""
BATCH = 256
TURN_S = 1.0
"""Between two refreshes, so that the name is held however much there is to write, and however slowly it is taken."""
JITTER_S = 1.0
"""After a flush all nodes write everything: not all in the same moment."""
LEAVE_S = 1.0
"""For what is being written when the node leaves, and for its last word."""


class DirectoryPublisher:
    def __init__(
        self,
        directory: BlockDirectory,
        name: NodeName,
        incarnation: Incarnation,
        registered_at_unix_s: float,
        contents: CacheContents,
        counters: Counters,
    ) -> None:
        self._directory = directory
        self._name = name
        self._incarnation = incarnation
        self._registered_at_unix_s = registered_at_unix_s
        self._contents = contents
        self._counters = counters
        self._waiting: deque[tuple[bool, list[BlockHash]]] = deque()
        """Runs to write (True) or to take out, in order."""
        self._waiting_blocks = 0
        self._whole_due = True
        self._changed = asyncio.Event()
        self._leaving = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        spread = int(incarnation[:8], 16) / 2**32
        self._jitter_s = spread * JITTER_S

    def note(self, changes: Iterable[CacheChange]) -> None:
        """`contents` have these changes already."""
        for change in changes:
            match change:
                case RunStored(hashes=hashes):
                    self._wait_for(True, [BlockHash(h) for h in hashes])
                case Removed(hashes=hashes):
                    self._wait_for(False, [BlockHash(h) for h in hashes])
                case AllRemoved():
                    self._whole_due = True
        if self._waiting_blocks > MAX_WAITING_BLOCKS + len(self._contents):
            self._counters.count("directory_overflow")
            self._whole_due = True
        if self._whole_due:
            self._waiting.clear()
            self._waiting_blocks = 0
        self._changed.set()

    def _wait_for(self, stored: bool, hashes: list[BlockHash]) -> None:
        for start in range(0, len(hashes), BATCH):
            self._waiting.append((stored, hashes[start : start + BATCH]))
        self._waiting_blocks += len(hashes)

    async def run(self) -> None:
        """Until another life holds the name, or `leave`."""
        self._running = asyncio.current_task()
        while not self._leaving.is_set():
            try:
                await self._write()
                await self._directory.refresh(self._name, self._incarnation)
            except Unavailable as error:
                self._counters.count("directory_unavailable")
                log.debug("%s could not write to the directory of blocks: %s", self._name, error.message)
                if isinstance(error, NodeRefused) and error.code == "superseded":
                    log.warning("%s writes nothing more to the directory of blocks: %s", self._name, error.message)
                    return
                self._whole_due = self._whole_due or isinstance(error, NodeRefused)
                await self._pause(self._jitter_s if isinstance(error, NodeRefused) else RETRY_S)
                continue
            if self._waiting or self._whole_due:
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REFRESH_PERIOD_S):
                    await self._changed.wait()
            self._changed.clear()
            await self._pause(GATHER_S)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._leaving.wait()

    async def _write(self) -> None:
        """What waits: one batch at least, and no further one after `TURN_S`."""
        over_s = asyncio.get_running_loop().time() + TURN_S
        if self._whole_due:
            self._whole_due = False
            self._waiting.clear()
            self._waiting_blocks = 0
            for run in self._contents.runs(BATCH):
                self._wait_for(True, [BlockHash(h) for h in run.hashes])
            try:
                await self._directory.open(self._name, self._incarnation, self._registered_at_unix_s)
            except Unavailable:
                self._whole_due = True
                raise
        while self._waiting and not self._whole_due and not self._leaving.is_set():
            batch = self._waiting[0]
            stored, hashes = batch
            if stored:
                written = await self._directory.stored(self._name, self._incarnation, hashes)
                if written < len(hashes):
                    self._counters.count("directory_full", n=len(hashes) - written)
            else:
                await self._directory.removed(self._name, self._incarnation, hashes)
            if self._waiting and self._waiting[0] is batch:  # unless everything is due meanwhile
                self._waiting.popleft()
                self._waiting_blocks -= len(hashes)
            if asyncio.get_running_loop().time() >= over_s:
                return

    async def leave(self) -> None:
        """End `run`, take the node's rows out, and close the directory; where the rows stay, their lease ends them."""
        self._leaving.set()
        self._changed.set()
        if self._running is not None:
            # What is being written ends by itself: cancelled, it could still reach Redis after the rows were taken out.
            await asyncio.wait([self._running], timeout=LEAVE_S)
            self._running.cancel()
            await asyncio.wait([self._running], timeout=LEAVE_S)
        with contextlib.suppress(Unavailable, TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await self._directory.leave(self._name, self._incarnation)
        await self._directory.close()
