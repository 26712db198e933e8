"""One request on its way: its lifecycle, how far it has come, and what waits for its consumer.

It decides nothing. Outputs wait in a queue for a consumer that may be slow; it is bounded by the request's own
`max_length`, and a consumer that stands still is ended by the request's deadline.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass

from orchestrator.lifecycle import Lifecycle
from orchestrator.ports import GenerationJob
from orchestrator.progress import Progress
from orchestrator.prompt_keys import PromptBlocks
from pipelines.types.text_output import TextGenerationOutput
from pronghorn.errors import PronghornError
from pronghorn.ids import Incarnation, RequestID
from pronghorn.ledger import Held, Kind


@dataclass
class HandOver:
    """What is predicted of one, and when its first token came: from the gap to the next one links are learned."""

    decode: Incarnation
    moved_bytes: float
    compute_s: float
    first_at_s: float | None = None


class Flight:
    def __init__(self, job: GenerationJob, max_attempts: int, since_s: float) -> None:
        self.job = job
        self.since_s = since_s
        self.request_id: RequestID = job.context.request_id
        self.lifecycle = Lifecycle(self.request_id, max_attempts)
        self.progress = Progress(job.context)
        self.timer: asyncio.TimerHandle | None = None
        self.wait_timer: asyncio.TimerHandle | None = None
        self.blocks: PromptBlocks | None = None
        self.computes: Incarnation | None = None
        """Which node was given the prompt to compute, in the current attempt."""
        self.hand_over: HandOver | None = None
        """Of the current attempt, until its second output."""
        self.asked: tuple[Incarnation, ...] = ()
        """The nodes that the current attempt was sent to, or may ask."""
        self.stranded_at_s: float | None = None
        """When it first had to wait for a node, until it gets on."""
        self._outputs: deque[TextGenerationOutput] = deque()
        self._error: PronghornError | None = None
        self._changed = asyncio.Event()

    @property
    def over(self) -> bool:
        return self.lifecycle.state.terminal

    def deliver(self, output: TextGenerationOutput) -> None:
        self._outputs.append(output)
        self._changed.set()

    def end(self, error: PronghornError | None) -> None:
        self._error = error
        self._changed.set()

    def held(self, now_s: float) -> list[Held]:
        name, age_s, fence = str(self.request_id), now_s - self.since_s, self.lifecycle.fence
        rows = [Held(Kind.FLIGHT, name, age_s=age_s, note=self.lifecycle.state.value)]
        if fence is not None:
            rows.append(Held(Kind.DISPATCHED, str(fence), age_s=age_s, peer=fence.incarnation))
        if timers := sum(timer is not None for timer in (self.timer, self.wait_timer)):
            rows.append(Held(Kind.TIMER, name, timers))
        if self._outputs:
            rows.append(Held(Kind.UNREAD, name, len(self._outputs)))
        return rows

    def stop_waiting(self) -> None:
        if self.wait_timer is not None:
            self.wait_timer.cancel()
            self.wait_timer = None

    def stop_timers(self) -> None:
        self.stop_waiting()
        if self.timer is not None:
            self.timer.cancel()

    async def decided(self) -> None:
        """Wait for the first output. Raises the error that came instead."""
        await self._changed.wait()
        if not self._outputs and self._error is not None:
            raise self._error

    async def outputs(self) -> AsyncIterator[TextGenerationOutput]:
        while True:
            await self._changed.wait()
            while self._outputs:
                yield self._outputs.popleft()
            if not self.over:
                self._changed.clear()
            elif self._error is not None:
                raise self._error
            else:
                return
