"""What is to be said to one orchestrator about the blocks that its node has cached.

Pure: knows index keys and numbers; what is cached now is passed in. Invariants: a snapshot first, then every change
since, each frame numbered one more than the one before; changes that wait are bounded: a reader so slow that more
would wait gets a new snapshot in their place.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from kvcache.contents import CacheContents
from kvcache.hashing import INDEX_KEY_BYTES, index_keys
from kvcache.journal import AllRemoved, CacheChange, Removed, RunStored
from pipelines.types.frames import BlockEvents, BlocksCleared, BlocksRemoved, BlocksStored

MAX_WAITING_KEYS = 65_536
"""Half a MiB; a node that computes 10,000 tokens a second fills it in a minute and a half without one read."""
KEYS_PER_FRAME = 8192
"""So that tokens wait behind 64 KiB of a snapshot at most."""

Event = BlocksStored | BlocksRemoved | BlocksCleared
NONE_KEPT: Mapping[str, Sequence[Event]] = {}


def events_of(changes: Iterable[CacheChange]) -> list[Event]:
    """The same, in index keys."""
    return [_event(change) for change in changes]


def _event(change: CacheChange) -> Event:
    match change:
        case RunStored(parent=parent, hashes=hashes):
            key = None if parent is None else int.from_bytes(parent[:INDEX_KEY_BYTES], "little")
            return BlocksStored(key, index_keys(hashes))
        case Removed(hashes=hashes):
            return BlocksRemoved(index_keys(hashes))
        case AllRemoved():
            return BlocksCleared()


class BlockFeed:
    def __init__(self, max_waiting_keys: int = MAX_WAITING_KEYS) -> None:
        self.overflows = 0
        self._max_waiting_keys = max_waiting_keys
        self._snapshot_due = True
        self._snapshot: deque[tuple[list[Event], dict[str, list[Event]]]] = deque()
        """Frames of a snapshot that have not left; the changes that wait came after all of them."""
        self._first_of_snapshot = False
        self._waiting: list[Event] = []
        self._waiting_kept: dict[str, list[Event]] = {}
        self._waiting_keys = 0
        self._sequence = 0

    @property
    def idle(self) -> bool:
        return not (self._snapshot_due or self._snapshot or self._waiting or self._waiting_kept)

    def add(self, events: Sequence[Event], kept: Mapping[str, Sequence[Event]] = NONE_KEPT) -> None:
        """Of the pool, and of what each tier reaches."""
        if self._snapshot_due:
            return  # what is cached when it is made will have them
        self._waiting += events
        self._waiting_keys += _keys(events)
        for tier, changed in kept.items():
            self._waiting_kept.setdefault(tier, []).extend(changed)
            self._waiting_keys += _keys(changed)
        if self._waiting_keys > self._max_waiting_keys:
            self.overflows += 1
            self.resend()

    def resend(self) -> None:
        """Begin anew with a snapshot."""
        self._snapshot_due = True
        self._snapshot.clear()
        self._waiting, self._waiting_kept, self._waiting_keys = [], {}, 0

    def take(self, contents: CacheContents, kept: Mapping[str, CacheContents]) -> BlockEvents | None:
        """The next frame, None where there is nothing to say. `contents`, and of each tier `kept`, have every change
        that was added."""
        if self._snapshot_due:
            self._snapshot_due, self._first_of_snapshot = False, True
            self._snapshot.extend(_in_frames(contents, kept))
        if self._snapshot:
            said, first = self._snapshot.popleft(), self._first_of_snapshot
            self._first_of_snapshot = False
            return self._frame(*said, snapshot=first, more=bool(self._snapshot))
        if not (self._waiting or self._waiting_kept):
            return None
        said = self._waiting, self._waiting_kept
        self._waiting, self._waiting_kept, self._waiting_keys = [], {}, 0
        return self._frame(*said)

    def _frame(
        self, events: list[Event], kept: dict[str, list[Event]], *, snapshot: bool = False, more: bool = False
    ) -> BlockEvents:
        self._sequence += 1
        return BlockEvents(self._sequence, events, snapshot, more, kept)


def _keys(events: Sequence[Event]) -> int:
    return sum(1 if isinstance(event, BlocksCleared) else len(event.keys) // INDEX_KEY_BYTES for event in events)


def _in_frames(
    contents: CacheContents, kept: Mapping[str, CacheContents]
) -> list[tuple[list[Event], dict[str, list[Event]]]]:
    frames: list[tuple[list[Event], dict[str, list[Event]]]] = [([], {})]
    room = KEYS_PER_FRAME
    for tier, found in ((None, contents), *kept.items()):
        for run in found.runs(KEYS_PER_FRAME):
            if len(run.hashes) > room:
                frames.append(([], {}))
                room = KEYS_PER_FRAME
            events, tiers = frames[-1]
            (events if tier is None else tiers.setdefault(tier, [])).append(_event(run))
            room -= len(run.hashes)
    return frames
