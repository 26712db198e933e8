"""The other nodes of one model that are registered, as of the registry's last word. An outage keeps what was known.

Knows rows; not whether anybody answers.
"""

import asyncio
import logging
from collections.abc import Mapping

from kvcache.registry import NodeRecord, NodeRegistry
from pronghorn.errors import Unavailable
from pronghorn.ids import NodeName

log = logging.getLogger(__name__)

ROLES = ("prefill", "decode")
PAUSE_S = 1.0
"""Between two listings. Every node lists when any node comes or goes: without a pause N that start together cost N * N
listings of N rows, and a peer that is known a second late costs nothing but that its blocks are computed once more."""


class Peers:
    def __init__(self, registry: NodeRegistry, name: NodeName, model: str) -> None:
        self._registry = registry
        self._name = name
        self._model = model
        self._records: dict[NodeName, NodeRecord] = {}

    def __call__(self) -> Mapping[NodeName, NodeRecord]:
        return self._records

    async def watch(self) -> None:
        """For ever."""
        async for _ in self._registry.changes():
            while not await self._list():  # noqa: ASYNC110  # a server's answer, which no event tells
                await asyncio.sleep(PAUSE_S)
            await asyncio.sleep(PAUSE_S)

    async def _list(self) -> bool:
        """Whether the registry answered."""
        try:
            records = await self._registry.list()
        except Unavailable as error:
            log.debug("%s keeps the peers that it knows: %s", self._name, error.message)
            return False
        self._records = {r.name: r for r in records if r.name != self._name and self._is_of_use(r)}
        return True

    def _is_of_use(self, record: NodeRecord) -> bool:
        return record.role in ROLES and record.model == self._model
