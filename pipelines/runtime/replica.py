"""One data-parallel replica as its scheduler sees it: a pool, and what is to be computed there, in order.

Knows contexts and counts; not commands or events. Invariants: whatever holds a slot is in exactly one queue; prompts
are in order (the more urgent first, then as they came), save that one that was cut in a step stays at their front until
it is done, is taken out, or a more urgent one comes.
"""

from collections import deque
from enum import Enum, auto
from typing import Generic, Protocol, TypeVar

from kvcache.hashing import BlockHash
from kvcache.prefix_cache import PrefixCache
from pipelines.types.text_context import TextContext


class Stage(Enum):
    PULLED = auto()
    """Holds a slot while its blocks come from elsewhere."""
    PROMPT = auto()
    """Context encoding."""
    DECODING = auto()
    """Token generation: its window is one token."""


class Work(Protocol):
    @property
    def context(self) -> TextContext: ...

    @property
    def arrival(self) -> int:
        """Later ones have higher numbers; it stays with a sequence that starts over."""

    @property
    def chain(self) -> "Chain":
        """The hashes of its prompt, as far as they were needed."""


class Chain:
    """What is known of a sequence's blocks before it holds any. Kept with it, so that it is hashed once."""

    def __init__(self) -> None:
        self.hashes: list[BlockHash] = []
        self.awaited: BlockHash | None = None
        """The first of them that it waits for, since it is being computed for somebody else."""


WorkT = TypeVar("WorkT", bound=Work)


class Replica(Generic[WorkT]):
    def __init__(self, index: int, cache: PrefixCache) -> None:
        self.index = index
        self.cache = cache
        self.pulled: deque[WorkT] = deque()
        self.prompts: deque[WorkT] = deque()
        """Next one first."""
        self.decoding: deque[WorkT] = deque()
        self.begun: WorkT | None = None
        """The prompt that was cut, while there is one: the first of `prompts`."""
        self.queues = {Stage.PULLED: self.pulled, Stage.PROMPT: self.prompts, Stage.DECODING: self.decoding}

    @property
    def slots(self) -> int:
        """Taken."""
        return len(self.pulled) + len(self.prompts) + len(self.decoding)

    def move(self, work: WorkT, before: Stage | None, after: Stage | None) -> None:
        """From one queue, if any, to its place in another, if any."""
        if before is not None:
            self.queues[before].remove(work)
            if work is self.begun:
                self.begun = None
        if after is Stage.PROMPT:
            if self.begun is not None and work.context.priority < self.begun.context.priority:
                self._put_back(self.begun)
            insert_by_turn(self.prompts, work, behind=int(self.begun is not None))
        elif after is not None:
            self.queues[after].append(work)

    def _put_back(self, begun: WorkT) -> None:
        """It goes on where it was cut, in its turn."""
        self.begun = None
        self.prompts.remove(begun)
        insert_by_turn(self.prompts, begun)

    def check(self) -> None:
        self.cache.check()
        assert self.begun is None or self.begun is self.prompts[0], "a prompt that was begun is not the next one"
        assert all(work.context.tokens.active_length == 1 for work in self.decoding)
        later = list(self.prompts)[int(self.begun is not None) :]
        assert [turn(work) for work in later] == sorted(turn(work) for work in later)


def turn(work: Work) -> tuple[int, int]:
    """By what those that wait are ordered: the more urgent first, then as they came."""
    return work.context.priority, work.arrival


def insert_by_turn(queue: deque[WorkT], work: WorkT, *, behind: int = 0) -> None:
    """Before everything whose turn is after that of `work`, but behind the first `behind`."""
    place = len(queue)
    while place > behind and turn(queue[place - 1]) > turn(work):
        place -= 1
    queue.insert(place, work)
