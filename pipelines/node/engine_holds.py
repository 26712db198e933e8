"""The engine's holds as the shell uses them: each is opened, answered, and ended in one context.

Knows commands and events of holds; not who wants the blocks. Invariants: every hold that the engine was asked for gets
its `EndHold`, whatever happens in between; every wait is bounded.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager

from kvcache.hashing import BlockHash
from pipelines.runtime.messages import (
    EndHold,
    EngineCommand,
    HoldEvent,
    HoldId,
    HoldRefused,
    ImportBlocks,
    Importing,
    LeaseBlocks,
    Leased,
    PublishBlocks,
)
from pronghorn.errors import EngineDied, Overloaded, Unavailable

ANSWER_TIMEOUT_S = 10.0
"""An engine answers between two steps. One that takes longer is no help in hurrying a prompt."""


class _Hold:
    def __init__(self) -> None:
        self.news = asyncio.Event()
        self.answered = False
        self.blocks: list[int] = []
        self.coming = 0
        self.found = 0
        self.refused = False
        self.lost = False

    def take(self, event: HoldEvent) -> None:
        match event:
            case Leased(block_ids=block_ids, coming=coming):
                self.blocks += block_ids
                self.coming = coming
            case Importing(found=found, block_ids=block_ids):
                self.found, self.blocks = found, block_ids
            case HoldRefused():
                self.refused = True
        self.answered = True
        self.news.set()

    async def answer(self) -> None:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await self.news.wait()
        except TimeoutError:
            raise Unavailable(f"the engine did not answer for a hold within {ANSWER_TIMEOUT_S} s") from None
        self.news.clear()
        if self.lost:
            raise EngineDied("the engine has ended, and with it what it held")


class Lease:
    """Blocks that may be read while the context is open."""

    def __init__(self, hold: _Hold) -> None:
        self._hold = hold

    @property
    def blocks(self) -> list[int]:
        """Block ids, of the first hashes asked for; it grows."""
        return self._hold.blocks

    @property
    def coming(self) -> int:
        return self._hold.coming

    async def wait(self, timeout_s: float) -> bool:
        """For more blocks, or other word; False where none came. Raises EngineDied."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._hold.answer()
        except TimeoutError:
            return False
        return True


class Import:
    """Blocks for a chain: the first `found` have their bytes, the others may be written while the context is open."""

    def __init__(self, hold: _Hold, publish: Callable[[int], None]) -> None:
        self.found = hold.found
        self.blocks = hold.blocks
        self._publish = publish

    def publish(self, blocks: int) -> None:
        """The first `blocks` have their bytes now. Raises Overloaded or EngineDied: then nothing was published."""
        self._publish(blocks)


class EngineHolds:
    def __init__(self, send: Callable[[EngineCommand], None]) -> None:
        self._send = send
        self._holds: dict[HoldId, _Hold] = {}
        self._count = 0

    @property
    def open(self) -> list[HoldId]:
        return list(self._holds)

    @asynccontextmanager
    async def lease(self, hashes: Sequence[BlockHash]) -> AsyncIterator[Lease]:
        """Raises Overloaded, EngineDied, or Unavailable where the engine does not answer."""
        async with self._opened(lambda hold: LeaseBlocks(hold, list(hashes))) as (_, hold):
            yield Lease(hold)

    @asynccontextmanager
    async def importing(self, hashes: Sequence[BlockHash]) -> AsyncIterator[Import | None]:
        """None where the engine has no room. Raises as `lease`."""
        async with self._opened(lambda hold: ImportBlocks(hold, list(hashes))) as (name, hold):
            imported = Import(hold, lambda blocks: self._send(PublishBlocks(name, blocks)))
            yield None if hold.refused else imported

    @asynccontextmanager
    async def _opened(self, command: Callable[[HoldId], EngineCommand]) -> AsyncIterator[tuple[HoldId, _Hold]]:
        self._count += 1
        name = HoldId(f"hold-{self._count}")
        hold = self._holds[name] = _Hold()
        try:
            self._send(command(name))
            await hold.answer()
            yield name, hold
        finally:
            del self._holds[name]
            try:
                self._send(EndHold(name))
            except (EngineDied, Overloaded):
                pass  # a dead engine holds nothing; to a living one this word is never refused

    def on_events(self, events: Iterable[HoldEvent]) -> None:
        for event in events:
            if (hold := self._holds.get(event.hold)) is not None:
                hold.take(event)

    def lose(self) -> None:
        """The engine has ended."""
        for hold in self._holds.values():
            hold.lost = True
            hold.news.set()
