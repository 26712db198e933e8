"""The life of one request: its states, what may happen to it, and what follows. All that decides it is in this file.

Pure: events in, effects out, no clock, no sockets, no tasks. It knows fences and outputs; it knows nothing of nodes but
the life that an attempt was sent to, and nothing of how effects are carried out (`dispatcher.py` does).

Invariants:
- A terminal state is entered once, with exactly one of Finish, Fail and Cancel, and exactly one ReleaseSlot.
- Whatever has no row in TRANSITIONS, and every message of an attempt that is not the current one, is a `Refused`: it
  changes nothing and is counted. A late message is normal, so it is never an exception.
- An attempt that is abandoned while its node may still work on it is followed by one SendAbort.
- Once a token has been delivered there is no further attempt.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import assert_never

from pipelines.types.frames import Delta, PrefillTarget
from pipelines.types.status import GenerationStatus
from pronghorn.errors import (
    DeadlineExceeded,
    NodeLost,
    NodeRefused,
    Overloaded,
    PronghornError,
    Unavailable,
)
from pronghorn.ids import Fence, Incarnation, NodeName, RequestID


class RequestState(Enum):
    QUEUED = "queued"  # accepted, waits for a slot
    ROUTING = "routing"  # has a slot; a decode node is being chosen
    DISPATCHED = "dispatched"  # sent to a decode node, no token yet: may still go elsewhere
    STREAMING = "streaming"  # tokens have been delivered: bound to its node
    FINISHED = "finished"  # the last token was delivered, or the API had all it wanted
    FAILED = "failed"  # ended in one typed error
    CANCELLED = "cancelled"  # whoever asked has gone

    @property
    def terminal(self) -> bool:
        return self in TERMINAL


TERMINAL = frozenset({RequestState.FINISHED, RequestState.FAILED, RequestState.CANCELLED})


# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Admitted:
    """Admission gave the request a slot."""


@dataclass(frozen=True)
class Routed:
    """The router's answer to Choose."""

    decode: NodeName
    incarnation: Incarnation
    prefill: tuple[PrefillTarget, ...] = ()
    only_these: bool = False


@dataclass(frozen=True)
class Unroutable:
    """The router's other answer to Choose."""

    error: PronghornError


@dataclass(frozen=True)
class Produced:
    """The node sent tokens, or its last word."""

    delta: Delta


@dataclass(frozen=True)
class AttemptFailed:
    """The node said no, or that it failed; or the frame could not be queued for it. Its last word on that fence."""

    fence: Fence
    error: PronghornError


@dataclass(frozen=True)
class NodeGone:
    """The session with that life of a node is over."""

    incarnation: Incarnation
    reason: str


@dataclass(frozen=True)
class DeadlinePassed:
    """The request's time budget is spent."""


@dataclass(frozen=True)
class StoppedEarly:
    """The API has all it wants, a stop string for example."""


@dataclass(frozen=True)
class ClientGone:
    """Nobody waits for the answer any more."""


@dataclass(frozen=True)
class ShuttingDown:
    """The orchestrator leaves, and its grace is over."""


Event = (
    Admitted
    | Routed
    | Unroutable
    | Produced
    | AttemptFailed
    | NodeGone
    | DeadlinePassed
    | StoppedEarly
    | ClientGone
    | ShuttingDown
)


# --- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choose:
    """Ask the router for a decode node that is none of `avoid`. Answered by Routed or Unroutable."""

    avoid: frozenset[Incarnation]


@dataclass(frozen=True)
class Dispatch:
    """Send the request to the node under this fence."""

    fence: Fence
    decode: NodeName
    prefill: tuple[PrefillTarget, ...]
    only_these: bool


@dataclass(frozen=True)
class SendAbort:
    """Tell the node that nobody waits for this fence. Best effort: a node that cannot be reached has lost it anyway."""

    fence: Fence


@dataclass(frozen=True)
class Deliver:
    delta: Delta


@dataclass(frozen=True)
class Finish:
    """Terminal: all was delivered."""


@dataclass(frozen=True)
class Fail:
    """Terminal: the one error."""

    error: PronghornError


@dataclass(frozen=True)
class Cancel:
    """Terminal: nobody to tell."""


@dataclass(frozen=True)
class ReleaseSlot:
    """Give back the slot, or the place in the queue."""


@dataclass(frozen=True)
class Refused:
    """The event changed nothing. `reason` is a bounded word, fit for a counter's name."""

    event: Event
    state: RequestState
    reason: str


