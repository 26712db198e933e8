"""Copies of blocks in this host's memory, and on its disk behind it: what the pool evicts need not be computed again.

Knows whole hashes, bytes and two budgets; not who asks. What goes is the end of the least recently used chain, from
memory to disk, and from disk away (`tier_order.py`): what is kept can be found from its chain's start. A budget of 0 is
no tier. Every block comes back with the digest that it was kept with, or is a miss, loudly: a disk may lie. Keys are
whole digests, salt and all, so that one tenant never finds what is another's.
"""

import asyncio
import logging
import shutil
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcache.connector import Landed, Located
from kvcache.fetch_plan import BlockPrices
from kvcache.hashing import BlockHash
from kvcache.tier_order import Tier, TierOrder
from kvcache.tier_reach import TierReach
from kvcache.transfer import block_digest
from pronghorn.clock import Clock
from pronghorn.counters import Counters
from pronghorn.errors import ConfigurationError
from pronghorn.tasks import Owner

log = logging.getLogger(__name__)

MAX_UNWRITTEN = 256
"""Blocks on their way to disk; while there are so many, a full memory takes no more."""


class HostTier:
    """Blocks in memory, within a budget that its user keeps."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.size_bytes = 0
        self._blocks: dict[BlockHash, tuple[bytes, bytes]] = {}

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def put(self, block_hash: BlockHash, data: bytes, digest: bytes) -> None:
        self._blocks[block_hash] = (data, digest)
        self.size_bytes += len(data)

    def get(self, block_hash: BlockHash) -> tuple[bytes, bytes] | None:
        return self._blocks.get(block_hash)

    def pop(self, block_hash: BlockHash) -> tuple[bytes, bytes]:
        found = self._blocks.pop(block_hash)
        self.size_bytes -= len(found[0])
        return found

    def clear(self) -> None:
        self._blocks.clear()
        self.size_bytes = 0


class DiskTier:
    """A file for each block, in a folder that is this life's alone: emptied at its start and at its end. The index and
    the digests are in memory, and only the event loop touches them; threads read and write whole files by `path`. What
    has been added counts, whether its file is written yet or not. The budget is its user's to keep."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """ConfigurationError where `folder` cannot be made."""
        self._folder = folder
        self.max_bytes = max_bytes
        self.size_bytes = 0
        self._blocks: dict[BlockHash, tuple[int, bytes]] = {}
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

    def add(self, block_hash: BlockHash, size_bytes: int, digest: bytes) -> None:
        self._blocks[block_hash] = (size_bytes, digest)
        self.size_bytes += size_bytes

    def digest(self, block_hash: BlockHash) -> bytes | None:
        """Of the block as it was kept."""
        found = self._blocks.get(block_hash)
        return None if found is None else found[1]

    def drop(self, block_hash: BlockHash) -> None:
        self.size_bytes -= self._blocks.pop(block_hash)[0]
        self.path(block_hash).unlink(missing_ok=True)

    def clear(self) -> None:
        for block_hash in list(self._blocks):
            self.drop(block_hash)

    def remove(self) -> None:
        self._blocks.clear()
        self.size_bytes = 0
        shutil.rmtree(self._folder, ignore_errors=True)


