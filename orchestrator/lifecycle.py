"""The life of one request: its states, what may happen to it, and what follows. All that decides it is in this file.

Pure: events in, effects out, no clock, no sockets, no tasks. It knows fences and outputs; it knows nothing of nodes but
the life that an attempt was sent to, and nothing of how effects are carried out (`dispatcher.py` does).

Invariants:
- A terminal state is entered once, with exactly one of Finish, Fail and Cancel, and exactly one ReleaseSlot.
- Whatever has no row in TRANSITIONS, and every message of an attempt that is not the current one, is a `Refused`: it
  changes nothing and is counted. A late message is normal, so it is never an exception.
- An attempt that is abandoned while its node may still work on it is followed by one SendAbort.
- Before the first token there are at most `max_attempts`. A request that has delivered tokens goes on elsewhere as long
  as its time lasts: what bounds it is its deadline, and `WaitOver` while there is nobody to go to.
- A request under which nodes have died (`casualties.py`) is tried no more.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import assert_never

from orchestrator.casualties import Casualties
from orchestrator.request_events import (
    Admitted,
    AttemptFailed,
    Cancel,
    Choose,
    ClientGone,
    Complete,
    DeadlinePassed,
    Deed,
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
    Routed,
    SendAbort,
    Shed,
    ShuttingDown,
    StoppedEarly,
    Unroutable,
    Wait,
    WaitOver,
)
from pipelines.types.status import GenerationStatus
from pronghorn.errors import (
    DeadlineExceeded,
    EngineDied,
    InsufficientBlocks,
    NodeLost,
    NodeRefused,
    Overloaded,
    PoisonRequest,
    PronghornError,
    Unavailable,
)
from pronghorn.ids import Fence, Incarnation, RequestID


class RequestState(Enum):
    QUEUED = "queued"  # accepted, waits for a slot
    ROUTING = "routing"  # has a slot; a decode node is being chosen
    WAITING = "waiting"  # has no node and waits for one, or to see whether it has killed some
    DISPATCHED = "dispatched"  # sent to a decode node, which has said no token of it yet
    STREAMING = "streaming"  # its node delivers tokens
    FINISHED = "finished"  # the last token was delivered, or the API had all it wanted
    FAILED = "failed"  # ended in one typed error
    CANCELLED = "cancelled"  # whoever asked has gone

    @property
    def terminal(self) -> bool:
        return self in TERMINAL


TERMINAL = frozenset({RequestState.FINISHED, RequestState.FAILED, RequestState.CANCELLED})


@dataclass(frozen=True)
class Refused:
    """The event changed nothing. `reason` is a bounded word, fit for a counter's name."""

    event: Event
    state: RequestState
    reason: str


Effect = Deed | Refused


# --- the table -------------------------------------------------------------------------------------------------------

_Q, _R, _W = RequestState.QUEUED, RequestState.ROUTING, RequestState.WAITING
_D, _S = RequestState.DISPATCHED, RequestState.STREAMING
_FINISHED, _FAILED, _CANCELLED = RequestState.FINISHED, RequestState.FAILED, RequestState.CANCELLED


@dataclass(frozen=True)
class Transition:
    method: str
    targets: tuple[RequestState, ...]
    """Where it may lead; the method chooses one of them."""


