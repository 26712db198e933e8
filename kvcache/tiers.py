"""Copies of blocks in this host's memory, and on its disk behind it: what the pool evicts need not be computed again.

Knows whole hashes, bytes and two budgets; not who asks. Least recently used goes first, from memory to disk, and from
disk away; a budget of 0 is no tier. Every block comes back with the digest that it was kept with, or is a miss, loudly:
a disk may lie. Keys are whole digests, salt and all, so that one tenant never finds what is another's.
"""

import asyncio
import logging
import shutil
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcache.connector import Landed, Located
from kvcache.hashing import BlockHash
from kvcache.transfer import block_digest
from pronghorn.counters import Counters
from pronghorn.errors import ConfigurationError
from pronghorn.tasks import Owner

log = logging.getLogger(__name__)

MAX_UNWRITTEN = 256
"""Blocks on their way to disk; beyond them the oldest goes nowhere."""


class HostTier:
    """Blocks in memory. `put` gives what had to go for it."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.size_bytes = 0
        self._blocks: OrderedDict[BlockHash, tuple[bytes, bytes]] = OrderedDict()

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def put(self, block_hash: BlockHash, data: bytes, digest: bytes) -> list[tuple[BlockHash, bytes, bytes]]:
        """Keep it; (hash, bytes, digest) of what is not kept any more, itself where it is larger than the tier."""
        if block_hash in self._blocks:
            self.touch(block_hash)
            return []
        if len(data) > self._max_bytes:
            return [(block_hash, data, digest)]
        self._blocks[block_hash] = (data, digest)
        self.size_bytes += len(data)
        gone = []
        while self.size_bytes > self._max_bytes:
            oldest, (old, old_digest) = self._blocks.popitem(last=False)
            self.size_bytes -= len(old)
            gone.append((oldest, old, old_digest))
        return gone

    def get(self, block_hash: BlockHash) -> tuple[bytes, bytes] | None:
        return self._blocks.get(block_hash)

    def touch(self, block_hash: BlockHash) -> None:
        if block_hash in self._blocks:
            self._blocks.move_to_end(block_hash)

    def drop(self, block_hash: BlockHash) -> None:
        if (found := self._blocks.pop(block_hash, None)) is not None:
            self.size_bytes -= len(found[0])

    def clear(self) -> None:
        self._blocks.clear()
        self.size_bytes = 0


class DiskTier:
    """A file for each block, in a folder that is this life's alone: emptied at its start and at its end. The index and
    the digests are in memory, and only the event loop touches them; threads read and write whole files by `path`."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """ConfigurationError where `folder` cannot be made."""
        self._folder = folder
        self._max_bytes = max_bytes
        self.size_bytes = 0
        self._blocks: OrderedDict[BlockHash, tuple[int, bytes]] = OrderedDict()
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        except OSError as error:
            raise ConfigurationError(
                f"the folder of the disk tier cannot be made: {error}", param="disk_dir"
            ) from error

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def path(self, block_hash: BlockHash) -> Path:
        return self._folder / block_hash.hex()

    def make_room(self, size_bytes: int) -> bool:
        """Whether so many bytes fit now; for that the oldest go."""
        if size_bytes > self._max_bytes:
            return False
        while self.size_bytes + size_bytes > self._max_bytes:
            self.drop(next(iter(self._blocks)))
        return True

    def add(self, block_hash: BlockHash, size_bytes: int, digest: bytes) -> None:
        """Its file has been written, after `make_room`."""
        self._blocks[block_hash] = (size_bytes, digest)
        self.size_bytes += size_bytes

    def digest(self, block_hash: BlockHash) -> bytes | None:
        """Of the block as it was kept."""
        found = self._blocks.get(block_hash)
        return None if found is None else found[1]

    def touch(self, block_hash: BlockHash) -> None:
        if block_hash in self._blocks:
            self._blocks.move_to_end(block_hash)

    def drop(self, block_hash: BlockHash) -> None:
        if (found := self._blocks.pop(block_hash, None)) is not None:
            self.size_bytes -= found[0]
            self.path(block_hash).unlink(missing_ok=True)

    def clear(self) -> None:
        for block_hash in list(self._blocks):
            self.drop(block_hash)

    def remove(self) -> None:
        self._blocks.clear()
        shutil.rmtree(self._folder, ignore_errors=True)


class TieredConnector:
    """`kvcache.connector.KVConnector` over a host tier and, where it is given one, a disk tier."""

    def __init__(self, name: str, host_bytes: int, disk: DiskTier | None, counters: Counters) -> None:
        self._host = HostTier(host_bytes)
        self._disk = disk
        self._counters = counters
        self._owner = Owner(f"{name}/tiers")
        self._unwritten: deque[tuple[BlockHash, bytes, bytes]] = deque(maxlen=MAX_UNWRITTEN)
        self._writing: asyncio.Task[None] | None = None
        self._resets = 0

    @property
    def keeps(self) -> bool:
        return True

    @property
    def host(self) -> HostTier:
        return self._host

    @property
    def disk(self) -> DiskTier | None:
        return self._disk

    def may_have(self, metadata: Mapping[str, Any] | None) -> bool:
        return len(self._host) > 0 or (self._disk is not None and len(self._disk) > 0)

    def _has(self, block_hash: BlockHash) -> bool:
        return block_hash in self._host or (self._disk is not None and block_hash in self._disk)

    async def lookup(self, hashes: Sequence[BlockHash], known: int, metadata: Mapping[str, Any] | None) -> Located:
        count = known
        while count < len(hashes) and self._has(hashes[count]):
            count += 1
        return Located(count)

    async def load(
        self,
        located: Located,
        hashes: Sequence[BlockHash],
        start: int,
        destinations: Sequence[memoryview],
        budget_s: float,
    ) -> Landed:
        landed = 0
        sizes: Counter[str] = Counter()
        try:
            async with asyncio.timeout(budget_s):
                for block_hash, destination in zip(hashes[start:], destinations, strict=False):
                    if (tier := await self._restore(block_hash, destination)) is None:
                        break
                    landed += 1
                    sizes[tier] += len(destination)
        except TimeoutError:
            self._counters.count("tier_miss", "timeout")
        self._counters.count("blocks_restored", n=landed)
        return Landed(landed, sizes)

    async def _restore(self, block_hash: BlockHash, destination: memoryview) -> str | None:
        """The tier that it came from."""
        tier, found = "host", self._host.get(block_hash)
        if found is None:
            tier, found = "disk", await self._read(block_hash)
        if found is None:
            self._counters.count("tier_miss", "evicted")
            return None
        data, digest = found
        if len(data) != len(destination) or block_digest(data) != digest:
            self._counters.count("tier_miss", f"wrong_digest_{tier}")
            log.error("a block came back from the %s tier with other bytes than it was kept with; it is dropped", tier)
            self._drop(block_hash)
            return None
        destination[:] = data
        return tier

    async def _read(self, block_hash: BlockHash) -> tuple[bytes, bytes] | None:
        digest = None if self._disk is None else self._disk.digest(block_hash)
        if self._disk is None or digest is None:
            return None
        try:
            return await asyncio.to_thread(self._disk.path(block_hash).read_bytes), digest
        except OSError as error:
            self._counters.count("tier_miss", "unreadable")
            log.warning("a block cannot be read from disk: %s", error)
            self._drop(block_hash)
            return None

    def _drop(self, block_hash: BlockHash) -> None:
        self._host.drop(block_hash)
        if self._disk is not None:
            self._disk.drop(block_hash)

    def offload(self, hashes: Sequence[BlockHash], blocks: Sequence[memoryview]) -> int:
        for block_hash, block in zip(hashes, blocks, strict=True):
            if self._has(block_hash):
                continue
            data = bytes(block)
            for gone in self._host.put(block_hash, data, block_digest(data)):
                self._demote(gone)
            self._counters.count("blocks_offloaded")
        return len(blocks)

    def _demote(self, gone: tuple[BlockHash, bytes, bytes]) -> None:
        if self._disk is None:
            return
        self._unwritten.append(gone)
        if self._writing is None:
            self._writing = self._owner.start(self._write(self._disk), "disk")

    async def _write(self, disk: DiskTier) -> None:
        try:
            await self._write_all(disk)
        finally:
            self._writing = None  # here, and not by a callback: what comes between the two would wait for no writer

    async def _write_all(self, disk: DiskTier) -> None:
        while self._unwritten:
            (block_hash, data, digest), resets = self._unwritten.popleft(), self._resets
            if block_hash in disk or not disk.make_room(len(data)):
                continue
            path = disk.path(block_hash)
            try:
                await asyncio.to_thread(path.write_bytes, data)
            except OSError as error:
                self._counters.count("tier_write_failed")
                log.warning("a block cannot be written to disk: %s", error)
                path.unlink(missing_ok=True)
            else:
                disk.add(block_hash, len(data), digest)
                if resets != self._resets:
                    disk.drop(block_hash)

    def touch(self, hashes: Sequence[BlockHash]) -> None:
        """The end of the sequence first, so that it goes first."""
        for block_hash in reversed(hashes):
            self._host.touch(block_hash)
            if self._disk is not None:
                self._disk.touch(block_hash)

    def poll(self) -> int:
        return len(self._unwritten) + (self._writing is not None)

    def reset(self) -> None:
        self._resets += 1
        self._unwritten.clear()
        self._host.clear()
        if self._disk is not None:
            self._disk.clear()

    async def close(self) -> None:
        self._unwritten.clear()
        await self._owner.stop(1.0)
        self._writing = None
        self._host.clear()
        if self._disk is not None:
            await asyncio.to_thread(self._disk.remove)


def local_connector(name: str, host_bytes: int, counters: Counters) -> TieredConnector:
    """Memory alone."""
    return TieredConnector(name, host_bytes, None, counters)


def tiered_connector(name: str, host_bytes: int, disk_bytes: int, folder: Path, counters: Counters) -> TieredConnector:
    """Memory, and below `folder` a disk tier unless `disk_bytes` is 0. ConfigurationError as `DiskTier`."""
    disk = DiskTier(folder / name, disk_bytes) if disk_bytes else None
    return TieredConnector(name, host_bytes, disk, counters)
