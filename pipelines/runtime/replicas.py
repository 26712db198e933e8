"""The replicas of one engine: where a request goes, what is copied between their pools, and their sums.

Knows pools and slots. Must not know commands, states or what a batch is. Invariant: a request that is placed has a
slot and all its blocks on one replica, the least loaded one that has room.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Generic

from kvcache.block import BlockCopy
from kvcache.block_digests import BlockDigests
from kvcache.hashing import BlockHasher
from kvcache.journal import CacheChange, CacheJournal
from kvcache.memory import BlockMemory
from kvcache.prefix_cache import PrefixCache
from pipelines.runtime.config import EngineConfig
from pipelines.runtime.holds import BlockHolds
from pipelines.runtime.replica import Replica, WorkT
from pipelines.runtime.reservation import reserve_prompt
from pronghorn.ledger import Held, Kind


def new_caches(config: EngineConfig, hasher: BlockHasher, memory: BlockMemory | None = None) -> list[PrefixCache]:
    """One pool a replica, over its share of the one block memory, which counts lives and keeps digests; all with one
    journal."""
    journal = CacheJournal()
    return [
        PrefixCache(
            config.num_blocks,
            hasher,
            first_block=index * config.num_blocks,
            enable_prefix_caching=config.enable_prefix_caching,
            journal=journal,
            begin_life=None if memory is None else memory.begin_life,
            seal=None if memory is None else BlockDigests(memory).seal,
        )
        for index in range(config.data_parallel)
    ]


class Replicas(Generic[WorkT]):
    def __init__(self, config: EngineConfig, caches: Sequence[PrefixCache], hasher: BlockHasher) -> None:
        assert len(caches) == config.data_parallel
        self.all = [Replica[WorkT](index, cache) for index, cache in enumerate(caches)]
        self._hasher = hasher
        self._max_batch_size = config.max_batch_size
        self._others: list[Sequence[PrefixCache]] = [
            [other for other in caches if other is not cache] if config.enable_dp_cross_replica_prefix_copy else []
            for cache in caches
        ]
        self._copies: list[BlockCopy] = []
        self._journal = caches[0].journal
        self.holds = BlockHolds(caches)

    def __iter__(self) -> Iterator[Replica[WorkT]]:
        return iter(self.all)

    @property
    def caches(self) -> list[PrefixCache]:
        return [replica.cache for replica in self.all]

    def better_waits(self, work: WorkT) -> bool:
        """Whether what leads the prompt of `work` is being computed where it would go, and will be there to share."""
        chain, context = work.chain, work.context
        if context.awaits_prompt_log_probabilities:
            return False
        cache = min(self.all, key=lambda replica: replica.slots).cache
        if chain.awaited is None or not cache.is_promised(chain.awaited):
            chain.awaited = cache.awaited(self._hasher.root(context.cache_salt), chain.hashes, context.tokens[:])
        return chain.awaited is not None

    def place(self, owner: Hashable, work: WorkT, num_tokens: int, *, room_to_grow: bool) -> Replica[WorkT] | None:
        """Blocks for `num_tokens` tokens of `work` on the least loaded replica that has a slot and these; None where
        none has. With `room_to_grow` a block stays free there for each slot that is taken."""
        for replica in sorted(self.all, key=lambda replica: replica.slots):
            if replica.slots >= self._max_batch_size:
                return None
            copies = reserve_prompt(
                replica.cache,
                self._hasher,
                owner,
                work.context,
                work.chain.hashes,
                num_tokens,
                spare_blocks=replica.slots if room_to_grow else 0,
                others=self._others[replica.index],
            )
            if copies is not None:
                self._copies += copies
                return replica
        return None

    def fork(
        self, replica: Replica[WorkT], owner: Hashable, child: Hashable, num_tokens: int, *, room_to_grow: bool
    ) -> bool:
        """Share the blocks of `owner`'s first `num_tokens` tokens with `child`, on the same replica; False, with
        nothing held, where it has no slot or no block for that."""
        spare_blocks = replica.slots if room_to_grow else 0
        if replica.slots >= self._max_batch_size or not replica.cache.can_fork(num_tokens, spare_blocks):
            return False
        self._copies += replica.cache.fork(owner, child, num_tokens)
        return True

    def take_copies(self) -> list[BlockCopy]:
        copies, self._copies = self._copies, []
        return copies

    def take_cache_changes(self) -> list[CacheChange]:
        return self._journal.take()

    def reset_prefix_caches(self) -> None:
        for replica in self.all:
            replica.cache.reset()

    def block_gauges(self) -> dict[str, int]:
        """What `EngineLoad` says of blocks, over all replicas."""
        pools = [replica.cache.stats() for replica in self.all]
        return {
            "total_blocks": sum(pool.total for pool in pools),
            "free_blocks": sum(pool.free for pool in pools),
            "held_blocks": sum(pool.held for pool in pools),
            "cached_blocks": sum(pool.cached for pool in pools),
        }

    def blocks_held(self, holders: Mapping[Any, tuple[str, float]]) -> list[Held]:
        """A row for each owner of blocks, with the name and age of `holders`, and one for blocks that nobody owns.
        Tables may share blocks, so that the rows' sum may exceed what is held."""
        rows = []
        for replica in self.all:
            tables = {owner: replica.cache.table(owner) for owner in replica.cache.owners}
            for owner, table in tables.items():
                name, age_s = holders.get(owner, (str(owner), None))
                rows.append(Held(Kind.BLOCKS, name, len(table), age_s))
            owned = len({block for table in tables.values() for block in table})
            if lost := replica.cache.stats().held - owned:
                rows.append(Held(Kind.BLOCKS, "", lost, note=f"held by nobody, on replica {replica.index}"))
        return rows

    def check(self) -> None:
        for replica in self.all:
            replica.check()
            assert replica.slots <= self._max_batch_size
