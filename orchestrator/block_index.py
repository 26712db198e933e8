"""Which node holds how much of a prompt: a compressed radix tree kept inside one flat dict.

Knows index keys (`kvcache.hashing.index_keys`: packed little-endian u64, which say what they stand for and everything
before it) and the names of holders; not requests, sessions, time, nor what a holder is. A hint, never a truth.

    _where: key -> number of its run         the only work per block, done at C speed; holds ints alone, so that the
                                             collector never walks it
    run: consecutive blocks with one parent, and how deep into it each holder reaches

`find` bisects the prompt for its deepest known key, since a known key's ancestors are known, and folds the runs above
it. Invariants: who is in a run holds all of its parent; depths count from the root; a block that a holder drops takes
with it what lies deeper, for a prefix ends there. What nobody holds any more is collected later, a bounded piece with
each event (`sweep`). Above its cap in bytes the index gives up leaf runs that no query has met lately.
"""

import sys
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable
from itertools import repeat
from typing import NamedTuple

import numpy as np

from pronghorn.ids import Incarnation

RUN_BLOCKS = 512
"""A run's greatest length, which bounds what a split moves."""
SWEEP_BLOCKS = 256
"""Collected with each event, beside as many as the event stored."""

_MASK = (1 << 60) - 1
"""Of a key in the dict: an int below 2**60 takes 32 bytes, above it 48. Runs keep all 64 bits, and are compared."""
_BLOCK_BYTES = 32 + 8
_SLOT_BYTES = 64
"""A block's share of the dict: 32 to 80, as the dict grows in leaps; the cap reckons with this."""
_RUN_BYTES = 460
_HOLDING_BYTES = 130
"""By sys.getsizeof on CPython 3.11: an int and its place in a run; a run with its dicts; one holder of it."""


class IndexSize(NamedTuple):
    blocks: int
    """Unique ones."""
    runs: int
    holdings: int
    """Pairs of a run and somebody who holds some of it."""
    bytes: int
    """What all of it takes, about."""


class IndexTally(NamedTuple):
    """What could not be taken as it was said, since the start: how far the index may be from the truth."""

    unattached: int
    """Blocks stored behind a parent that their holder is not known to hold."""
    conflicting: int
    """Blocks whose key stands elsewhere already."""
    unknown_removed: int
    forgotten: int
    """Blocks given up above the cap."""


class _Run:
    __slots__ = ("held", "keys", "kids", "number", "parent", "stale", "start", "touched")

    def __init__(self, number: int, start: int, keys: "array[int]", parent: "_Run | None") -> None:
        self.number = number
        self.start = start
        self.keys = keys
        self.parent = parent
        self.kids: dict[_Run, None] | None = None
        self.held: dict[Incarnation, int] = {}
        self.stale = False
        self.touched = False

    @property
    def end(self) -> int:
        return self.start + len(self.keys)