TRANSITIONS: dict[tuple[RequestState, type[Event]], Transition] = {
    (_Q, Admitted): Transition("_choose", (_R,)),
    (_Q, Shed): Transition("_shed", (_FAILED,)),
    (_Q, DeadlinePassed): Transition("_expire", (_FAILED,)),
    (_Q, StoppedEarly): Transition("_stop", (_FINISHED,)),
    (_Q, ClientGone): Transition("_cancel", (_CANCELLED,)),
    (_Q, ShuttingDown): Transition("_shut_down", (_FAILED,)),
    (_R, Routed): Transition("_dispatch", (_D,)),
    (_R, Unroutable): Transition("_unroutable", (_W, _FAILED)),
    (_R, Complete): Transition("_complete", (_FINISHED,)),
    (_R, DeadlinePassed): Transition("_expire", (_FAILED,)),
    (_R, StoppedEarly): Transition("_stop", (_FINISHED,)),
    (_R, ClientGone): Transition("_cancel", (_CANCELLED,)),
    (_R, ShuttingDown): Transition("_shut_down", (_FAILED,)),
    (_W, NodeHeard): Transition("_try_again", (_R, _W)),
    (_W, NodeGone): Transition("_node_gone", (_W, _FAILED)),
    (_W, MachineGone): Transition("_machine_gone", (_R, _W)),
    (_W, WaitOver): Transition("_give_up", (_FAILED,)),
    (_W, DeadlinePassed): Transition("_expire", (_FAILED,)),
    (_W, StoppedEarly): Transition("_stop", (_FINISHED,)),
    (_W, ClientGone): Transition("_cancel", (_CANCELLED,)),
    (_W, ShuttingDown): Transition("_shut_down", (_FAILED,)),
    (_D, Produced): Transition("_deliver", (_S, _FINISHED, _R, _W, _FAILED)),
    (_D, AttemptFailed): Transition("_retry_or_fail", (_R, _W, _FAILED)),
    (_D, NodeGone): Transition("_node_gone", (_R, _D, _W, _FAILED)),
    (_D, MachineGone): Transition("_machine_gone", (_D,)),
    (_D, NodeUnfit): Transition("_leave_node", (_R, _W, _FAILED)),
    (_D, NodeHeard): Transition("_clear_doubt", (_D,)),
    (_D, PrefillFailed): Transition("_note_prefill", (_D, _W, _FAILED)),
    (_D, DeadlinePassed): Transition("_expire", (_FAILED,)),
    (_D, StoppedEarly): Transition("_stop", (_FINISHED,)),
    (_D, ClientGone): Transition("_cancel", (_CANCELLED,)),
    (_D, ShuttingDown): Transition("_shut_down", (_FAILED,)),
    (_S, Produced): Transition("_deliver", (_S, _FINISHED, _R, _W, _FAILED)),
    (_S, AttemptFailed): Transition("_retry_or_fail", (_R, _W, _FAILED)),
    (_S, NodeGone): Transition("_node_gone", (_R, _S, _W, _FAILED)),
    (_S, MachineGone): Transition("_machine_gone", (_S,)),
    (_S, NodeUnfit): Transition("_leave_node", (_R, _W, _FAILED)),
    (_S, NodeHeard): Transition("_clear_doubt", (_S,)),
    (_S, PrefillFailed): Transition("_note_prefill", (_S, _W, _FAILED)),
    (_S, DeadlinePassed): Transition("_expire", (_FAILED,)),
    (_S, StoppedEarly): Transition("_stop", (_FINISHED,)),
    (_S, ClientGone): Transition("_cancel", (_CANCELLED,)),
    (_S, ShuttingDown): Transition("_shut_down", (_FAILED,)),
}


