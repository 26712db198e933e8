"""The node registry as one simulated process reaches it: shared rows, behind a network and a Redis that can be away.

Knows outages and delay; the rows and their leases are `MemoryRegistry`'s, on the clock of Redis.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from random import Random

from cluster.simulator.network import Network
from kvcache.hashing import BlockHash
from kvcache.memory_directory import MemoryDirectory
from kvcache.memory_registry import MemoryRegistry, MemoryRows
from kvcache.registry import NodeRecord, OrchestratorRecord
from pronghorn.clock import Clock
from pronghorn.errors import Unavailable
from pronghorn.ids import Incarnation, NodeName

REDIS = "redis"
TIMEOUT_S = 1.0
LAPSE_PERIOD_S = 1.0


class SimRedis:
    """The one registry behind every link."""

    def __init__(self, clock: Clock, seed: bytes) -> None:
        self._clock = clock
        self._seed = seed
        self.rows = self._empty()
        self.directory = MemoryDirectory(clock)
        self.away = False

    def flush(self) -> None:
        """As a restart without its data: every row is gone. Whoever watches sees it when it lists next."""
        self.rows = self._empty()
        self.directory = MemoryDirectory(self._clock)

    def _empty(self) -> MemoryRegistry:
        return MemoryRegistry(self._clock, new_seed=lambda: self._seed, lapse_period_s=LAPSE_PERIOD_S)


class DirectoryLink:
    """`kvcache.directory.BlockDirectory`, as one simulated process reaches it."""

    def __init__(self, link: "RegistryLink", redis: SimRedis) -> None:
        self._link = link
        self._redis = redis

    async def open(self, name: NodeName, incarnation: Incarnation, registered_at_unix_s: float) -> None:
        await self._link.reach()
        await self._redis.directory.open(name, incarnation, registered_at_unix_s)

    async def stored(self, name: NodeName, incarnation: Incarnation, hashes: Sequence[BlockHash]) -> int:
        await self._link.reach()
        return await self._redis.directory.stored(name, incarnation, hashes)

    async def removed(self, name: NodeName, incarnation: Incarnation, hashes: Sequence[BlockHash]) -> None:
        await self._link.reach()
        await self._redis.directory.removed(name, incarnation, hashes)

    async def refresh(self, name: NodeName, incarnation: Incarnation) -> None:
        await self._link.reach()
        await self._redis.directory.refresh(name, incarnation)

    async def leave(self, name: NodeName, incarnation: Incarnation) -> None:
        await self._link.reach()
        await self._redis.directory.leave(name, incarnation)

    async def depths(self, hashes: Sequence[BlockHash]) -> dict[Incarnation, int]:
        await self._link.reach()
        return await self._redis.directory.depths(hashes)

    async def rows(self) -> AsyncIterator[tuple[Incarnation, list[bytes]]]:
        await self._link.reach()
        async for run in self._redis.directory.rows():
            yield run

    async def close(self) -> None:
        """Nothing is held."""


class RegistryLink:
    """`kvcache.registry.NodeRegistry`."""

    def __init__(self, redis: SimRedis, network: Network, host: str, random: Random) -> None:
        self._redis = redis
        self._network = network
        self._host = host
        self._random = random

    async def register(self, record: NodeRecord, lease_s: float) -> None:
        await self.reach()
        await self._redis.rows.register(record, lease_s)

    async def deregister(self, name: NodeName, incarnation: Incarnation) -> None:
        await self.reach()
        await self._redis.rows.deregister(name, incarnation)

    async def list(self) -> list[NodeRecord]:
        await self.reach()
        return await self._redis.rows.list()

    @property
    def orchestrators(self) -> MemoryRows[OrchestratorRecord]:
        """Nobody in a simulation registers there."""
        return self._redis.rows.orchestrators

    async def changes(self) -> AsyncIterator[None]:
        yield
        while True:
            async for _ in self._redis.rows.changes():
                if self._unreachable:
                    break
                yield
            await asyncio.sleep(TIMEOUT_S)

    async def cluster_seed(self) -> bytes:
        await self.reach()
        return await self._redis.rows.cluster_seed()

    async def keep_seed(self, seed: bytes) -> None:
        await self.reach()
        await self._redis.rows.keep_seed(seed)

    async def close(self) -> None:
        """Nothing is held."""

    async def reach(self) -> None:
        await asyncio.sleep(0.0005 + self._random.random() * 0.002)
        if self._unreachable:
            await asyncio.sleep(TIMEOUT_S)
            raise Unavailable("the node registry does not answer")

    @property
    def _unreachable(self) -> bool:
        network = self._network
        return self._redis.away or network.cut_off(self._host, REDIS) or network.cut_off(REDIS, self._host)
