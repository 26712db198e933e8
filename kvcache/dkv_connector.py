"""The distributed cache as one node sees it: blocks that other nodes have, fetched where that beats computing them.

Knows the hint, the nodes that are registered, the directory where there is one, and the speeds that were measured; not
sockets (`BlockSource`). Invariants: only registered nodes are asked, and only for blocks that this node's own hashes
name; a hint whose last hash is not that of this prompt under this salt asks nobody, so that replaying it tells nothing.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvcache import fetch_plan
from kvcache.connector import CacheHint, HintOutcome, Landed, Located, read_hint
from kvcache.directory import BlockDirectory
from kvcache.fetch_plan import COMPUTE, BlockPrices
from kvcache.hashing import BlockHash
from kvcache.registry import NodeRecord
from pronghorn.clock import Clock
from pronghorn.counters import Counters
from pronghorn.errors import Unavailable
from pronghorn.ids import NodeName
from pronghorn.tasks import Owner

log = logging.getLogger(__name__)

DIRECTORY_TIMEOUT_S = 0.1
DIRECTORY_PAUSE_S = 2.0
"""One that did not answer is not asked again for so long: an outage costs a prompt in two seconds a tenth of one."""
LATENCY_S = 0.01
"""Of opening a fetch, where nothing is measured: a turn of the holder's engine loop."""


@dataclass(frozen=True)
class Fetched:
    blocks: int
    """Of the first that were asked for: here, and verified."""
    size_bytes: int
    took_s: float
    """While bytes were coming."""
    failure: str | None = None
    """Why there are not all; None where the holder had no more."""


class BlockSource(Protocol):
    async def fetch(
        self,
        holder: NodeRecord,
        hashes: Sequence[BlockHash],
        destinations: Sequence[memoryview],
        budget_s: float,
        patience_s: float,
    ) -> Fetched:
        """Write the blocks with these hashes, as many of the first as the holder has. Raises nothing but cancellation;
        nothing is written after its end."""


@dataclass(frozen=True)
class _Holder:
    record: NodeRecord
    depth: int
    """Leading blocks of the chain that it is said to have."""
    promised: bool
    """Whether it may still be about to compute them."""