class Lifecycle:
    """The state of one request, and the only place that holds it."""

    def __init__(self, request_id: RequestID, max_attempts: int) -> None:
        self.request_id = request_id
        self.state = RequestState.QUEUED
        self.fence: Fence | None = None
        """The current attempt, from its dispatch until it ends or is given up."""
        self.casualties = Casualties()
        self._max_attempts = max_attempts
        self._delivered = False
        self._attempts = 0
        self._avoid: frozenset[Incarnation] = frozenset()
        self._last_failure: PronghornError | None = None

    def runs_on(self, incarnation: Incarnation) -> bool:
        return self.fence is not None and self.fence.incarnation == incarnation

    def concerned_by(self, incarnation: Incarnation) -> bool:
        """Whether the loss of that node means anything to it."""
        return self.runs_on(incarnation) or self.casualties.suspects(incarnation)

    def handle(self, event: Event) -> list[Effect]:
        transition = TRANSITIONS.get((self.state, type(event)))
        if transition is None:
            return [Refused(event, self.state, "terminal" if self.state.terminal else "out_of_place")]
        if self._is_late(event):
            return [Refused(event, self.state, "late")]
        step: Callable[[Event], tuple[RequestState, list[Effect]]] = getattr(self, transition.method)
        self.state, effects = step(event)
        assert self.state in transition.targets, f"{event} led {self.request_id} to {self.state}, not in the table"
        return effects

    def _is_late(self, event: Event) -> bool:
        """Whether the event speaks of another attempt, or another life of a node, than the current ones."""
        match event:
            case Produced():
                return event.delta.fence != self.fence
            case AttemptFailed() | PrefillFailed():
                return event.fence != self.fence
            case NodeGone():
                return not self.concerned_by(event.incarnation)
            case NodeUnfit():
                return not self.runs_on(event.incarnation)
            case _:
                return False

    # Each row's method: the event in, the new state and what follows out.

    def _choose(self, _: Admitted) -> tuple[RequestState, list[Effect]]:
        return _R, [Choose(self._avoid)]

    def _shed(self, event: Shed) -> tuple[RequestState, list[Effect]]:
        return self._fail(event.error)

    def _dispatch(self, event: Routed) -> tuple[RequestState, list[Effect]]:
        self._attempts += 1
        self.fence = Fence(self.request_id, self._attempts, event.incarnation)
        self.casualties.attempt_began()
        deaths = self.casualties.certain
        return _D, [Dispatch(self.fence, event.decode, event.prefill, event.only_these, deaths)]

    def _unroutable(self, event: Unroutable) -> tuple[RequestState, list[Effect]]:
        # A node that was lost may come back; one that is too small for a stream does not grow.
        outgrown = isinstance(self._last_failure, InsufficientBlocks)
        if event.reconnecting or (self._delivered and isinstance(event.error, Unavailable) and not outgrown):
            self._last_failure = self._last_failure or event.error
            return _W, [Wait()]
        # After a failed attempt, what that node said tells the client more than "nobody else is there".
        return self._fail(self._last_failure or event.error)

    def _try_again(self, event: NodeHeard) -> tuple[RequestState, list[Effect]]:
        self.casualties.heard(event.incarnation)
        self._avoid -= {event.incarnation}
        if self.casualties.poisonous:
            return _W, []
        return _R, [Choose(self._avoid)]

    def _give_up(self, _: WaitOver) -> tuple[RequestState, list[Effect]]:
        if self.casualties.poisonous:
            return self._fail(self._poison())
        return self._fail(self._last_failure or Unavailable("no decode node could go on with the request"))

    def _complete(self, event: Complete) -> tuple[RequestState, list[Effect]]:
        return _FINISHED, [DeliverEnd(event.status), Finish(), ReleaseSlot()]

    def _deliver(self, event: Produced) -> tuple[RequestState, list[Effect]]:
        self._delivered = self._delivered or bool(event.delta.tokens)
        fresh_tokens = len(event.delta.tokens) if event.fresh_tokens is None else event.fresh_tokens
        self.casualties.delivered(fresh_tokens, event.delta.choice)
        match event.delta.status:
            case GenerationStatus.ACTIVE:
                return _S, [Deliver(event.delta)]
            case GenerationStatus.END_OF_SEQUENCE | GenerationStatus.MAXIMUM_LENGTH:
                self.fence = None
                return _FINISHED, [Deliver(event.delta), Finish(), ReleaseSlot()]
            case GenerationStatus.CANCELLED:  # not by us: an abandoned attempt is no longer current
                return self._end_attempt(NodeRefused("the decode node cancelled the request"))
            case _:
                assert_never(event.delta.status)

    def _retry_or_fail(self, event: AttemptFailed) -> tuple[RequestState, list[Effect]]:
        if isinstance(event.error, EngineDied):
            self.casualties.died(event.fence.incarnation)
        return self._end_attempt(event.error)

    def _node_gone(self, event: NodeGone) -> tuple[RequestState, list[Effect]]:
        if event.died:
            self.casualties.lost(event.incarnation)
        if self.runs_on(event.incarnation):
            return self._end_attempt(NodeLost(f"the decode node was lost: {event.reason}"))
        return self._unless_poison()

    def _machine_gone(self, event: MachineGone) -> tuple[RequestState, list[Effect]]:
        in_doubt = self.state is _W and self.casualties.poisonous
        self.casualties.machine_lost(event.lives)
        if in_doubt and not self.casualties.poisonous:
            return _R, [Choose(self._avoid)]
        return self.state, []

    def _leave_node(self, event: NodeUnfit) -> tuple[RequestState, list[Effect]]:
        """Its node may never go on: what it still says of the attempt is late from here on."""
        aborted = self.fence
        assert aborted is not None
        state, effects = self._end_attempt(NodeLost("the decode node became unhealthy"))
        return state, [SendAbort(aborted), *effects]

    def _clear_doubt(self, event: NodeHeard) -> tuple[RequestState, list[Effect]]:
        self.casualties.heard(event.incarnation)
        return self.state, []

    def _note_prefill(self, event: PrefillFailed) -> tuple[RequestState, list[Effect]]:
        if isinstance(event.error, EngineDied):
            self.casualties.died(event.prefill)
        elif isinstance(event.error, NodeLost) and event.error.code == NodeLost.default_code:
            self.casualties.suspect(event.prefill)
            if not event.session_up:
                self.casualties.lost(event.prefill)
        return self._unless_poison()

    def _unless_poison(self) -> tuple[RequestState, list[Effect]]:
        if not self.casualties.poisonous:
            return self.state, []
        if self.casualties.certainly_poisonous:
            return self._fail(self._poison())
        return self._wait_in_doubt()

    def _wait_in_doubt(self) -> tuple[RequestState, list[Effect]]:
        return _W, [*self._abandon(), Wait(in_doubt=True)]

    def _poison(self) -> PoisonRequest:
        return PoisonRequest(f"{self.casualties.count} nodes have died under the request, which is tried no more")

    def _end_attempt(self, error: PronghornError) -> tuple[RequestState, list[Effect]]:
        """The node is done with the attempt, without success: go on elsewhere, or end."""
        assert self.fence is not None
        self._avoid |= {self.fence.incarnation}
        self._last_failure = error
        self.fence = None
        if self.casualties.certainly_poisonous:
            return self._fail(self._poison())
        # A full node is no fault of the request's: another one may have room.
        elsewhere = error.retryable or isinstance(error, Overloaded)
        if not elsewhere or not (self._delivered or self._attempts < self._max_attempts):
            return self._fail(error)
        return self._wait_in_doubt() if self.casualties.poisonous else (_R, [Choose(self._avoid)])

    def _expire(self, _: DeadlinePassed) -> tuple[RequestState, list[Effect]]:
        return self._fail(DeadlineExceeded(f"the request's deadline passed while it was {self.state.value}"))

    def _shut_down(self, _: ShuttingDown) -> tuple[RequestState, list[Effect]]:
        return self._fail(Unavailable("the orchestrator is shutting down"))

    def _stop(self, _: StoppedEarly) -> tuple[RequestState, list[Effect]]:
        return _FINISHED, [*self._abandon(), Finish(), ReleaseSlot()]

    def _cancel(self, _: ClientGone) -> tuple[RequestState, list[Effect]]:
        return _CANCELLED, [*self._abandon(), Cancel(), ReleaseSlot()]

    def _fail(self, error: PronghornError) -> tuple[RequestState, list[Effect]]:
        return _FAILED, [*self._abandon(), Fail(error), ReleaseSlot()]

    def _abandon(self) -> list[Effect]:
        """Give up the current attempt, where there is one: its node may still be at work."""
        fence, self.fence = self.fence, None
        return [] if fence is None else [SendAbort(fence)]


def diagram() -> str:
    """The table as a mermaid state diagram; `docs/lifecycle.md` holds this text."""
    edges: dict[tuple[RequestState, RequestState], list[str]] = {}
    for (state, event), transition in TRANSITIONS.items():
        for target in transition.targets:
            edges.setdefault((state, target), []).append(event.__name__)
    lines = ["stateDiagram-v2", f"    [*] --> {_Q.value}"]
    lines += [f"    {a.value} --> {b.value}: {', '.join(events)}" for (a, b), events in edges.items()]
    lines += [f"    {state.value} --> [*]" for state in RequestState if state.terminal]
    return "\n".join(lines) + "\n"
