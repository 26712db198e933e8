"""A row in the registry, a node's or an orchestrator's, kept alive by a lease; and the seed, kept by all who know it.

Knows when to write and when to go quiet; the row's content is asked for at each refresh. Redis away never stops
anybody: it is logged once, tried again at the next refresh, and said once when it is back.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Generic

from kvcache.registry import SEED_PERIOD_S, NodeRegistry, Rows, RowT
from pronghorn.errors import Unavailable
from pronghorn.tasks import Owner

log = logging.getLogger(__name__)

REFRESHES_PER_LEASE = 3
DEREGISTER_TIMEOUT_S = 2.0


class Registration(Generic[RowT]):
    def __init__(self, rows: Rows[RowT], lease_s: float, record: Callable[[], RowT]) -> None:
        self._rows = rows
        self._lease_s = lease_s
        self._record = record
        self._refresher: asyncio.Task[None] | None = None
        self._leaving = asyncio.Event()
        self._away = False

    @property
    def begun(self) -> bool:
        return self._refresher is not None

    def begin(self, owner: Owner) -> None:
        """Register, and refresh under `owner` until `end`. Once: later calls do nothing, nor after `end`."""
        if self._refresher is None and not self._leaving.is_set():
            self._refresher = owner.start(self._refresh(), "registration")

    async def _refresh(self) -> None:
        while not self._leaving.is_set():
            await self._write()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._lease_s / REFRESHES_PER_LEASE):
                    await self._leaving.wait()

    async def _write(self) -> None:
        record = self._record()
        try:
            await self._rows.register(record, self._lease_s)
        except Unavailable as error:
            if not self._away:
                log.warning("%s could not register, and goes on serving: %s", record.name, error)
            self._away = True
            return
        if self._away:
            log.info("%s is in the registry again", record.name)
        self._away = False

    async def end(self) -> None:
        """Leave the registry, within a bound; where it cannot be reached, the lease ends the row. Idempotent."""
        if self._leaving.is_set():
            return
        self._leaving.set()
        if self._refresher is None:
            return
        # A refresh under way ends by itself: cancelled, it could still reach Redis after the row was taken out.
        await asyncio.wait([self._refresher], timeout=DEREGISTER_TIMEOUT_S)
        record = self._record()
        try:
            async with asyncio.timeout(DEREGISTER_TIMEOUT_S):
                await self._rows.deregister(record.name, record.incarnation)
        except (Unavailable, TimeoutError) as error:
            log.warning("%s could not leave the registry, its lease will end: %r", record.name, error)


async def keep_seed(registry: NodeRegistry, seed: bytes) -> None:
    """For ever: say the cluster's hash seed, which a flush takes from the registry."""
    while True:
        await asyncio.sleep(SEED_PERIOD_S)
        with contextlib.suppress(Unavailable):
            await registry.keep_seed(seed)
