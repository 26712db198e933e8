"""The life of a request, carried out: turns what happens into events for its lifecycle, and the effects into deeds.

A shell: it decides nothing. Read `Dispatcher` top to bottom: a request is accepted, driven, delivered, and let go.

Outputs wait in a queue per request for a consumer that may be slow; it is bounded by the request's own `max_length`,
and a consumer that stands still is ended by the request's deadline.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import assert_never

from kvcache.connector import HintOutcome, read_hint
from orchestrator.admission import Admission
from orchestrator.lifecycle import (
    Admitted,
    AttemptFailed,
    Cancel,
    Choose,
    ClientGone,
    DeadlinePassed,
    Deliver,
    Dispatch,
    Effect,
    Event,
    Fail,
    Finish,
    Lifecycle,
    NodeGone,
    Produced,
    Refused,
    ReleaseSlot,
    Routed,
    SendAbort,
    ShuttingDown,
    StoppedEarly,
    Unroutable,
)
from orchestrator.nodes import Nodes
from orchestrator.ports import GenerationJob, Sessions
from orchestrator.routing import RequestFacts, Router
from pipelines.types.frames import Abort, BlockEvents, Delta, DropPrefixCache, Heartbeat, NodeFrame, Outputs, Submit
from pipelines.types.text_output import TextGenerationOutput
from pronghorn.clock import Clock
from pronghorn.counters import Counters
from pronghorn.errors import InvalidRequest, NodeLost, Overloaded, PronghornError, Unavailable, from_record
from pronghorn.ids import Incarnation, RequestID
from pronghorn.ledger import Held, Kind

log = logging.getLogger(__name__)


class Flight:
    """One request on its way: its lifecycle, and what waits for its consumer."""

    def __init__(self, job: GenerationJob, max_attempts: int, since_s: float) -> None:
        self.job = job
        self.since_s = since_s
        self.request_id: RequestID = job.context.request_id
        self.lifecycle = Lifecycle(self.request_id, max_attempts)
        self.timer: asyncio.TimerHandle | None = None
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
        if self.timer is not None:
            rows.append(Held(Kind.TIMER, name))
        if self._outputs:
            rows.append(Held(Kind.UNREAD, name, len(self._outputs)))
        return rows

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


class Dispatcher:
    """Implements `ports.Generator` and `ports.SessionListener`."""

    def __init__(
        self,
        *,
        admission: Admission,
        router: Router,
        nodes: Nodes,
        sessions: Sessions,
        clock: Clock,
        counters: Counters,
        max_attempts: int,
        retry_after_s: float,
    ) -> None:
        self._admission = admission
        self._router = router
        self._nodes = nodes
        self._sessions = sessions
        self._clock = clock
        self._counters = counters
        self._max_attempts = max_attempts
        self._retry_after_s = retry_after_s
        self._flights: dict[RequestID, Flight] = {}
        self._events: deque[tuple[Flight, Event]] = deque()
        self._handling = False
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    # --- a request ---

    @asynccontextmanager
    async def generate(self, job: GenerationJob) -> AsyncIterator[AsyncIterator[TextGenerationOutput]]:
        flight = self._accept(job)
        try:
            await flight.decided()
            yield flight.outputs()
        except BaseException:
            self._leave(flight, ClientGone())
            raise
        self._leave(flight, StoppedEarly())

    def _accept(self, job: GenerationJob) -> Flight:
        flight = Flight(job, self._max_attempts, self._clock.now_s())
        if self._draining:
            raise Unavailable("the orchestrator is shutting down", retry_after_s=self._retry_after_s)
        if flight.request_id in self._flights:
            raise InvalidRequest(f"request_id {flight.request_id} is in flight already", param="request_id")
        left_s = job.deadline.require(self._clock.now_s(), "it was being accepted")
        if reason := self._admission.can_admit():
            self._counters.count("request_overloaded")
            raise Overloaded(reason, retry_after_s=self._retry_after_s)
        self._flights[flight.request_id] = flight
        self._idle.clear()
        flight.timer = asyncio.get_running_loop().call_later(left_s, self._post, flight, DeadlinePassed())
        self._counters.count("request_accepted")
        self._note_hint(job)
        if self._admission.enter(flight.request_id):
            self._post(flight, Admitted())
        return flight

    def _note_hint(self, job: GenerationJob) -> None:
        """The node's connector is who reads the hint; here it is only counted that it can be of no use there."""
        if job.hint is not None:
            job.context.external_block_metadata = job.hint
        outcome, _ = read_hint(job.hint, self._nodes.names())
        if outcome not in (HintOutcome.ABSENT, HintOutcome.USABLE):
            self._counters.count("cache_hint_miss", outcome.value)

    def _leave(self, flight: Flight, event: Event) -> None:
        if not flight.over:
            self._post(flight, event)

    # --- what nodes say ---

    def on_frame(self, incarnation: Incarnation, frame: NodeFrame) -> None:
        match frame:
            case Outputs():
                for delta in frame.deltas:
                    if flight := self._flight_of(delta.fence.request_id):
                        self._post(flight, Produced(delta))
                for failure in frame.failures:
                    if flight := self._flight_of(failure.fence.request_id):
                        self._post(flight, AttemptFailed(failure.fence, from_record(failure.error)))
            case Heartbeat() | BlockEvents():
                pass  # membership has taken what the first says; the second is for an index
            case _:
                assert_never(frame)

    def on_lost(self, incarnation: Incarnation, reason: str) -> None:
        for flight in list(self._flights.values()):
            fence = flight.lifecycle.fence
            if fence is not None and fence.incarnation == incarnation:
                self._post(flight, NodeGone(incarnation, reason))

    def _flight_of(self, request_id: RequestID) -> Flight | None:
        flight = self._flights.get(request_id)
        if flight is None:
            self._counters.count("message_refused", "ended")
        return flight

    # --- events in, deeds out ---

    def _post(self, flight: Flight, event: Event) -> None:
        """Handle the event, and every event that follows from it, before returning.

        A queue rather than recursion: one request's end can start the next one, which can fail at once, and so on.
        """
        self._events.append((flight, event))
        if self._handling:
            return
        self._handling = True
        try:
            while self._events:
                self._handle(*self._events.popleft())
        finally:
            self._handling = False

    def _handle(self, flight: Flight, event: Event) -> None:
        before = flight.lifecycle.fence
        effects = flight.lifecycle.handle(event)
        if before is not None and flight.lifecycle.fence != before:
            self._nodes.ended(before.incarnation)
        for effect in effects:
            self._perform(flight, effect)

    def _perform(self, flight: Flight, effect: Effect) -> None:
        match effect:
            case Choose():
                self._post(flight, self._choose(flight, effect))
            case Dispatch():
                self._dispatch(flight, effect)
            case SendAbort():
                with suppress(NodeLost):
                    self._sessions.send(effect.fence.incarnation, Abort(effect.fence))
            case Deliver():
                flight.deliver(_output(effect.delta))
            case Finish() | Cancel():
                self._counters.count("request_ended", flight.lifecycle.state.value)
                flight.end(None)
            case Fail():
                self._counters.count("request_failed", effect.error.code)
                flight.end(self._with_retry_after(effect.error))
            case ReleaseSlot():
                self._release(flight)
            case Refused():
                self._counters.count("message_refused", effect.reason)
                log.info("%s refused a %s (%s)", flight.request_id, type(effect.event).__name__, effect.reason)
            case _:
                assert_never(effect)

    def _choose(self, flight: Flight, effect: Choose) -> Routed | Unroutable:
        facts = RequestFacts(
            model=flight.job.model,
            prompt_tokens=flight.job.context.tokens.prompt_length,
            target_endpoint=flight.job.target_endpoint,
            avoid=effect.avoid,
        )
        try:
            route = self._router.choose(facts, self._nodes.views(self._clock.now_s()))
        except PronghornError as error:
            return Unroutable(error)
        return Routed(route.decode.name, route.decode.incarnation, route.prefill, route.only_these)

    def _dispatch(self, flight: Flight, effect: Dispatch) -> None:
        fence = effect.fence
        if fence.attempt > 1:
            self._counters.count("request_retried")
            log.warning("%s goes to %s after an attempt that failed", fence, effect.decode)
        budget_s = flight.job.deadline.remaining_s(self._clock.now_s())
        self._nodes.dispatched(fence.incarnation)
        try:
            self._sessions.send(
                fence.incarnation,
                Submit(fence, flight.job.context, budget_s, list(effect.prefill), effect.only_these),
            )
        except PronghornError as error:
            self._post(flight, AttemptFailed(fence, error))

    def _release(self, flight: Flight) -> None:
        if flight.timer is not None:
            flight.timer.cancel()
        del self._flights[flight.request_id]
        if not self._flights:
            self._idle.set()
        if (heir := self._admission.leave(flight.request_id)) is not None:
            self._post(self._flights[heir], Admitted())

    def _with_retry_after(self, error: PronghornError) -> PronghornError:
        if error.retry_after_s is None and error.http_status in (429, 503):
            error.retry_after_s = self._retry_after_s
        return error

    # --- the whole ---

    def held(self) -> list[Held]:
        now_s = self._clock.now_s()
        return [row for flight in self._flights.values() for row in flight.held(now_s)] + self._admission.held()

    def in_flight(self) -> int:
        return len(self._flights)

    @property
    def draining(self) -> bool:
        return self._draining

    def drop_prefix_caches(self) -> None:
        for incarnation in self._sessions.open_to():
            with suppress(NodeLost, Overloaded):  # a node that is lost has lost its cache too
                self._sessions.send(incarnation, DropPrefixCache())

    async def drain(self, grace_s: float) -> None:
        """Take no more requests, let those that are here end, and after `grace_s` fail what is left."""
        self._draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            log.warning("%d requests did not end within %.1f s; failing them", len(self._flights), grace_s)
            for flight in list(self._flights.values()):
                self._post(flight, ShuttingDown())

    def check(self) -> None:
        """Every request here holds a slot or a place in the queue, and nobody else does."""
        self._admission.check()
        assert self._admission.running + self._admission.waiting == len(self._flights)
        assert self._idle.is_set() == (not self._flights)


def _output(delta: Delta) -> TextGenerationOutput:
    return TextGenerationOutput(
        request_id=delta.fence.request_id,
        tokens=delta.tokens,
        final_status=delta.choice_status or delta.status,
        log_probabilities=delta.log_probabilities,
        num_cached_tokens=delta.num_cached_tokens,
        choice=delta.choice,
        prompt_log_probabilities=delta.prompt_log_probabilities,
    )
