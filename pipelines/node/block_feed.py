"""What is to be said to one orchestrator about the blocks that its node has cached.

Pure: knows index keys and numbers; what is cached now is passed in. Invariants: a snapshot first, then every change
since, each frame numbered one more than the one before; changes that wait are bounded: a reader so slow that more
would wait gets a new snapshot in their place.
"""

from collections import deque
from collections.abc import Iterable

from kvcache.contents import CacheContents
from kvcache.hashing import INDEX_KEY_BYTES, index_keys
from kvcache.journal import AllRemoved, CacheChange, Removed, RunStored
from pipelines.types.frames import BlockEvents, BlocksCleared, BlocksRemoved, BlocksStored

MAX_WAITING_KEYS = 65_536
"""Half a MiB; a node that computes 10,000 tokens a second fills it in a minute and a half without one read."""
KEYS_PER_FRAME = 8192
"""So that tokens wait behind 64 KiB of a snapshot at most."""

Event = BlocksStored | BlocksRemoved | BlocksCleared


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
        self._snapshot: deque[list[Event]] = deque()
        """Frames of a snapshot that have not left; the changes that wait came after all of them."""
        self._first_of_snapshot = False
        self._waiting: list[Event] = []
        self._waiting_keys = 0
        self._sequence = 0

    @property
    def idle(self) -> bool:
        return not (self._snapshot_due or self._snapshot or self._waiting)

    def add(self, events: Iterable[Event]) -> None:
        if self._snapshot_due:
            return  # what is cached when it is made will have them
        for event in events:
            self._waiting.append(event)
            self._waiting_keys += 1 if isinstance(event, BlocksCleared) else len(event.keys) // INDEX_KEY_BYTES
        if self._waiting_keys > self._max_waiting_keys:
            self.overflows += 1
            self.resend()

    def resend(self) -> None:
        """Begin anew with a snapshot."""
        self._snapshot_due = True
        self._snapshot.clear()
        self._waiting, self._waiting_keys = [], 0

    def take(self, contents: CacheContents) -> BlockEvents | None:
        """The next frame, None where there is nothing to say. `contents` has every change that was added."""
        if self._snapshot_due:
            self._snapshot_due, self._first_of_snapshot = False, True
            self._snapshot.extend(_in_frames(contents))
        if self._snapshot:
            events, first = self._snapshot.popleft(), self._first_of_snapshot
            self._first_of_snapshot = False
            return self._frame(events, snapshot=first, more=bool(self._snapshot))
        if not self._waiting:
            return None
        events, self._waiting, self._waiting_keys = self._waiting, [], 0
        return self._frame(events)

    def _frame(self, events: list[Event], *, snapshot: bool = False, more: bool = False) -> BlockEvents:
        self._sequence += 1
        return BlockEvents(self._sequence, events, snapshot, more)


def _in_frames(contents: CacheContents) -> list[list[Event]]:
    frames: list[list[Event]] = [[]]
    room = KEYS_PER_FRAME
    for run in contents.runs(KEYS_PER_FRAME):
        if len(run.hashes) > room:
            frames.append([])
            room = KEYS_PER_FRAME
        frames[-1].append(_event(run))
        room -= len(run.hashes)
    return frames