class DKVConnector:
    keeps = False

    def __init__(
        self,
        *,
        name: NodeName,
        peers: Callable[[], Mapping[NodeName, NodeRecord]],
        source: BlockSource,
        directory: BlockDirectory | None,
        prices: BlockPrices,
        clock: Clock,
        counters: Counters,
    ) -> None:
        """`peers` gives the nodes that are registered at that moment, this one excepted. What comes from one is noted
        in `prices` under its incarnation."""
        self._name = name
        self._peers = peers
        self._source = source
        self._directory = directory
        self._prices = prices
        self._rates = prices.rates
        self._clock = clock
        self._counters = counters
        self._directory_again_s = -math.inf
        self._fetches = Owner(f"{name}/fetches")

    def may_have(self, metadata: Mapping[str, Any] | None) -> bool:
        return metadata is not None or (self._directory is not None and bool(self._peers()))

    # --- where -------------------------------------------------------------------------------------------------------

    async def lookup(self, hashes: Sequence[BlockHash], known: int, metadata: Mapping[str, Any] | None) -> Located:
        peers = self._peers()
        outcome, hint = read_hint(metadata, {*peers, self._name})
        if outcome not in (HintOutcome.ABSENT, HintOutcome.USABLE):
            self._counters.count("cache_hint_miss", outcome.value)
        holders = [] if hint is None else self._hinted(hint, hashes, peers)
        if hint is None and self._directory is not None:
            holders = await self._listed(self._directory, hashes, known, peers)
        useful = [holder for holder in holders if holder.depth > known and self._worth(holder, known)]
        return Located(max((holder.depth for holder in useful), default=known), useful)

    def _hinted(
        self, hint: CacheHint, hashes: Sequence[BlockHash], peers: Mapping[NodeName, NodeRecord]
    ) -> list[_Holder]:
        found = []
        for instance in hint.instances:
            record = peers.get(NodeName(instance.name))
            if record is None or instance.blocks == 0:
                continue
            if instance.blocks > len(hashes) or not hashes[instance.blocks - 1].hex().startswith(instance.last_hash):
                self._counters.count("cache_hint_miss", "wrong_hash")
                continue
            found.append(_Holder(record, instance.blocks, promised=True))
        return found

    async def _listed(
        self,
        directory: BlockDirectory,
        hashes: Sequence[BlockHash],
        known: int,
        peers: Mapping[NodeName, NodeRecord],
    ) -> list[_Holder]:
        if self._clock.now_s() < self._directory_again_s:
            return []
        try:
            async with asyncio.timeout(DIRECTORY_TIMEOUT_S):
                depths = await directory.depths(hashes[known:])
        except (TimeoutError, Unavailable):
            self._directory_again_s = self._clock.now_s() + DIRECTORY_PAUSE_S
            self._counters.count("directory_miss", "no_answer")
            return []
        living = {record.incarnation: record for record in peers.values()}
        return [
            _Holder(living[incarnation], known + depth, promised=False)
            for incarnation, depth in depths.items()
            if incarnation in living
        ]

    def _worth(self, holder: _Holder, known: int) -> bool:
        blocks = {holder.record.incarnation: holder.depth - known}
        worth = self._prices.cheaper_to_bring(blocks, LATENCY_S, self._clock.now_s())
        if not worth:
            self._counters.count("fetch_declined", "cheaper_to_compute")
        return worth

    # --- bringing ----------------------------------------------------------------------------------------------------

    async def load(
        self,
        located: Located,
        hashes: Sequence[BlockHash],
        start: int,
        destinations: Sequence[memoryview],
        budget_s: float,
    ) -> Landed:
        now_s, end = self._clock.now_s(), start + len(destinations)
        holders = {source.record.name: source for source in located.sources if isinstance(source, _Holder)}
        shared_out = fetch_plan.segments(
            start,
            [
                (name, min(holder.depth, end), self._rates.rate(holder.record.incarnation, now_s))
                for name, holder in holders.items()
            ],
        )
        tasks = [
            self._fetches.start(
                self._fetch(holders[NodeName(segment.name)], segment, hashes, start, destinations, budget_s),
                f"fetch<-{segment.name}",
            )
            for segment in shared_out
        ]
        try:
            if tasks:
                await asyncio.wait(tasks)
        finally:
            for task in tasks:
                task.cancel()
        landed = 0
        for segment, task in zip(shared_out, tasks, strict=True):
            if start + landed != segment.start:
                break
            landed += task.result().blocks
        self._counters.count("blocks_fetched", n=landed)
        sizes = {
            segment.name: task.result().size_bytes for segment, task in zip(shared_out, tasks, strict=True)
        }  # a holder has one segment
        return Landed(landed, {name: size_bytes for name, size_bytes in sizes.items() if size_bytes})

    async def _fetch(
        self,
        holder: _Holder,
        segment: fetch_plan.Segment,
        hashes: Sequence[BlockHash],
        start: int,
        destinations: Sequence[memoryview],
        budget_s: float,
    ) -> Fetched:
        blocks = segment.stop - segment.start
        tokens_per_s = self._rates.rate(COMPUTE, self._clock.now_s())
        num_tokens = blocks * self._prices.block_tokens
        fetched = await self._source.fetch(
            holder.record,
            hashes[segment.start : segment.stop],
            destinations[segment.start - start : segment.stop - start],
            min(budget_s, fetch_plan.wait_s(num_tokens, tokens_per_s)),
            fetch_plan.patience_s(num_tokens, tokens_per_s) if holder.promised else 0.0,
        )
        self._rates.note(holder.record.incarnation, fetched.size_bytes, fetched.took_s, self._clock.now_s())
        self._counters.count("bytes_fetched", n=fetched.size_bytes)
        if fetched.failure is not None:
            self._counters.count("fetch_failed", fetched.failure)
        elif fetched.blocks < blocks:
            self._counters.count("fetch_failed", "evicted")
        return fetched

    # --- what it does not keep ---------------------------------------------------------------------------------------

    def has(self, block_hash: BlockHash) -> bool:
        return False

    def offload(self, parent: BlockHash | None, hashes: Sequence[BlockHash], blocks: Sequence[memoryview]) -> int:
        return 0

    def touch(self, hashes: Sequence[BlockHash]) -> None:
        """Holders see for themselves what is asked for."""

    def poll(self) -> int:
        return len(self._fetches.running)

    def reset(self) -> None:
        """Nothing is kept."""

    async def close(self) -> None:
        await self._fetches.stop(1.0)