class TieredConnector:
    """`kvcache.connector.KVConnector` over a host tier and, where it is given one, a disk tier."""

    def __init__(
        self, name: str, host_bytes: int, disk: DiskTier | None, prices: BlockPrices, counters: Counters, clock: Clock
    ) -> None:
        """What comes back is noted in `prices` under its tier."""
        self._host = HostTier(host_bytes)
        self._disk = disk
        self._order = TierOrder()
        self.reach = TierReach([*(("host",) if host_bytes else ()), *(("disk",) if disk is not None else ())])
        """What can be found in these tiers and in the pool, once somebody tells it what the pool has."""
        self._prices = prices
        self._clock = clock
        self._counters = counters
        self._owner = Owner(f"{name}/tiers")
        self._unwritten: OrderedDict[BlockHash, bytes] = OrderedDict()
        """Blocks that the disk tier has, whose files it has not: they are had from here meanwhile."""
        self._writing: asyncio.Task[None] | None = None

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

    def bytes_per_s(self, tier: Tier) -> float | None:
        """How fast blocks came back from it lately; None where none did."""
        return self._prices.rates.rate(tier, self._clock.now_s())

    def has(self, block_hash: BlockHash) -> bool:
        return block_hash in self._order

    async def lookup(self, hashes: Sequence[BlockHash], known: int, metadata: Mapping[str, Any] | None) -> Located:
        found: Counter[Tier] = Counter()
        before_disk = count = known
        while count < len(hashes) and (tier := self._order.tier(hashes[count])) is not None:
            found[tier] += 1
            count += 1
            if not found["disk"]:
                before_disk = count
        if not found["disk"] or self._prices.cheaper_to_bring(found, 0.0, self._clock.now_s()):
            return Located(count)
        self._counters.count("tier_declined", "cheaper_to_compute")
        return Located(before_disk)

    # --- bringing back ------------------------------------------------------------------------------------------------

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
                    began_s = self._clock.now_s()
                    if (tier := await self._restore(block_hash, destination)) is None:
                        break
                    landed += 1
                    sizes[tier] += len(destination)
                    now_s = self._clock.now_s()
                    self._prices.rates.note(tier, len(destination), now_s - began_s, now_s)
        except TimeoutError:
            self._counters.count("tier_miss", "timeout")
        self._counters.count("blocks_restored", n=landed)
        return Landed(landed, sizes)

    async def _restore(self, block_hash: BlockHash, destination: memoryview) -> Tier | None:
        """The tier that it came from."""
        tier: Tier = "host"
        found = self._host.get(block_hash)
        if found is None:
            tier, found = "disk", await self._read(block_hash)
        if found is None:
            self._counters.count("tier_miss", "evicted")
            return None
        data, digest = found
        if len(data) != len(destination) or block_digest(data) != digest:
            self._counters.count("tier_miss", f"wrong_digest_{tier}")
            log.error("a block came back from the %s tier with other bytes than it was kept with; it is dropped", tier)
            self._forget(block_hash)
            return None
        destination[:] = data
        return tier

    async def _read(self, block_hash: BlockHash) -> tuple[bytes, bytes] | None:
        digest = None if self._disk is None else self._disk.digest(block_hash)
        if self._disk is None or digest is None:
            return None
        if (data := self._unwritten.get(block_hash)) is not None:
            return data, digest
        try:
            return await asyncio.to_thread(self._disk.path(block_hash).read_bytes), digest
        except OSError as error:
            if block_hash in self._disk:
                self._counters.count("tier_miss", "unreadable")
                log.warning("a block cannot be read from disk: %s", error)
                self._forget(block_hash)
            return None

    # --- keeping ------------------------------------------------------------------------------------------------------

    def offload(self, parent: BlockHash | None, hashes: Sequence[BlockHash], blocks: Sequence[memoryview]) -> int:
        taken = 0
        for block_hash, block in zip(hashes, blocks, strict=True):
            if block_hash in self._order:
                self._order.touch(block_hash)
            elif parent is not None and parent not in self._order:
                break
            elif not self._keep(block_hash, parent, bytes(block)):
                break
            parent = block_hash
            taken += 1
        return taken

    def _keep(self, block_hash: BlockHash, parent: BlockHash | None, data: bytes) -> bool:
        """Whether it is kept now. What is older may have to go for it."""
        host, max_bytes = self._host, self._host.max_bytes
        if len(data) > max_bytes or (parent is not None and self._order.tier(parent) == "disk"):
            return self._keep_on_disk(block_hash, parent, data)
        if host.size_bytes + len(data) > max_bytes and self._disk is not None and self._writer_is_behind:
            return False
        self._order.add(block_hash, parent, "host")
        self.reach.kept("host", block_hash, parent)
        host.put(block_hash, data, block_digest(data))
        self._counters.count("blocks_offloaded")
        while host.size_bytes > max_bytes:
            oldest = self._order.oldest("host")
            assert oldest is not None, "a tier that has blocks has the end of a chain"
            self._demote(oldest)
        return block_hash in self._order

    def _keep_on_disk(self, block_hash: BlockHash, parent: BlockHash | None, data: bytes) -> bool:
        if self._disk is None or self._writer_is_behind:
            return False
        self._order.add(block_hash, parent, "disk")
        self._counters.count("blocks_offloaded")
        return self._put_on_disk(self._disk, block_hash, data, block_digest(data))

    def _demote(self, block_hash: BlockHash) -> None:
        data, digest = self._host.pop(block_hash)
        if self._disk is None:
            self._order.drop(block_hash)
        else:
            self._order.demote(block_hash)
            self._put_on_disk(self._disk, block_hash, data, digest)
        self.reach.lost("host", block_hash)  # last, so that the other tier has it by then

    @property
    def _writer_is_behind(self) -> bool:
        return len(self._unwritten) >= MAX_UNWRITTEN

    def _put_on_disk(self, disk: DiskTier, block_hash: BlockHash, data: bytes, digest: bytes) -> bool:
        """Whether it is kept, as the order says already that it is."""
        disk.add(block_hash, len(data), digest)
        self.reach.kept("disk", block_hash, self._order.parent(block_hash))
        self._unwritten[block_hash] = data
        while disk.size_bytes > disk.max_bytes:
            oldest = self._order.oldest("disk")
            assert oldest is not None, "a tier that has blocks has the end of a chain"
            self._forget(oldest)
        if self._writing is None and self._unwritten:
            self._writing = self._owner.start(self._write(disk), "disk")
        return block_hash in self._order

    def _forget(self, block_hash: BlockHash) -> None:
        """And what follows it, which nobody could find any more."""
        if block_hash not in self._order:
            return
        for gone in self._order.drop(block_hash):
            self._unwritten.pop(gone, None)
            if gone in self._host:
                self._host.pop(gone)
                self.reach.lost("host", gone)
            elif self._disk is not None:
                self._disk.drop(gone)
                self.reach.lost("disk", gone)

    async def _write(self, disk: DiskTier) -> None:
        try:
            await self._write_all(disk)
        finally:
            self._writing = None  # here, and not by a callback: what comes between the two would wait for no writer

    async def _write_all(self, disk: DiskTier) -> None:
        while self._unwritten:
            block_hash, data = next(iter(self._unwritten.items()))
            path = disk.path(block_hash)
            try:
                await asyncio.to_thread(path.write_bytes, data)
            except OSError as error:
                self._counters.count("tier_write_failed")
                log.warning("a block cannot be written to disk: %s", error)
                path.unlink(missing_ok=True)
                if self._unwritten.get(block_hash) is data:
                    self._forget(block_hash)
                continue
            if self._unwritten.get(block_hash) is data:
                del self._unwritten[block_hash]
            else:  # given up meanwhile
                path.unlink(missing_ok=True)

    def touch(self, hashes: Sequence[BlockHash]) -> None:
        """The last of them in each tier stands for those before it."""
        last: dict[Tier, BlockHash] = {}
        for block_hash in hashes:
            if (tier := self._order.tier(block_hash)) is None:
                break
            last[tier] = block_hash
        for block_hash in last.values():
            self._order.touch(block_hash)

    def poll(self) -> int:
        return len(self._unwritten) + (self._writing is not None)

    def reset(self) -> None:
        self._unwritten.clear()
        self._order.clear()
        self.reach.cleared()
        self._host.clear()
        if self._disk is not None:
            self._disk.clear()

    async def close(self) -> None:
        self._unwritten.clear()
        await self._owner.stop(1.0)
        self._writing = None
        self._order.clear()
        self._host.clear()
        if self._disk is not None:
            await asyncio.to_thread(self._disk.remove)


def local_connector(
    name: str, host_bytes: int, prices: BlockPrices, counters: Counters, clock: Clock
) -> TieredConnector:
    """Memory alone."""
    return TieredConnector(name, host_bytes, None, prices, counters, clock)


def tiered_connector(
    name: str,
    host_bytes: int,
    disk_bytes: int,
    folder: Path,
    prices: BlockPrices,
    counters: Counters,
    clock: Clock,
) -> TieredConnector:
    """Memory, and below `folder` a disk tier unless `disk_bytes` is 0. ConfigurationError as `DiskTier`."""
    disk = DiskTier(folder / name, disk_bytes) if disk_bytes else None
    return TieredConnector(name, host_bytes, disk, prices, counters, clock)