class BlockIndex:
    def __init__(self, max_bytes: int = 512 * 1024 * 1024) -> None:
        self._max_bytes = max_bytes
        self._where: dict[int, int] = {}
        self._runs: OrderedDict[int, _Run] = OrderedDict()  # in the order in which the cap's hand passes them
        self._runs_of: dict[Incarnation, dict[_Run, None]] = {}
        self._blocks_of: dict[Incarnation, int] = {}
        self._stale: deque[_Run] = deque()
        self._holdings = 0
        self._next = 0
        self._unattached = self._conflicting = self._unknown_removed = self._forgotten = 0

    # --- what holders say ---------------------------------------------------------------------------------------------

    def stored(self, holder: Incarnation, parent: int | None, packed: bytes) -> None:
        """`holder` has these blocks, each behind the one before it, the first behind `parent` (None: at a root)."""
        keys = array("Q")
        keys.frombytes(packed)
        at, depth = None, 0
        if parent is not None:
            at, depth = self._locate(parent)
            if at is None or at.held.get(holder, 0) < depth:
                self._unattached += len(keys)
                return
        done, at = self._walk_known(holder, at, depth, keys)
        if done < len(keys):
            fresh = keys[done:] if done else keys
            masked = _masked(fresh)
            if good := self._unknown(masked):
                self._add(holder, at, depth + done, fresh[:good], masked[:good])
        self.sweep(SWEEP_BLOCKS + len(keys))
        self._keep_within_cap()

    def removed(self, holder: Incarnation, packed: bytes) -> None:
        where, runs = self._where, self._runs
        for key in memoryview(packed).cast("Q"):
            number = where.get(key & _MASK)
            run = runs[number] if number is not None else None
            reached = run.held.get(holder) if run is not None else None
            if run is None or reached is None:
                self._unknown_removed += run is None
                continue
            last = reached - 1 - run.start
            place = last if run.keys[last] == key else _place(run, key)
            if place is None or place > last:
                continue
            if last + 1 == len(run.keys) and run.kids is not None:
                self._forget_below(holder, run)
            self._reach(holder, run, run.start + place)
        self.sweep(SWEEP_BLOCKS)

    def dropped(self, holder: Incarnation) -> None:
        """It holds nothing any more. Costs by runs, not by blocks: those are swept later."""
        runs = self._runs_of.pop(holder, {})
        self._holdings -= len(runs)
        self._blocks_of.pop(holder, None)
        for run in runs:
            del run.held[holder]
            self._suspect(run)

    # --- questions ----------------------------------------------------------------------------------------------------

    def find(self, packed: bytes) -> dict[Incarnation, int]:
        """By holder, how many of the prompt's leading blocks it has. Who has none is left out. The caller's own."""
        leaf, depth = self._deepest(packed)
        if leaf is None:
            return {}
        fold: list[_Run] = []
        held = leaf.held
        seen = len(held)
        if depth < leaf.start + len(leaf.keys):
            held = {holder: reached if reached < depth else depth for holder, reached in held.items()}
        run = leaf.parent
        while run is not None:  # a parent with no more holders than its child has the same ones
            if len(run.held) > seen:
                fold.append(run)
                seen = len(run.held)
            run = run.parent
        if not fold:
            return held.copy() if held is leaf.held else held
        found = fold.pop().held.copy()
        while fold:
            found.update(fold.pop().held)
        found.update(held)
        return found

    def find_best(self, packed: bytes, count: int) -> dict[Incarnation, int]:
        """As `find`, of the `count` who have most, in no order."""
        if len(self._runs_of) <= count:
            return self.find(packed)
        run, depth = self._deepest(packed)
        best: dict[Incarnation, int] = {}
        while run is not None and len(best) < count:
            if len(run.held) > len(best):
                _take_deepest(run, depth, count, best)
            run = run.parent
        return best

    def depths(self, packed: bytes, holders: Iterable[Incarnation]) -> dict[Incarnation, int]:
        """As `find`, of these holders alone: for a few of very many."""
        run, limit = self._deepest(packed)
        found: dict[Incarnation, int] = {}
        asked = list(holders)
        while run is not None and asked:
            held, left = run.held, []
            for holder in asked:
                if (reached := held.get(holder)) is None:
                    left.append(holder)
                else:
                    found[holder] = reached if reached < limit else limit
            asked, run = left, run.parent
        return found

    def holds(self, holder: Incarnation, key: int) -> bool:
        run, depth = self._locate(key)
        return run is not None and run.held.get(holder, 0) >= depth

    def blocks_of(self, holder: Incarnation) -> int:
        return self._blocks_of.get(holder, 0)

    def holders(self) -> list[Incarnation]:
        return list(self._runs_of)

    def size(self) -> IndexSize:
        return IndexSize(len(self._where), len(self._runs), self._holdings, self._bytes(sys.getsizeof(self._where)))

    def tally(self) -> IndexTally:
        return IndexTally(self._unattached, self._conflicting, self._unknown_removed, self._forgotten)

    def dump(self) -> dict[Incarnation, set[int]]:
        """Everything, by holder: for tests and inspection."""
        found: dict[Incarnation, set[int]] = {}
        for holder, runs in self._runs_of.items():
            found[holder] = {key for run in runs for key in run.keys[: run.held[holder] - run.start]}
        return found

    def _deepest(self, packed: bytes) -> "tuple[_Run | None, int]":
        view = memoryview(packed).cast("Q")
        where = self._where
        low, high = 0, len(view)
        if high and view[high - 1] & _MASK in where:
            low = high
        while low < high:
            middle = (low + high + 1) >> 1
            if view[middle - 1] & _MASK in where:
                low = middle
            else:
                high = middle - 1
        if not low:
            return None, 0
        run = self._runs[where[view[low - 1] & _MASK]]
        place = low - 1 - run.start
        if not 0 <= place < len(run.keys) or run.keys[place] != view[low - 1]:
            return None, 0  # another block, whose key has the same 60 bits
        run.touched = True
        return run, low

    def _locate(self, key: int) -> "tuple[_Run | None, int]":
        """The key's run, and how deep the block that it names ends."""
        number = self._where.get(key & _MASK)
        if number is None:
            return None, 0
        run = self._runs[number]
        if run.keys[-1] == key:
            return run, run.end
        place = _place(run, key)
        return (None, 0) if place is None else (run, run.start + place + 1)

    # --- storing ------------------------------------------------------------------------------------------------------

    def _walk_known(
        self, holder: Incarnation, at: "_Run | None", depth: int, keys: "array[int]"
    ) -> "tuple[int, _Run | None]":
        """Follow the keys as far as they are known; the holder reaches there now. How many, and the run they end in."""
        where, runs = self._where, self._runs
        done, count = 0, len(keys)
        while done < count:
            number = where.get(keys[done] & _MASK)
            if number is None:
                break
            run = runs[number]
            offset = depth + done - run.start
            if not 0 <= offset < len(run.keys) or (run.parent if offset == 0 else run) is not at:
                break
            same = _same(run.keys, offset, keys, done)
            if not same:
                break
            done += same
            at = run
            run.touched = True
            if run.held.get(holder, 0) < run.start + offset + same:
                self._reach(holder, run, run.start + offset + same)
        return done, at

    def _unknown(self, masked: list[int]) -> int:
        """How many keys come before the first that stands elsewhere already, or stands here twice."""
        if self._where.keys().isdisjoint(masked) and len(set(masked)) == len(masked):
            return len(masked)
        seen: set[int] = set()
        for good, key in enumerate(masked):
            if key in self._where or key in seen:
                self._conflicting += len(masked) - good
                return good
            seen.add(key)
        return len(masked)

    def _add(self, holder: Incarnation, at: "_Run | None", depth: int, keys: "array[int]", masked: list[int]) -> None:
        """Put new blocks behind that depth of that run."""
        if at is not None and depth < at.end:
            if at.kids is None and max(at.held.values(), default=at.start) <= depth:
                self._cut(at, depth)
            else:
                self._split(at, depth)
        done = 0
        if at is not None and at.kids is None and (room := RUN_BLOCKS - len(at.keys)) > 0:
            done = min(room, len(keys))
            at.keys.extend(keys[:done])
            self._where.update(zip(masked[:done], repeat(at.number)))
            self._reach(holder, at, at.end)
        for first in range(done, len(keys), RUN_BLOCKS):
            last = first + RUN_BLOCKS
            at = self._new_run(depth + first, keys[first:last], masked[first:last], at)
            self._reach(holder, at, at.end)

    def _new_run(self, start: int, keys: "array[int]", masked: list[int], parent: "_Run | None") -> _Run:
        run = _Run(self._next, start, keys, parent)
        self._next += 1
        self._runs[run.number] = run
        self._where.update(zip(masked, repeat(run.number)))
        if parent is not None:
            if parent.kids is None:
                parent.kids = {}
            parent.kids[run] = None
        return run

    def _split(self, run: _Run, depth: int) -> None:
        """Make the blocks of the run from that depth on a run of their own."""
        kids, run_keys = run.kids, run.keys
        run.keys, run.kids = run_keys[: depth - run.start], None
        lower_keys = run_keys[depth - run.start :]
        lower = self._new_run(depth, lower_keys, _masked(lower_keys), run)
        lower.kids = kids
        for kid in kids or ():
            kid.parent = lower
        for holder, reached in run.held.items():
            if reached > depth:
                lower.held[holder] = reached
                run.held[holder] = depth
                self._runs_of[holder][lower] = None
        self._holdings += len(lower.held)
        self._suspect(lower)

    def _reach(self, holder: Incarnation, run: _Run, depth: int) -> None:
        """The holder reaches that deep into the run; at its start: not into it any more."""
        before = run.held.get(holder, run.start)
        self._blocks_of[holder] = self._blocks_of.get(holder, 0) + depth - before
        if depth > run.start:
            if before == run.start:
                self._holdings += 1
                self._runs_of.setdefault(holder, {})[run] = None
            run.held[holder] = depth
        elif before > run.start:
            self._holdings -= 1
            del run.held[holder], self._runs_of[holder][run]
            if not self._runs_of[holder]:
                del self._runs_of[holder], self._blocks_of[holder]
        if depth < before:
            self._suspect(run)

    def _forget_below(self, holder: Incarnation, run: _Run) -> None:
        below = list(run.kids or ())
        while below:
            kid = below.pop()
            if holder in kid.held:
                self._reach(holder, kid, kid.start)
                below += kid.kids or ()

    # --- collecting ---------------------------------------------------------------------------------------------------

    def _suspect(self, run: _Run) -> None:
        if not run.stale:
            run.stale = True
            self._stale.append(run)

    def sweep(self, blocks: int) -> None:
        """Collect what nobody holds: at least `blocks` of them where there are so many, and at most a run more."""
        while self._stale and blocks > 0:
            run = self._stale.popleft()
            run.stale = False
            blocks -= 1
            if run.kids is not None or run.number not in self._runs:
                continue
            live = max(run.held.values(), default=run.start)
            blocks -= run.end - live
            if live < run.end:
                self._cut(run, live)

    def _cut(self, run: _Run, depth: int) -> None:
        """Take the blocks from that depth on, which nobody holds, out of a leaf run."""
        gone = run.keys[depth - run.start :]
        delete = self._where.__delitem__
        for key in _masked(gone):
            delete(key)
        del run.keys[depth - run.start :]
        if run.keys:
            return
        del self._runs[run.number]
        if (parent := run.parent) is not None:
            assert parent.kids is not None
            del parent.kids[run]
            if not parent.kids:
                parent.kids = None
                self._suspect(parent)

    def _bytes(self, slots_bytes: int) -> int:
        return (
            slots_bytes
            + _BLOCK_BYTES * len(self._where)
            + _RUN_BYTES * len(self._runs)
            + _HOLDING_BYTES * self._holdings
        )

    def _keep_within_cap(self) -> None:
        """As a clock does: a run met since the hand last passed gets another round, and so do runs with kids."""
        if self._bytes(_SLOT_BYTES * len(self._where)) <= self._max_bytes:
            return
        goal = self._max_bytes - self._max_bytes // 64  # and then rests for a while
        passes = 2 * len(self._runs)
        while self._runs and passes and self._bytes(_SLOT_BYTES * len(self._where)) > goal:
            passes -= 1
            number, run = next(iter(self._runs.items()))
            if run.kids is not None or (run.touched and passes > len(self._runs)):
                run.touched = False
                self._runs.move_to_end(number)
                continue
            self._forgotten += len(run.keys)
            for holder in list(run.held):
                self._reach(holder, run, run.start)
            self._cut(run, run.start)

    # --- checks -------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Every invariant, and the accounting by recount. Linear: for tests."""
        assert sum(len(run.keys) for run in self._runs.values()) == len(self._where)
        assert sum(len(run.held) for run in self._runs.values()) == self._holdings
        for number, run in self._runs.items():
            assert run.number == number and 0 < len(run.keys) <= RUN_BLOCKS
            assert all(self._where[key] == number for key in _masked(run.keys))
            assert all(kid.parent is run and kid.start == run.end for kid in run.kids or ())
            assert run.kids is None or run.kids
            assert run.start == (run.parent.end if run.parent is not None else 0)
            assert run.parent is None or run in (run.parent.kids or ())
            for holder, reached in run.held.items():
                assert run.start < reached <= run.end and run in self._runs_of[holder]
                assert run.parent is None or run.parent.held[holder] == run.parent.end
        for holder, runs in self._runs_of.items():
            assert runs and all(holder in run.held for run in runs)
            assert self._blocks_of[holder] == sum(run.held[holder] - run.start for run in runs)
        assert self._blocks_of.keys() == self._runs_of.keys()
        if not self._stale:
            assert all(max(run.held.values(), default=0) == run.end for run in self._runs.values())