Effect = Choose | Dispatch | SendAbort | Deliver | Finish | Fail | Cancel | ReleaseSlot | Refused


# --- the table -------------------------------------------------------------------------------------------------------

_Q, _R, _D, _S = RequestState.QUEUED, RequestState.ROUTING, RequestState.DISPATCHED, RequestState.STREAMING
_FINISHED, _FAILED, _CANCELLED = RequestState.FINISHED, RequestState.FAILED, RequestState.CANCELLED


@dataclass(frozen=True)
class Transition:
    method: str
    targets: tuple[RequestState, ...]
    """Where it may lead; the method chooses one of them."""


TRANSITIONS: dict[tuple[RequestState, type[Event]], Transition] = {
    (_Q, Admitted): Transition("_choose", (_R,)),
    (_Q, DeadlinePassed): Transition("_expire", (_FAILED,)),
    (_Q, StoppedEarly): Transition("_stop", (_FINISHED,)),
    (_Q, ClientGone): Transition("_cancel", (_CANCELLED,)),
    (_Q, ShuttingDown): Transition("_shut_down", (_FAILED,)),
    (_R, Routed): Transition("_dispatch", (_D,)),
    (_R, Unroutable): Transition("_unroutable", (_FAILED,)),
    (_R, DeadlinePassed): Transition("_expire", (_FAILED,)),
    (_R, StoppedEarly): Transition("_stop", (_FINISHED,)),
    (_R, ClientGone): Transition("_cancel", (_CANCELLED,)),
    (_R, ShuttingDown): Transition("_shut_down", (_FAILED,)),
    (_D, Produced): Transition("_deliver", (_S, _FINISHED, _R, _FAILED)),
    (_D, AttemptFailed): Transition("_retry_or_fail", (_R, _FAILED)),
    (_D, NodeGone): Transition("_node_gone", (_R, _FAILED)),
    (_D, DeadlinePassed): Transition("_expire", (_FAILED,)),
    (_D, StoppedEarly): Transition("_stop", (_FINISHED,)),
    (_D, ClientGone): Transition("_cancel", (_CANCELLED,)),
    (_D, ShuttingDown): Transition("_shut_down", (_FAILED,)),
    (_S, Produced): Transition("_deliver", (_S, _FINISHED, _FAILED)),
    (_S, AttemptFailed): Transition("_retry_or_fail", (_FAILED,)),
    (_S, NodeGone): Transition("_node_gone", (_FAILED,)),
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
        self._max_attempts = max_attempts
        self._attempts = 0
        self._avoid: frozenset[Incarnation] = frozenset()
        self._last_failure: PronghornError | None = None

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
            case AttemptFailed():
                return event.fence != self.fence
            case NodeGone():
                return self.fence is None or event.incarnation != self.fence.incarnation
            case _:
                return False

    # Each row's method: the event in, the new state and what follows out.

    def _choose(self, _: Admitted) -> tuple[RequestState, list[Effect]]:
        return _R, [Choose(self._avoid)]

    def _dispatch(self, event: Routed) -> tuple[RequestState, list[Effect]]:
        self._attempts += 1
        self.fence = Fence(self.request_id, self._attempts, event.incarnation)
        return _D, [Dispatch(self.fence, event.decode, event.prefill, event.only_these)]

    def _unroutable(self, event: Unroutable) -> tuple[RequestState, list[Effect]]:
        # After a failed attempt, what that node said tells the client more than "nobody else is there".
        return self._fail(self._last_failure or event.error)

    def _deliver(self, event: Produced) -> tuple[RequestState, list[Effect]]:
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
        return self._end_attempt(event.error)

    def _node_gone(self, event: NodeGone) -> tuple[RequestState, list[Effect]]:
        return self._end_attempt(NodeLost(f"the decode node was lost: {event.reason}"))

    def _end_attempt(self, error: PronghornError) -> tuple[RequestState, list[Effect]]:
        """The node is done with the attempt, without success: another node before the first token, else the end."""
        assert self.fence is not None
        self._avoid |= {self.fence.incarnation}
        self._last_failure = error
        self.fence = None
        # A full node is no fault of the request's: another one may have room.
        elsewhere = error.retryable or isinstance(error, Overloaded)
        if self.state is _D and elsewhere and self._attempts < self._max_attempts:
            return _R, [Choose(self._avoid)]
        return self._fail(error)

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
