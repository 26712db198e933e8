"""What the engine loop asks of a scheduler. Pure and synchronous: time is passed in, events are taken out.

A scheduler owns the block pools and decides what each step computes. It never waits, and it never touches block bytes:
it orders copies, and leaves them to the loop. Between `next_batch` and the `complete` of that batch nothing else is
called.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvcache.block import BlockCopy
from kvcache.journal import CacheChange
from pipelines.runtime.messages import EngineCommand, EngineEvent, EngineLoad, HoldEvent
from pipelines.types.batch import TextGenerationInputs
from pipelines.types.text_context import TextContext
from pipelines.types.text_output import TextGenerationOutput
from pronghorn.errors import PronghornError
from pronghorn.ids import RequestID
from pronghorn.ledger import Held

Batch = TextGenerationInputs[TextContext]


class Scheduler(Protocol):
    def handle(self, command: EngineCommand, now_s: float) -> None:
        """Take one command, never `Stop`, which is the loop's. Unknown fences are harmless: the word may be late."""

    def sweep(self, now_s: float) -> None:
        """Fail what has passed its deadline."""

    def next_batch(self, now_s: float) -> Batch | None:
        """What the next step computes, with blocks in place for it; None where there is nothing to compute."""

    def complete(
        self,
        batch: Batch,
        outputs: Mapping[RequestID, TextGenerationOutput],
        failures: Mapping[RequestID, PronghornError],
        now_s: float,
    ) -> None:
        """`batch` was computed: its contexts are updated, save those in `failures`."""

    def take_copies(self) -> list[BlockCopy]:
        """What `handle`, `sweep` or `complete` has ordered. To be made in this order, right after that call: the blocks
        copied into count as cached already."""

    @property
    def has_events(self) -> bool:
        """Whether `take_events` would give any, or a hold was answered."""

    def take_events(self) -> list[EngineEvent]:
        """What happened since the last call, in order."""

    def take_hold_events(self) -> list[HoldEvent]:
        """What is to be said of the shell's own holds since the last call, in order."""

    def take_cache_changes(self) -> list[CacheChange]:
        """What can be found in the pools since the last call, and what cannot any more, in order."""

    def take_ended(self) -> list[RequestID]:
        """Requests that ended since the last call; the pipeline may forget them."""

    def table(self, owner: RequestID) -> Sequence[int]:
        """Block ids of a request of the batch, in position order: the pipeline's `BlockTables`."""

    def load(self) -> EngineLoad: ...

    def held(self, now_s: float) -> list[Held]:
        """Every attempt, its blocks, and blocks that no attempt has: a pass over everything that is held."""

    @property
    def has_work(self) -> bool:
        """Whether any request waits for blocks or for a step."""

    def check(self) -> None:
        """AssertionError where an invariant is broken. For tests and for debugging; costs a pass over everything."""
