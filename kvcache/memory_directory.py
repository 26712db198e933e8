"""The directory of blocks within one process: for tests and the simulator. Same contract as the one in Redis."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from kvcache.directory import KEY_BYTES, LEASE_S, superseded, unknown
from kvcache.hashing import BlockHash
from pronghorn.clock import Clock
from pronghorn.ids import Incarnation, NodeName


@dataclass
class _Life:
    incarnation: Incarnation
    registered_at_unix_s: float
    expires_at_s: float
    keys: dict[bytes, None] = field(default_factory=dict)


class MemoryDirectory:
    def __init__(self, clock: Clock, max_entries: int = 1 << 20) -> None:
        self._clock = clock
        self._max_entries = max_entries
        self._lives: dict[NodeName, _Life] = {}

    async def open(self, name: NodeName, incarnation: Incarnation, registered_at_unix_s: float) -> None:
        self._drop_lapsed()
        held = self._lives.get(name)
        if held and held.incarnation != incarnation and held.registered_at_unix_s >= registered_at_unix_s:
            raise superseded(name, incarnation, held.incarnation)
        self._lives[name] = _Life(incarnation, registered_at_unix_s, self._clock.now_s() + LEASE_S)

    async def stored(self, name: NodeName, incarnation: Incarnation, hashes: Sequence[BlockHash]) -> int:
        life = self._life(name, incarnation)
        room = self._max_entries - sum(len(each.keys) for each in self._lives.values())
        for count, block_hash in enumerate(hashes):
            key = block_hash[:KEY_BYTES]
            if key not in life.keys:
                if room <= 0:
                    return count
                room -= 1
                life.keys[key] = None
        return len(hashes)

    async def removed(self, name: NodeName, incarnation: Incarnation, hashes: Sequence[BlockHash]) -> None:
        life = self._life(name, incarnation)
        for block_hash in hashes:
            life.keys.pop(block_hash[:KEY_BYTES], None)

    async def refresh(self, name: NodeName, incarnation: Incarnation) -> None:
        self._life(name, incarnation).expires_at_s = self._clock.now_s() + LEASE_S

    async def leave(self, name: NodeName, incarnation: Incarnation) -> None:
        held = self._lives.get(name)
        if held is not None and held.incarnation == incarnation:
            del self._lives[name]

    async def depths(self, hashes: Sequence[BlockHash]) -> dict[Incarnation, int]:
        self._drop_lapsed()
        found: dict[Incarnation, int] = {}
        for life in self._lives.values():
            depth = 0
            while depth < len(hashes) and hashes[depth][:KEY_BYTES] in life.keys:
                depth += 1
            if depth:
                found[life.incarnation] = depth
        return found

    async def rows(self) -> AsyncIterator[tuple[Incarnation, list[bytes]]]:
        self._drop_lapsed()
        for life in list(self._lives.values()):
            if life.keys:
                yield life.incarnation, list(life.keys)

    async def close(self) -> None:
        """Nothing is held."""

    def _life(self, name: NodeName, incarnation: Incarnation) -> _Life:
        self._drop_lapsed()
        life = self._lives.get(name)
        if life is None:
            raise unknown(name, incarnation)
        if life.incarnation != incarnation:
            raise superseded(name, incarnation, life.incarnation)
        return life

    def _drop_lapsed(self) -> None:
        now_s = self._clock.now_s()
        for name in [name for name, life in self._lives.items() if life.expires_at_s <= now_s]:
            del self._lives[name]
