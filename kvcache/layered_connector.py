"""Two connectors as one: what the near one keeps is had from it, what follows from the far one.

Knows order and time; not what either is made of. Invariants: the far one brings only what has not come from the near
one; where that gives less than it said, since a block was evicted or harmed, the far one is asked again from there on;
every byte is told under its source.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcache.connector import KVConnector, Landed, Located
from kvcache.hashing import BlockHash
from pronghorn.clock import Clock


@dataclass(frozen=True)
class _Layers:
    near: Located
    far: Located
    chain: Sequence[BlockHash]
    metadata: Mapping[str, Any] | None
    """The two that they were looked up for."""


class LayeredConnector:
    """`kvcache.connector.KVConnector` over two others, which it owns."""

    def __init__(self, near: KVConnector, far: KVConnector, clock: Clock) -> None:
        self._near = near
        self._far = far
        self._clock = clock

    def may_have(self, metadata: Mapping[str, Any] | None) -> bool:
        return self._near.may_have(metadata) or self._far.may_have(metadata)

    async def lookup(self, hashes: Sequence[BlockHash], known: int, metadata: Mapping[str, Any] | None) -> Located:
        near = await self._near.lookup(hashes, known, metadata)
        far = Located(near.blocks)
        if near.blocks < len(hashes):
            far = await self._far.lookup(hashes, near.blocks, metadata)
        return Located(max(near.blocks, far.blocks), [_Layers(near, far, hashes, metadata)])

    async def load(
        self,
        located: Located,
        hashes: Sequence[BlockHash],
        start: int,
        destinations: Sequence[memoryview],
        budget_s: float,
    ) -> Landed:
        (layers,) = located.sources
        assert isinstance(layers, _Layers)
        until_s = self._clock.now_s() + budget_s
        kept = min(max(0, layers.near.blocks - start), len(destinations))
        near = far = Landed(0)
        if kept:
            near = await self._near.load(layers.near, hashes, start, destinations[:kept], budget_s)
        if near.blocks < len(destinations):
            found = layers.far
            if near.blocks < kept:
                found = await self._far.lookup(layers.chain, start + near.blocks, layers.metadata)
            left_s = until_s - self._clock.now_s()
            if left_s > 0:
                far = await self._far.load(found, hashes, start + near.blocks, destinations[near.blocks :], left_s)
        return Landed(near.blocks + far.blocks, Counter(near.size_bytes) + Counter(far.size_bytes))

    @property
    def keeps(self) -> bool:
        return self._near.keeps or self._far.keeps

    def has(self, block_hash: BlockHash) -> bool:
        return self._near.has(block_hash) or self._far.has(block_hash)

    def offload(self, parent: BlockHash | None, hashes: Sequence[BlockHash], blocks: Sequence[memoryview]) -> int:
        """What either has taken is kept."""
        return max(self._near.offload(parent, hashes, blocks), self._far.offload(parent, hashes, blocks))

    def touch(self, hashes: Sequence[BlockHash]) -> None:
        self._near.touch(hashes)
        self._far.touch(hashes)

    def poll(self) -> int:
        return self._near.poll() + self._far.poll()

    def reset(self) -> None:
        self._near.reset()
        self._far.reset()

    async def close(self) -> None:
        try:
            await self._near.close()
        finally:
            await self._far.close()
