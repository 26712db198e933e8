"""The life of a request, carried out: turns what happens into events for its lifecycle, and the effects into deeds.

A shell: it decides nothing. Read `Dispatcher` top to bottom: a request is accepted, driven, delivered, and let go.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import assert_never

from kvcache.connector import HintOutcome, read_hint
from orchestrator.admission import Turn
from orchestrator.config import OrchestratorConfig
from orchestrator.explanation import Explanations, RequestRecord
from orchestrator.flight import Flight
from orchestrator.gate import Gate
from orchestrator.holdings import Holdings
from orchestrator.lifecycle import Effect, Refused, RequestState
from orchestrator.nodes import Nodes
from orchestrator.placement import Placement
from orchestrator.ports import GenerationJob, Sessions
from orchestrator.request_events import (
    Admitted,
    AttemptFailed,
    Cancel,
    Choose,
    ClientGone,
    DeadlinePassed,
    Deliver,
    DeliverEnd,
    Dispatch,
    Event,
    Fail,
    Finish,
    MachineGone,
    NodeGone,
    NodeHeard,
    NodeUnfit,
    PrefillFailed,
    Produced,
    ReleaseSlot,
    SendAbort,
    Shed,
    ShuttingDown,
    StoppedEarly,
    Wait,
    WaitOver,
)
from orchestrator.routing.speeds import LearnedSpeeds
from pipelines.types.frames import (
    Abort,
    BlockEvents,
    Delta,
    DropPrefixCache,
    Heartbeat,
    NodeFrame,
    NodeReport,
    Outputs,
    Pulled,
    ResendBlocks,
    Submit,
)
from pipelines.types.text_output import TextGenerationOutput
from pronghorn.clock import Clock
from pronghorn.counters import Counters
from pronghorn.errors import (
    InternalError,
    InvalidRequest,
    NodeLost,
    Overloaded,
    PronghornError,
    RequestInProgress,
    Unavailable,
    from_record,
)
from pronghorn.ids import Fence, Incarnation, RequestID
from pronghorn.ledger import Held

log = logging.getLogger(__name__)


class Dispatcher:
    """Implements `ports.Generator` and `ports.SessionListener`."""

    def __init__(
        self,
        *,
        gate: Gate,
        placement: Placement,
        holdings: Holdings,
        speeds: LearnedSpeeds,
        explanations: Explanations,
        nodes: Nodes,
        sessions: Sessions,
        clock: Clock,
        counters: Counters,
        config: OrchestratorConfig,
    ) -> None:
        self._gate = gate
        self._placement = placement
        self._holdings = holdings
        self._speeds = speeds
        self._explanations = explanations
        self._nodes = nodes
        self._sessions = sessions
        self._clock = clock
        self._counters = counters
        self._config = config
        self._flights: dict[RequestID, Flight] = {}
        self._keys: dict[str, Flight] = {}
        self._uneasy: dict[RequestID, Flight] = {}
        """Those that hearing of a node could help: they wait for one, or are in doubt about one."""
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
        flight = Flight(job, self._config.max_attempts, self._clock.now_s())
        retry_after_s = self._config.retry_after_s
        if self._draining:
            raise Unavailable("the orchestrator is shutting down", retry_after_s=retry_after_s)
        if job.key is not None and job.key in self._keys:
            self._counters.count("request_repeated")
            raise RequestInProgress(
                f"a request with the X-Request-ID of {job.key!r} is still running",
                param="X-Request-ID",
                retry_after_s=retry_after_s,
            )
        if flight.request_id in self._flights:
            raise InvalidRequest(f"request_id {flight.request_id} is in flight already", param="request_id")
        left_s = job.deadline.require(self._clock.now_s(), "it was being accepted")
        turn = self._gate.enter(job)
        self._flights[flight.request_id] = flight
        if job.key is not None:
            self._keys[job.key] = flight
        self._idle.clear()
        flight.timer = asyncio.get_running_loop().call_later(left_s, self._post, flight, DeadlinePassed())
        self._counters.count("request_accepted")
        self._note_hint(job)
        self._explanations.accepted(_record(job), self._clock.now_s())
        if flight.request_id not in turn.granted and (patience_s := self._gate.waits_s(job)) < left_s:
            flight.wait_timer = asyncio.get_running_loop().call_later(patience_s, self._overdue, flight)
        self._follow(turn)
        return flight

    def _follow(self, turn: Turn) -> None:
        """What admission has decided becomes events of those whom it concerns."""
        for request_id in turn.granted:
            self._flights[request_id].stop_waiting()
            self._post(self._flights[request_id], Admitted())
        for request_id, refusal in turn.dismissed:
            self._post(self._flights[request_id], Shed(self._gate.refused(refusal)))

    def _overdue(self, flight: Flight) -> None:
        self._follow(self._gate.overdue(flight.request_id))

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
                for pulled in frame.pulls:
                    self._on_pulled(pulled)
                for delta in frame.deltas:
                    if flight := self._flight_of(delta.fence.request_id):
                        if delta.fetched_bytes and delta.fence == flight.lifecycle.fence:
                            self._explanations.fetched(flight.request_id, delta.fetched_bytes)
                        self._post(flight, self._produced(flight, delta))
                for failure in frame.failures:
                    if flight := self._flight_of(failure.fence.request_id):
                        self._post(flight, AttemptFailed(failure.fence, from_record(failure.error)))
            case BlockEvents():
                if self._holdings.events(incarnation, frame, self._clock.now_s()):
                    self._ask_for_blocks(incarnation)
            case Heartbeat():
                pass  # see on_heartbeat
            case _:
                assert_never(frame)

    def _produced(self, flight: Flight, delta: Delta) -> Produced | AttemptFailed:
        if delta.fence != flight.lifecycle.fence:
            return Produced(delta)  # late: the lifecycle refuses it
        if flight.progress.diverges(delta):
            self._counters.count("replay_diverged")
            self._abort(delta.fence)
            return AttemptFailed(delta.fence, InternalError("a node said another text than the one before it"))
        return Produced(delta, flight.progress.fresh(delta))

    def _on_pulled(self, pulled: Pulled) -> None:
        flight = self._flights.get(pulled.fence.request_id)
        self._placement.pulled(pulled, flight)
        if flight is None or flight.lifecycle.fence == pulled.fence:
            self._explanations.moved(pulled.fence.request_id, pulled.moved_bytes)
        if flight is not None and pulled.error is not None:
            session_up = self._nodes.session_up(pulled.prefill)
            self._post(flight, PrefillFailed(pulled.fence, pulled.prefill, from_record(pulled.error), session_up))

    def on_heartbeat(self, report: NodeReport) -> None:
        incarnation = report.incarnation
        self._speeds.heartbeat(report)
        self._follow(self._gate.look())
        if self._holdings.heartbeat(report, self._clock.now_s()):
            self._ask_for_blocks(incarnation)
        if not report.healthy:
            for flight in list(self._flights.values()):
                if flight.lifecycle.runs_on(incarnation):
                    self._post(flight, NodeUnfit(incarnation))
            return
        if not self._uneasy:
            return
        usable = report.role == "decode" and self._nodes.usable(incarnation, self._clock.now_s())
        for flight in list(self._uneasy.values()):
            waiting = flight.lifecycle.state is RequestState.WAITING
            if (usable and waiting) or flight.lifecycle.casualties.any_doubt:
                self._post(flight, NodeHeard(incarnation))

    def on_lost(self, incarnation: Incarnation, reason: str, died: bool) -> None:
        self._nodes.failed(incarnation, self._clock.now_s())
        self._holdings.lost(incarnation)
        self._speeds.forget(incarnation)
        if lives := self._nodes.machine_gone(incarnation):
            for flight in list(self._flights.values()):
                if flight.lifecycle.casualties.any_of(lives):
                    self._post(flight, MachineGone(lives))
        for flight in list(self._flights.values()):
            if flight.lifecycle.concerned_by(incarnation):
                self._post(flight, NodeGone(incarnation, reason, died))

    def _ask_for_blocks(self, incarnation: Incarnation) -> None:
        with suppress(NodeLost, Overloaded):  # it is asked again with a later frame
            self._sessions.send(incarnation, ResendBlocks())

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
        lifecycle = flight.lifecycle
        before, state = lifecycle.fence, lifecycle.state
        effects = lifecycle.handle(event)
        if before is not None and not any(isinstance(effect, Refused) for effect in effects):
            self._placement.note(before.incarnation, state, event)
        if before is not None and lifecycle.fence != before:
            self._placement.ended(flight, before)
            if isinstance(event, AttemptFailed | NodeGone | NodeUnfit):
                self._explanations.attempt_ended(flight.request_id, type(event).__name__)
        if state is RequestState.DISPATCHED and lifecycle.state is not state:
            self._placement.computed(flight)
        if lifecycle.state is RequestState.STREAMING and state is not lifecycle.state:
            self._follow(self._gate.started(flight.request_id))
        if lifecycle.state is RequestState.WAITING or (lifecycle.casualties.any_doubt and not flight.over):
            self._uneasy[flight.request_id] = flight
        else:
            self._uneasy.pop(flight.request_id, None)
        for effect in effects:
            self._perform(flight, effect)

    def _perform(self, flight: Flight, effect: Effect) -> None:
        match effect:
            case Choose():
                self._post(flight, self._placement.choose(flight, effect))
            case Dispatch():
                self._dispatch(flight, effect)
            case SendAbort():
                self._abort(effect.fence)
            case Wait():
                self._wait(flight, effect.in_doubt)
            case Deliver():
                if (output := flight.progress.take(effect.delta)) is not None:
                    flight.stranded_at_s = None
                    self._gate.delivered(flight.request_id, len(output.tokens))
                    self._explanations.delivered(flight.request_id, output, self._clock.now_s())
                    self._placement.delivered(flight)
                    flight.deliver(output)
            case DeliverEnd():
                flight.deliver(
                    TextGenerationOutput(request_id=flight.request_id, tokens=[], final_status=effect.status)
                )
            case Finish() | Cancel():
                if isinstance(effect, Finish):
                    self._speeds.ended(flight.progress.said_tokens)
                self._counters.count("request_ended", flight.lifecycle.state.value)
                self._explain_end(flight, None)
                flight.end(None)
            case Fail():
                self._counters.count("request_failed", effect.error.code)
                self._explain_end(flight, effect.error)
                flight.end(self._with_retry_after(effect.error))
            case ReleaseSlot():
                self._release(flight)
            case Refused():
                self._counters.count("message_refused", effect.reason)
                log.info("%s refused a %s (%s)", flight.request_id, type(effect.event).__name__, effect.reason)
            case _:
                assert_never(effect)

    def _dispatch(self, flight: Flight, effect: Dispatch) -> None:
        fence = effect.fence
        if fence.attempt > 1:
            self._counters.count("request_retried")
            log.warning("%s goes to %s after an attempt that failed", fence, effect.decode)
        if flight.progress.begun:
            self._counters.count("stream_migrated")
        flight.stop_waiting()
        self._placement.sent(flight, effect)
        submit = Submit(
            fence=fence,
            context=flight.progress.context(),
            budget_s=flight.job.deadline.remaining_s(self._clock.now_s()),
            prefill=list(effect.prefill),
            only_these=effect.only_these,
            key=flight.job.key,
            deaths=effect.deaths,
        )
        try:
            self._sessions.send(fence.incarnation, submit)
        except PronghornError as error:
            self._post(flight, AttemptFailed(fence, error))

    def _abort(self, fence: Fence) -> None:
        with suppress(NodeLost):
            self._sessions.send(fence.incarnation, Abort(fence))

    def _wait(self, flight: Flight, in_doubt: bool) -> None:
        now_s = self._clock.now_s()
        if flight.stranded_at_s is None:
            flight.stranded_at_s = now_s
            self._counters.count("stream_stranded" if flight.progress.begun else "request_stranded")
        config = self._config
        bound_s = config.migration_wait_s if flight.progress.begun else config.reconnect_wait_s
        until_s = now_s + config.reconnect_wait_s if in_doubt else flight.stranded_at_s + bound_s
        flight.stop_waiting()
        left_s = max(0.0, until_s - now_s)
        flight.wait_timer = asyncio.get_running_loop().call_later(left_s, self._post, flight, WaitOver())

    def _explain_end(self, flight: Flight, error: PronghornError | None) -> None:
        outcome, code = flight.lifecycle.state.value, None if error is None else error.code
        self._explanations.ended(flight.request_id, outcome, code, self._clock.now_s())

    def _release(self, flight: Flight) -> None:
        flight.stop_timers()
        del self._flights[flight.request_id]
        if flight.job.key is not None:
            del self._keys[flight.job.key]
        if not self._flights:
            self._idle.set()
        self._follow(self._gate.leave(flight.request_id))

    def _with_retry_after(self, error: PronghornError) -> PronghornError:
        if error.retry_after_s is None and error.http_status in (429, 503):
            error.retry_after_s = self._config.retry_after_s
        return error

    # --- the whole ---

    def held(self) -> list[Held]:
        now_s = self._clock.now_s()
        return [row for flight in self._flights.values() for row in flight.held(now_s)] + self._gate.held()

    def in_flight(self) -> int:
        return len(self._flights)

    def gauges(self) -> dict[str, int]:
        """Of the queue, and of who runs."""
        return self._gate.gauges()

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
        self._gate.check()
        assert self._gate.here == len(self._flights)
        assert self._idle.is_set() == (not self._flights)


def _record(job: GenerationJob) -> RequestRecord:
    return RequestRecord(
        request_id=str(job.context.request_id),
        model=job.model,
        prompt_tokens=len(job.context.tokens),
        session=job.session,
        target_endpoint=job.target_endpoint,
    )
