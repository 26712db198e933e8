"""A scheduler and the canary, stepped by hand on a manual clock: the engine of plays without threads.

`check()` runs after every command and every step, and the canary checks every block that it reads.
"""

from typing import TypeVar

from kvcache.block import BlockCopy
from pipelines.runtime.config import EngineConfig
from pipelines.runtime.messages import EngineCommand, EngineEvent, Failed, TokenDelta
from pipelines.runtime.request_failures import RequestFailures
from pipelines.types.batch import TextGenerationInputs
from pipelines.types.text_context import TextContext
from pipelines.types.text_output import TextGenerationOutput
from pronghorn.errors import PronghornError
from pronghorn.ids import Fence, Incarnation, RequestID
from tests.fakes.canary_engine import NewScheduler, canary_caches, canary_memory, canary_pipelines
from tests.fakes.canary_pipeline import CanaryPipeline

EventT = TypeVar("EventT")
MAX_STEPS = 2000


def fence(name: str, attempt: int = 1, incarnation: str = "a" * 32) -> Fence:
    return Fence(RequestID(name), attempt, Incarnation(incarnation))


class EnginePlay:
    def __init__(self, config: EngineConfig, new_scheduler: NewScheduler) -> None:
        self.config = config
        self.memory = canary_memory(config)
        caches, hasher = canary_caches(config)
        self.scheduler = new_scheduler(config, caches, hasher)
        self.pipelines = canary_pipelines(config, self.memory, self.scheduler)
        """One a replica."""
        self.copies: list[BlockCopy] = []
        """Everything so far, as are the two below."""
        self.now_s = 0.0
        self.events: list[EngineEvent] = []
        self.plans: list[list[list[tuple[str, int]]]] = []
        """Of each step and replica: whose window was computed, and how long it was."""
        self.batches: list[TextGenerationInputs[TextContext]] = []

    def send(self, *commands: EngineCommand) -> list[EngineEvent]:
        """Give commands; the events that they caused."""
        for command in commands:
            self.scheduler.handle(command, self.now_s)
            self._copy_blocks()
            self.scheduler.check()
        return self._take()

    def sweep(self, after_s: float) -> list[EngineEvent]:
        self.now_s += after_s
        self.scheduler.sweep(self.now_s)
        self._copy_blocks()
        self.scheduler.check()
        return self._take()

    def step(self) -> list[EngineEvent] | None:
        """One step; the events that it caused, None where there was nothing to compute."""
        batch = self.scheduler.next_batch(self.now_s)
        if batch is None:
            self.scheduler.check()
            self._take()
            return None
        if self.config.enable_chunked_prefill:
            assert max(batch.per_replica_input_tokens) <= self.config.max_batch_input_tokens
        self.batches.append(batch)
        self.plans.append([[(c.request_id.value, c.tokens.active_length) for c in part] for part in batch.batches])
        outputs: dict[RequestID, TextGenerationOutput] = {}
        failures: dict[RequestID, PronghornError] = {}
        for pipeline, contexts in zip(self.pipelines, batch.batches, strict=True):
            try:
                outputs |= pipeline.execute(TextGenerationInputs([contexts])) if contexts else {}
            except RequestFailures as error:
                outputs |= error.outputs
                failures |= error.failures
        self.scheduler.complete(batch, outputs, failures, self.now_s)
        self._copy_blocks()
        self.scheduler.check()
        return self._take()

    def run(self) -> list[EngineEvent]:
        """Step until nothing is left to compute; the events of it all."""
        before = len(self.events)
        for _ in range(MAX_STEPS):
            if self.step() is None:
                return self.events[before:]
        raise AssertionError(f"still computing after {MAX_STEPS} steps")

    def _copy_blocks(self) -> None:
        for copy in self.scheduler.take_copies():
            self.memory.copy(copy.source, copy.destination)
            self.copies.append(copy)

    def _take(self) -> list[EngineEvent]:
        events = self.scheduler.take_events()
        self.events += events
        return events

    @property
    def pipeline(self) -> CanaryPipeline:
        """The only one."""
        (pipeline,) = self.pipelines
        return pipeline

    # --- reading what came out ---------------------------------------------------------------------------------------

    def tokens_of(self, wanted: Fence) -> list[int]:
        deltas = [event for event in self.events if isinstance(event, TokenDelta) and event.fence == wanted]
        return [token for delta in deltas for token in delta.tokens]

    def last_word_of(self, wanted: Fence) -> TokenDelta | Failed:
        """Of a fence that has ended, once, with nothing after it."""
        said = [event for event in self.events if event.fence == wanted]
        last = [
            event
            for event in said
            if isinstance(event, Failed) or (isinstance(event, TokenDelta) and event.status.is_done)
        ]
        assert len(last) == 1 and said[-1] is last[0], f"{wanted} said {said}"
        return last[0]

    def only(self, event_type: type[EventT]) -> EventT:
        found = [event for event in self.events if isinstance(event, event_type)]
        assert len(found) == 1, f"{len(found)} {event_type.__name__} in {self.events}"
        return found[0]
