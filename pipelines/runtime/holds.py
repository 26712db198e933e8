"""Blocks that an engine holds for its shell rather than for a request: leases that are read, imports that are written.

    lease    the run of blocks that leads a chain; read, sent or copied by the shell until `EndHold`. What is being
             computed of the rest is told as `coming`, and is held and told as soon as it is done.
    import   a chain's blocks, those that cannot be found empty; written by the shell, which then says how many leading
             ones have landed (`PublishBlocks`): those can be found from there on, whoever holds them.

Knows pools and hashes; not who asks, nor what the bytes are. The engine takes nothing back by itself: the shell bounds
every hold by a timer, and ends with its engine. Invariant: a hold is on one replica, until its `EndHold`.
"""

from collections.abc import Sequence

from kvcache.hashing import BlockHash
from kvcache.prefix_cache import PrefixCache
from pipelines.runtime.messages import (
    EndHold,
    HoldCommand,
    HoldEvent,
    HoldId,
    HoldRefused,
    ImportBlocks,
    Importing,
    LeaseBlocks,
    Leased,
    PublishBlocks,
)

FREE_SHARE = 8
"""An import leaves at least one block of so many free: what it brings must not make running sequences start over."""


class _Hold:
    def __init__(self, cache: PrefixCache, hashes: Sequence[BlockHash]) -> None:
        self.cache = cache
        self.hashes = hashes
        self.told: tuple[int, int] | None = None
        """Of a lease: how many blocks were told as held, and as coming."""


class BlockHolds:
    def __init__(self, caches: Sequence[PrefixCache]) -> None:
        self._caches = caches
        self._holds: dict[HoldId, _Hold] = {}
        self._leases: dict[HoldId, _Hold] = {}
        self._events: list[HoldEvent] = []

    def __contains__(self, owner: object) -> bool:
        return owner in self._holds

    def handle(self, command: HoldCommand) -> None:
        """Commands on a hold that is over are late, and harmless."""
        match command:
            case LeaseBlocks(hold=hold, hashes=hashes):
                self._lease(hold, [BlockHash(h) for h in hashes])
            case ImportBlocks(hold=hold, hashes=hashes):
                self._import(hold, [BlockHash(h) for h in hashes])
            case PublishBlocks(hold=hold, blocks=blocks):
                if (held := self._holds.get(hold)) is not None:
                    held.cache.publish_imported(hold, blocks)
            case EndHold(hold=hold):
                if (held := self._holds.pop(hold, None)) is not None:
                    self._leases.pop(hold, None)
                    held.cache.release(hold)

    def _lease(self, hold: HoldId, hashes: list[BlockHash]) -> None:
        cache = max(self._caches, key=lambda cache: cache.found_run(hashes))
        self._holds[hold] = self._leases[hold] = _Hold(cache, hashes)
        self._look(hold)

    def _import(self, hold: HoldId, hashes: list[BlockHash]) -> None:
        cache = max(self._caches, key=lambda cache: cache.stats().free)
        found = cache.import_run(hold, hashes, keep_free=max(1, cache.num_blocks // FREE_SHARE))
        if found is None:
            self._events.append(HoldRefused(hold))
            return
        self._holds[hold] = _Hold(cache, hashes)
        self._events.append(Importing(hold, found, list[int](cache.table(hold))))

    def _look(self, hold: HoldId) -> None:
        """Tell what of a lease can be found now, where that is news."""
        held = self._leases[hold]
        before = 0 if held.told is None else held.told[0]
        count = held.cache.lease(hold, held.hashes)
        coming = held.cache.promised_run(held.hashes[count:])
        if held.told != (count, coming):
            held.told = (count, coming)
            self._events.append(Leased(hold, list[int](held.cache.table(hold)[before:]), coming))
        if count == len(held.hashes):
            del self._leases[hold]

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def take_events(self) -> list[HoldEvent]:
        """Since the last call, in order; leases grow here by what was published meanwhile."""
        for hold in list(self._leases):
            self._look(hold)
        events, self._events = self._events, []
        return events
