"""What every life of a node holds, as its block events tell it; and what a node that was just chosen is about to hold.

Pure: frames, decisions and the time come in, and whether to ask for a snapshot goes out. It knows lives of nodes and
index keys; not sessions. A hint, never a truth: the nodes check everything that they take. What a life could bring back
from a tier of its own is held, in the same index, under a name made of its own and the tier's.

    ABSENT --snapshot--> LOADING --its last frame--> FOLLOWING --a frame missing, or one from before--> ABSENT

Invariants: events of a life are taken only in their order, behind a snapshot; a sequence that goes backwards empties
what was known; a lost session does, too. What is expected counts as held until `EXPECTS_S` to twice that have passed,
and whether the node then really held it is counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from kvcache.tier_order import TIERS
from orchestrator.block_index import BlockIndex
from pipelines.types.frames import BlockEvents, BlocksCleared, BlocksRemoved, BlocksStored, NodeReport
from pronghorn.counters import Counters
from pronghorn.ids import Incarnation, NodeName

EXPECTS_S = 5.0
ASKS_AGAIN_S = 2.0
"""A snapshot that was asked for and has not come is asked for again."""
DRIFT_BLOCKS = 16
DRIFT_SHARE = 0.05
DRIFT_LASTS_S = 2.0
"""Where index and node differ by more than both, for longer than this, a snapshot is asked for."""


class Follow(Enum):
    ABSENT = "absent"  # nothing to build on: waits for a snapshot
    LOADING = "loading"  # a snapshot is coming in
    FOLLOWING = "following"


@dataclass
class _Life:
    state: Follow = Follow.ABSENT
    sequence: int | None = None
    asked_at_s: float | None = None
    drifting_since_s: float | None = None
    drift_blocks: int = 0
    """By how many blocks the index was off from what the node said last."""
    tiers: dict[str, Incarnation] = field(default_factory=dict)
    """The names under which the index knows what each tier reaches."""


class Holdings:
    """`find` and `expect` are `routing.router.Holders`."""

    def __init__(self, max_bytes: int, counters: Counters) -> None:
        self._index = BlockIndex(max_bytes)
        self._counters = counters
        self._lives: dict[Incarnation, _Life] = {}
        self._expected: dict[Incarnation, Incarnation] = {}
        """By the name under which the index knows an expectation: the life that it is about."""
        self._tiered: dict[Incarnation, Incarnation] = {}
        """By the name under which the index knows what a tier reaches: the life that has the tier."""
        self._awaited: list[tuple[Incarnation, bytes]] = []
        self._awaited_before: list[tuple[Incarnation, bytes]] = []
        self._turn = 0
        self._turned_at_s: float | None = None

    # --- what nodes say -----------------------------------------------------------------------------------------------

    def lost(self, incarnation: Incarnation) -> None:
        """The session is over: what is heard of that life next begins with a snapshot."""
        gone = self._lives.pop(incarnation, _Life())
        self._dropped(incarnation, gone)
        for tier_name in gone.tiers.values():
            del self._tiered[tier_name]
        for name, life in list(self._expected.items()):
            if life == incarnation:
                self._index.dropped(name)
                del self._expected[name]

    def events(self, incarnation: Incarnation, frame: BlockEvents, now_s: float) -> bool:
        """Whether to ask the node for a snapshot."""
        life = self._lives.setdefault(incarnation, _Life())
        before, life.sequence = life.sequence, frame.sequence
        if frame.snapshot:
            self._dropped(incarnation, life)
            life.state, life.asked_at_s, life.drifting_since_s = Follow.LOADING, None, None
        elif life.state is Follow.ABSENT or before is None or frame.sequence != before + 1:
            self._counters.count("block_events_lost" if life.state is not Follow.ABSENT else "block_events_unusable")
            if before is not None and frame.sequence <= before:
                self._dropped(incarnation, life)
            life.state = Follow.ABSENT
            return self._ask(life, now_s)
        for event in frame.events:
            self._take(incarnation, event)
        for tier, events in frame.kept.items():
            if (name := self._tier_name(incarnation, life, tier)) is not None:
                for event in events:
                    self._take(name, event)
        if life.state is Follow.LOADING and not frame.more:
            life.state = Follow.FOLLOWING
        return False

    def _dropped(self, incarnation: Incarnation, life: _Life) -> None:
        """Nothing is known of it any more."""
        self._index.dropped(incarnation)
        for name in life.tiers.values():
            self._index.dropped(name)

    def _tier_name(self, incarnation: Incarnation, life: _Life, tier: str) -> Incarnation | None:
        """None where it is a tier that nobody here knows, of a node that is newer than this."""
        if tier not in TIERS:
            return None
        if tier not in life.tiers:
            name = life.tiers[tier] = Incarnation(f"{incarnation}@{tier}")
            self._tiered[name] = incarnation
        return life.tiers[tier]

    def _take(self, holder: Incarnation, event: BlocksStored | BlocksRemoved | BlocksCleared) -> None:
        match event:
            case BlocksStored(parent=parent, keys=keys):
                self._index.stored(holder, parent, keys)
            case BlocksRemoved(keys=keys):
                self._index.removed(holder, keys)
            case BlocksCleared():
                self._index.dropped(holder)

    def _ask(self, life: _Life, now_s: float) -> bool:
        if life.asked_at_s is not None and now_s - life.asked_at_s < ASKS_AGAIN_S:
            return False
        life.asked_at_s = now_s
        self._counters.count("block_snapshot_asked")
        return True

    def heartbeat(self, report: NodeReport, now_s: float) -> bool:
        """Compare with what the node says that can be found there. Whether to ask it for a snapshot."""
        self.tick(now_s)
        life = self._lives.get(report.incarnation)
        if life is None or life.state is Follow.LOADING:
            return False
        if life.state is Follow.ABSENT:
            return life.asked_at_s is not None and self._ask(life, now_s)
        life.drift_blocks, too_far = self._drift(report, life)
        if not too_far or self._index.tally().forgotten:
            life.drifting_since_s = None
            return False
        if life.drifting_since_s is None:
            life.drifting_since_s = now_s
        if now_s - life.drifting_since_s < DRIFT_LASTS_S:
            return False
        life.drifting_since_s = None
        self._counters.count("block_index_drifted")
        return self._ask(life, now_s)

    def _drift(self, report: NodeReport, life: _Life) -> tuple[int, bool]:
        """By how many blocks the index is off, of the pool or of what a tier reaches, and whether that is too many."""
        said = [] if report.findable_blocks is None else [(report.incarnation, report.findable_blocks)]
        if not isinstance(report.tiers, msgspec.UnsetType):
            said += [(life.tiers[t], report.tiers[t].blocks) for t in life.tiers if t in report.tiers]
        off = [(abs(blocks - self._index.blocks_of(name)), blocks) for name, blocks in said]
        too_far = any(drift > max(DRIFT_BLOCKS, DRIFT_SHARE * blocks) for drift, blocks in off)
        return max((drift for drift, _ in off), default=0), too_far

    # --- what is asked ------------------------------------------------------------------------------------------------

    def find(self, packed: bytes, among: Sequence[Incarnation] | None = None) -> dict[Incarnation, int]:
        """By life, how many of the prompt's leading blocks it holds or is expected to. `among`: of these alone."""
        if among is None:
            found = self._index.find(packed)
            if self._tiered:
                found = {name: depth for name, depth in found.items() if name not in self._tiered}
        else:
            found = self._index.depths(packed, among)
        if self._expected:
            names = self._expected if among is None else self._names_of(among)
            for name, depth in self._index.depths(packed, names).items():
                found.pop(name, None)
                life = self._expected[name]
                if depth > found.get(life, 0):
                    found[life] = depth
        return found

    def find_kept(self, packed: bytes, among: Sequence[Incarnation]) -> dict[Incarnation, dict[str, int]]:
        """By those of these lives that have tiers, and by tier: how many leading blocks can be had from the pool, from
        that tier, or from one that is brought back sooner."""
        if not self._tiered:
            return {}
        names = {life: known.tiers for life in among if (known := self._lives.get(life)) is not None and known.tiers}
        depths = self._index.depths(packed, [name for tiers in names.values() for name in tiers.values()])
        return {life: {t: depths.get(name, 0) for t, name in tiers.items()} for life, tiers in names.items()}

    def _names_of(self, lives: Sequence[Incarnation]) -> list[Incarnation]:
        ends = (f"?{self._turn}", f"?{self._turn - 1}")
        return [name for life in lives for end in ends if (name := Incarnation(life + end)) in self._expected]

    def find_best(self, packed: bytes, count: int) -> list[Incarnation]:
        """Lives that hold most, or are expected to, or could bring it back: about `count` where there are so many, in
        no order."""
        if not self._tiered:
            found = self._index.find_best(packed, 2 * count)
            return list(dict.fromkeys(self._expected.get(name, name) for name in found))
        lives = self._tiered | self._expected
        found = self._index.find_best(packed, (2 + len(TIERS)) * count)
        return list(dict.fromkeys(lives.get(name, name) for name in found))

    def expect(self, incarnation: Incarnation, packed: bytes) -> None:
        """It was given a prompt with these blocks, and will soon hold them."""
        name = Incarnation(f"{incarnation}?{self._turn}")
        self._expected[name] = incarnation
        self._index.stored(name, None, packed)
        self._awaited.append((incarnation, packed[-8:]))

    def tick(self, now_s: float) -> None:
        """Let go of expectations of two turns ago, which the nodes' own events have replaced by now."""
        if self._turned_at_s is None:
            self._turned_at_s = now_s
        if now_s - self._turned_at_s < EXPECTS_S:
            return
        self._turned_at_s = now_s
        self._turn += 1
        old = f"?{self._turn - 2}"
        for name in [name for name in self._expected if name.endswith(old)]:
            self._index.dropped(name)
            del self._expected[name]
        for incarnation, key in self._awaited_before:
            if not self._index.holds(incarnation, int.from_bytes(key, "little")):
                self._counters.count("block_expected_in_vain")
        self._awaited_before, self._awaited = self._awaited, []

    # --- gauges -------------------------------------------------------------------------------------------------------

    def synced(self, incarnation: Incarnation) -> bool:
        life = self._lives.get(incarnation)
        return life is not None and life.state is Follow.FOLLOWING

    def behind(self, reports: Sequence[NodeReport]) -> list[NodeName]:
        """Whose blocks are not known yet, of the nodes that say that they have some."""
        return [r.name for r in reports if r.findable_blocks and not self.synced(r.incarnation)]

    def gauges(self) -> dict[str, int]:
        size, tally = self._index.size(), self._index.tally()
        return {
            "block_index_blocks": size.blocks,
            "block_index_entries": sum(self._index.blocks_of(life) for life in self._lives),
            "block_index_runs": size.runs,
            "block_index_bytes": size.bytes,
            "block_index_drift_blocks": sum(life.drift_blocks for life in self._lives.values()),
            "block_index_nodes_synced": sum(self.synced(life) for life in self._lives),
            "block_index_unattached": tally.unattached,
            "block_index_conflicting": tally.conflicting,
            "block_index_unknown_removed": tally.unknown_removed,
            "block_index_forgotten": tally.forgotten,
        }

    def dump(self) -> dict[Incarnation, set[int]]:
        """By life, the keys that it is known to hold, expectations and tiers aside: for tests and inspection."""
        other = self._expected.keys() | self._tiered.keys()
        return {life: keys for life, keys in self._index.dump().items() if life not in other}

    def dump_kept(self, tier: str) -> dict[Incarnation, set[int]]:
        """The same of what a tier reaches."""
        found = self._index.dump()
        names = {life: known.tiers[tier] for life, known in self._lives.items() if tier in known.tiers}
        return {life: found[name] for life, name in names.items() if name in found}

    def check(self) -> None:
        self._index.check()