def _masked(keys: "array[int]") -> list[int]:
    masked: list[int] = (np.frombuffer(keys, np.uint64) & np.uint64(_MASK)).tolist()
    return masked


def _place(run: _Run, key: int) -> int | None:
    try:
        return run.keys.index(key)
    except ValueError:  # another block, whose key has the same 60 bits
        return None


def _same(one: "array[int]", at: int, other: "array[int]", from_: int) -> int:
    """How long the two go on alike from there."""
    count = min(len(one) - at, len(other) - from_)
    if one[at : at + count] == other[from_ : from_ + count]:
        return count
    low, high = 0, count - 1
    while low < high:  # alike up to `low`; not alike up to `high` + 1
        middle = (low + high + 1) >> 1
        if one[at + low : at + middle] == other[from_ + low : from_ + middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _take_deepest(run: _Run, depth: int, count: int, best: dict[Incarnation, int]) -> None:
    """Add to `best` the deepest holders of the run, up to `count` in all; who is in it already holds the whole run."""
    limit = min(depth, run.end)
    values = sorted(run.held.values(), reverse=True)
    least = min(limit, values[min(count, len(values)) - 1])
    if least < limit:
        for holder, reached in run.held.items():
            if reached > least and holder not in best:
                best[holder] = min(reached, limit)
    for holder, reached in run.held.items():
        if len(best) == count:
            return
        if reached >= least and holder not in best:
            best[holder] = least
