"""The node registry within one process: for tests and single-process runs. Same contract as the one in Redis."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Generic

from kvcache.registry import NodeRecord, OrchestratorRecord, RowT, superseded
from pronghorn.clock import Clock
from pronghorn.ids import Incarnation, NodeName


class MemoryRows(Generic[RowT]):
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rows: dict[NodeName, tuple[RowT, float]] = {}

    async def register(self, record: RowT, lease_s: float) -> None:
        self._drop_lapsed()
        held = self._rows.get(record.name)
        new = held is None or held[0].incarnation != record.incarnation
        if held is not None and new and held[0].registered_at_unix_s >= record.registered_at_unix_s:
            raise superseded(record, held[0].incarnation)
        self._rows[record.name] = (record, self._clock.now_s() + lease_s)
        if new:
            self._wake()

    async def deregister(self, name: NodeName, incarnation: Incarnation) -> None:
        held = self._rows.get(name)
        if held is not None and held[0].incarnation == incarnation:
            del self._rows[name]
            self._wake()

    async def list(self) -> list[RowT]:
        self._drop_lapsed()
        return [self._rows[name][0] for name in sorted(self._rows)]

    def _drop_lapsed(self) -> None:
        now_s = self._clock.now_s()
        lapsed = [name for name, (_, expires_at_s) in self._rows.items() if expires_at_s <= now_s]
        for name in lapsed:
            del self._rows[name]
        if lapsed:
            self._wake()

    def _wake(self) -> None:
        """Who is here has changed."""


class MemoryRegistry(MemoryRows[NodeRecord]):
    def __init__(
        self,
        clock: Clock,
        *,
        new_seed: Callable[[], bytes] = lambda: secrets.token_bytes(32),
        lapse_period_s: float = 0.05,
    ) -> None:
        """`lapse_period_s` is how often a watcher looks for leases that have run out."""
        super().__init__(clock)
        self.orchestrators: MemoryRows[OrchestratorRecord] = MemoryRows(clock)
        self._new_seed = new_seed
        self._lapse_period_s = lapse_period_s
        self._seed: bytes | None = None
        self._watchers: dict[asyncio.Event, None] = {}  # a dict for its order

    async def changes(self) -> AsyncIterator[None]:
        changed = asyncio.Event()
        self._watchers[changed] = None
        try:
            yield
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._lapse_period_s):
                        await changed.wait()
                self._drop_lapsed()
                if changed.is_set():
                    changed.clear()
                    yield
        finally:
            self._watchers.pop(changed, None)

    async def cluster_seed(self) -> bytes:
        if self._seed is None:
            self._seed = self._new_seed()
        return self._seed

    async def keep_seed(self, seed: bytes) -> None:
        self._seed = self._seed or seed

    async def close(self) -> None:
        self._watchers.clear()

    def _wake(self) -> None:
        for watcher in self._watchers:
            watcher.set()
