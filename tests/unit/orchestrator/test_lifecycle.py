import pathlib
import re
from typing import get_args

import pytest

from orchestrator.lifecycle import TRANSITIONS, Effect, Lifecycle, Refused, RequestState, diagram
from orchestrator.request_events import (
    Admitted,
    AttemptFailed,
    Cancel,
    Choose,
    ClientGone,
    Complete,
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
    Routed,
    SendAbort,
    Shed,
    ShuttingDown,
    StoppedEarly,
    Unroutable,
    Wait,
    WaitOver,
)
from pipelines.types.frames import Delta, PrefillTarget
from pipelines.types.handover import NOT_BEGUN
from pipelines.types.status import GenerationStatus
from pronghorn.credentials import SILENT
from pronghorn.errors import (
    DeadlineExceeded,
    EngineDied,
    InsufficientBlocks,
    InvalidRequest,
    NodeLost,
    NodeRefused,
    Overloaded,
    PoisonRequest,
    PronghornError,
    TransferFailed,
    Unavailable,
)
from pronghorn.ids import Fence, Incarnation, NodeName, RequestID

REQUEST = RequestID("r")
A, B, C, P = Incarnation("a"), Incarnation("b"), Incarnation("c"), Incarnation("p")
PREFILL = (PrefillTarget(NodeName("prefill-1"), "127.0.0.1:1", Incarnation("p")),)
ACTIVE, DONE = GenerationStatus.ACTIVE, GenerationStatus.END_OF_SEQUENCE


def fence(attempt: int, incarnation: Incarnation) -> Fence:
    return Fence(REQUEST, attempt, incarnation)


def routed(incarnation: Incarnation) -> Routed:
    return Routed(NodeName(f"decode-{incarnation}"), incarnation, PREFILL)


def produced(
    attempt: int, incarnation: Incarnation, *tokens: int, status: GenerationStatus = GenerationStatus.ACTIVE
) -> Produced:
    return Produced(Delta(fence(attempt, incarnation), list(tokens), status))


def prefill_failed(error: PronghornError, prefill: Incarnation, session_up: bool = True) -> PrefillFailed:
    return PrefillFailed(fence(1, A), prefill, error, session_up)


def after(*events: Event, max_attempts: int = 3) -> tuple[Lifecycle, list[Effect]]:
    """A lifecycle that has seen these events, and the effects of the last one."""
    lifecycle = Lifecycle(REQUEST, max_attempts)
    effects: list[Effect] = []
    for event in events:
        effects = lifecycle.handle(event)
    return lifecycle, effects


QUEUED: list[Event] = []
ROUTING: list[Event] = [Admitted()]
DISPATCHED: list[Event] = [*ROUTING, routed(A)]
STREAMING: list[Event] = [*DISPATCHED, produced(1, A, 7)]
WAITING: list[Event] = [*STREAMING, NodeGone(A, "cut"), Unroutable(Unavailable("nobody"))]
LIVE: dict[RequestState, list[Event]] = {
    RequestState.QUEUED: QUEUED,
    RequestState.ROUTING: ROUTING,
    RequestState.WAITING: WAITING,
    RequestState.DISPATCHED: DISPATCHED,
    RequestState.STREAMING: STREAMING,
}
ENDED: dict[RequestState, list[Event]] = {
    RequestState.FINISHED: [*DISPATCHED, produced(1, A, 7, status=DONE)],
    RequestState.FAILED: [DeadlinePassed()],
    RequestState.CANCELLED: [ClientGone()],
}
SAMPLES: dict[type, Event] = {
    Admitted: Admitted(),
    Routed: routed(A),
    Unroutable: Unroutable(Unavailable("nobody")),
    Produced: produced(1, A, 7),
    AttemptFailed: AttemptFailed(fence(1, A), NodeRefused("full")),
    Complete: Complete(DONE),
    NodeGone: NodeGone(A, "cut"),
    MachineGone: MachineGone(frozenset({A, P})),
    NodeUnfit: NodeUnfit(A),
    NodeHeard: NodeHeard(B),
    PrefillFailed: prefill_failed(TransferFailed("torn"), P),
    WaitOver: WaitOver(),
    DeadlinePassed: DeadlinePassed(),
    StoppedEarly: StoppedEarly(),
    ClientGone: ClientGone(),
    Shed: Shed(Overloaded("the queue is full")),
    ShuttingDown: ShuttingDown(),
}


def test_a_request_is_routed_dispatched_streamed_and_finished() -> None:
    lifecycle = Lifecycle(REQUEST, max_attempts=3)
    assert lifecycle.handle(Admitted()) == [Choose(frozenset())]
    assert lifecycle.handle(routed(A)) == [Dispatch(fence(1, A), NodeName("decode-a"), PREFILL, False)]
    first, second = produced(1, A, 7), produced(1, A, 8, 9)
    assert lifecycle.handle(first) == [Deliver(first.delta)]
    assert lifecycle.state is RequestState.STREAMING
    assert lifecycle.handle(second) == [Deliver(second.delta)]
    last = produced(1, A, 2, status=DONE)
    assert lifecycle.handle(last) == [Deliver(last.delta), Finish(), ReleaseSlot()]
    assert lifecycle.state is RequestState.FINISHED


def test_the_first_token_may_be_the_last() -> None:
    last = produced(1, A, 2, status=GenerationStatus.MAXIMUM_LENGTH)
    lifecycle, effects = after(*DISPATCHED, last)
    assert effects == [Deliver(last.delta), Finish(), ReleaseSlot()]
    assert lifecycle.state is RequestState.FINISHED


FAILURES = [
    AttemptFailed(fence(1, A), NodeRefused("draining")),
    AttemptFailed(fence(1, A), InsufficientBlocks("none free")),
    AttemptFailed(fence(1, A), EngineDied("gone")),
    AttemptFailed(fence(1, A), Overloaded("queue full")),
    NodeGone(A, "cut"),
    produced(1, A, status=GenerationStatus.CANCELLED),
]


@pytest.mark.parametrize("failure", FAILURES)
def test_before_the_first_token_a_failed_attempt_goes_to_another_node(failure: Event) -> None:
    lifecycle, effects = after(*DISPATCHED, failure)
    assert effects == [Choose(frozenset({A}))]
    assert kinds(lifecycle.handle(routed(B))) == [Dispatch]
    assert lifecycle.fence == fence(2, B)


def test_attempts_are_bounded_and_the_last_error_is_the_answer() -> None:
    error = NodeRefused("third")
    _, effects = after(
        *DISPATCHED,
        AttemptFailed(fence(1, A), NodeRefused("first")),
        routed(B),
        NodeGone(B, "cut"),
        routed(C),
        AttemptFailed(fence(3, C), error),
    )
    assert effects == [Fail(error), ReleaseSlot()]


def test_where_nobody_else_is_left_the_failure_of_the_node_is_the_answer() -> None:
    error = InsufficientBlocks("none free")
    _, effects = after(*DISPATCHED, AttemptFailed(fence(1, A), error), Unroutable(Unavailable("nobody")))
    assert effects == [Fail(error), ReleaseSlot()]


def test_an_error_that_no_other_node_could_mend_is_final() -> None:
    error = InvalidRequest("bad")
    _, effects = after(*DISPATCHED, AttemptFailed(fence(1, A), error))
    assert effects == [Fail(error), ReleaseSlot()]


def test_a_request_that_cannot_be_routed_fails_with_the_routers_error() -> None:
    error = Unavailable("nobody")
    assert after(*ROUTING, Unroutable(error))[1] == [Fail(error), ReleaseSlot()]


def kinds(effects: list[Effect]) -> list[type]:
    return [type(effect) for effect in effects]


def error_of(effects: list[Effect]) -> PronghornError:
    (error,) = [effect.error for effect in effects if isinstance(effect, Fail)]
    return error


@pytest.mark.parametrize("failure", FAILURES)
def test_after_the_first_token_it_goes_on_elsewhere_however_often(failure: Event) -> None:
    lifecycle, effects = after(*STREAMING, failure, max_attempts=1)
    assert effects[-1] == Choose(frozenset({A}))
    assert kinds(lifecycle.handle(routed(B))) == [Dispatch]
    assert lifecycle.handle(produced(2, B, 8)) == [Deliver(produced(2, B, 8).delta)]
    assert lifecycle.state is RequestState.STREAMING


def test_a_stream_that_has_outgrown_the_only_pool_waits_for_nobody() -> None:
    error = InsufficientBlocks("12 blocks, the whole pool has 11")
    _, effects = after(*STREAMING, AttemptFailed(fence(1, A), error), Unroutable(Unavailable("nobody")))
    assert effects == [Fail(error), ReleaseSlot()]


def test_where_nobody_can_go_on_with_it_it_waits_and_tries_each_node_that_is_heard_of() -> None:
    lifecycle, effects = after(*STREAMING, NodeGone(A, "cut"), Unroutable(Unavailable("nobody")))
    assert effects == [Wait()]
    assert lifecycle.state is RequestState.WAITING
    assert lifecycle.handle(NodeHeard(B)) == [Choose(frozenset({A}))]
    assert lifecycle.handle(Unroutable(Unavailable("nobody"))) == [Wait()]
    assert lifecycle.handle(NodeHeard(A)) == [Choose(frozenset())], "the node may have room, or a session, by now"
    assert kinds(lifecycle.handle(routed(A))) == [Dispatch]
    assert lifecycle.fence == fence(2, A)


def test_a_wait_that_is_over_ends_in_what_was_lost() -> None:
    lifecycle, effects = after(*WAITING, WaitOver())
    assert kinds(effects) == [Fail, ReleaseSlot]
    assert isinstance(error_of(effects), NodeLost)


def test_an_unhealthy_node_is_left_and_told_so() -> None:
    assert after(*STREAMING, NodeUnfit(A))[1] == [SendAbort(fence(1, A)), Choose(frozenset({A}))]


def test_what_is_complete_but_for_its_last_word_is_finished() -> None:
    _, effects = after(*STREAMING, NodeGone(A, "cut"), Complete(DONE))
    assert effects == [DeliverEnd(DONE), Finish(), ReleaseSlot()]


# --- poison ---


def died(attempt: int, incarnation: Incarnation) -> AttemptFailed:
    return AttemptFailed(fence(attempt, incarnation), EngineDied("gone"))


@pytest.mark.parametrize(
    "events",
    [
        [died(1, A), routed(B), died(2, B)],
        [prefill_failed(EngineDied("gone"), P), died(1, A)],
        [prefill_failed(EngineDied("gone"), P), prefill_failed(EngineDied("gone"), C)],
        [produced(1, A, 7), died(1, A), routed(B), produced(2, B, 8), died(2, B)],
    ],
)
def test_two_nodes_that_die_under_it_make_it_poison(events: list[Event]) -> None:
    lifecycle, effects = after(*DISPATCHED, *events)
    assert isinstance(error_of(effects), PoisonRequest)
    assert lifecycle.state is RequestState.FAILED


@pytest.mark.parametrize(
    "events",
    [
        [NodeGone(A, "reset", died=True), routed(B), NodeGone(B, "reset", died=True)],
        [NodeGone(A, "reset", died=True), routed(B), died(2, B)],
        [NodeGone(A, "reset", died=True), routed(B), PrefillFailed(fence(2, B), P, EngineDied("gone"), True)],
        [prefill_failed(NodeLost("reset"), P), NodeGone(P, "reset", died=True), died(1, A)],
        [prefill_failed(NodeLost("reset"), P, session_up=False), died(1, A)],
    ],
)
def test_where_sessions_broke_time_tells_whether_it_is_poison(events: list[Event]) -> None:
    lifecycle, effects = after(*DISPATCHED, *events)
    assert effects[-1] == Wait(in_doubt=True)
    assert lifecycle.state is RequestState.WAITING and lifecycle.fence is None
    assert lifecycle.handle(NodeHeard(C)) == [], "that another node lives proves nothing"
    assert isinstance(error_of(lifecycle.handle(WaitOver())), PoisonRequest)
    again, _ = after(*DISPATCHED, *events)
    presumed = P if any(isinstance(event, PrefillFailed) and event.fence == fence(1, A) for event in events) else A
    assert kinds(again.handle(NodeHeard(presumed))) == [Choose], "one of them lives"


@pytest.mark.parametrize(
    "events",
    [
        [NodeGone(A, "silent"), routed(B), NodeGone(B, "silent")],
        [NodeGone(A, "reset", died=True), routed(B), NodeHeard(A), NodeGone(B, "reset", died=True)],
        [prefill_failed(NodeLost("reset"), P), prefill_failed(NodeLost("reset"), C)],
        [prefill_failed(TransferFailed("torn"), P), died(1, A)],
        [died(1, A), routed(B), PrefillFailed(fence(2, B), P, NodeLost("reset", code=NOT_BEGUN), False)],
        [died(1, A), routed(B), PrefillFailed(fence(2, B), P, NodeLost("no ping", code=SILENT), False)],
        [died(1, A), routed(B), PrefillFailed(fence(2, B), P, NodeLost("nothing came", code="stalled"), False)],
        [prefill_failed(NodeLost("reset", code=NOT_BEGUN), P), NodeGone(P, "reset", died=True), died(1, A)],
        [produced(1, A, 7, 8), died(1, A), routed(B), produced(2, B, 8, 9), died(2, B)],
    ],
)
def test_silence_refusals_and_deaths_that_it_got_over_make_no_poison(events: list[Event]) -> None:
    assert not after(*DISPATCHED, *events)[0].state.terminal


GONE = MachineGone(frozenset({A, P}))
"""The machine of the first decode node and of the prefill node that the second one is sent to."""
DIED_A, DIED_P = NodeGone(A, "reset", died=True), NodeGone(P, "reset", died=True)
LOST_P = PrefillFailed(fence(2, B), P, NodeLost("reset"), True)


@pytest.mark.parametrize(
    "events",
    [
        [DIED_A, routed(B), LOST_P, GONE, DIED_P],
        [DIED_A, routed(B), GONE, PrefillFailed(fence(2, B), P, NodeLost("reset"), False)],
        [DIED_A, routed(B), PrefillFailed(fence(2, B), P, EngineDied("gone"), True), GONE],
        [prefill_failed(NodeLost("reset"), P), GONE, DIED_P, DIED_A],
    ],
)
def test_nodes_that_went_with_their_machine_count_once(events: list[Event]) -> None:
    lifecycle, _ = after(*DISPATCHED, *events)
    assert not lifecycle.casualties.poisonous
    if lifecycle.state is RequestState.WAITING:
        lifecycle.handle(NodeHeard(C))
    if lifecycle.state is RequestState.ROUTING:
        lifecycle.handle(routed(C))
    effects = lifecycle.handle(AttemptFailed(lifecycle.fence or fence(3, C), EngineDied("gone")))
    assert lifecycle.casualties.poisonous, "another machine's node is a second death"
    assert effects


def test_who_waits_in_doubt_goes_on_when_it_was_the_machine() -> None:
    lifecycle, effects = after(*DISPATCHED, DIED_A, routed(B), LOST_P, DIED_P)
    assert effects[-1] == Wait(in_doubt=True)
    assert lifecycle.handle(GONE) == [Choose(frozenset({A}))]


def test_the_next_node_is_told_of_the_deaths_so_far() -> None:
    _, effects = after(*DISPATCHED, died(1, A), routed(B))
    assert effects == [Dispatch(fence(2, B), NodeName("decode-b"), PREFILL, False, deaths=1)]


def test_messages_of_an_older_attempt_are_refused_and_change_nothing() -> None:
    lifecycle, _ = after(*DISPATCHED, NodeGone(A, "cut"), routed(B))
    for late in (produced(1, A, 7), AttemptFailed(fence(1, A), NodeRefused("late")), NodeGone(A, "again")):
        assert lifecycle.handle(late) == [Refused(late, RequestState.DISPATCHED, "late")]
    ours = produced(2, B, 7)
    assert lifecycle.handle(ours) == [Deliver(ours.delta)]


def test_messages_of_another_life_under_the_same_attempt_are_refused() -> None:
    lifecycle, effects = after(*DISPATCHED, produced(1, B, 7))
    assert kinds(effects) == [Refused]
    assert lifecycle.state is RequestState.DISPATCHED


@pytest.mark.parametrize(("state", "path"), LIVE.items())
@pytest.mark.parametrize(
    ("event", "terminal", "end"),
    [
        (DeadlinePassed(), Fail, RequestState.FAILED),
        (ShuttingDown(), Fail, RequestState.FAILED),
        (StoppedEarly(), Finish, RequestState.FINISHED),
        (ClientGone(), Cancel, RequestState.CANCELLED),
    ],
)
def test_what_ends_a_request_from_outside_ends_it_in_every_state(
    state: RequestState, path: list[Event], event: Event, terminal: type, end: RequestState
) -> None:
    lifecycle, effects = after(*path, event)
    on_a_node = state in (RequestState.DISPATCHED, RequestState.STREAMING)
    assert kinds(effects) == ([SendAbort] if on_a_node else []) + [terminal, ReleaseSlot]
    assert lifecycle.state is end
    if on_a_node:
        assert effects[0] == SendAbort(fence(1, A))


def test_a_deadline_says_where_it_passed() -> None:
    error = error_of(after(*DISPATCHED, DeadlinePassed())[1])
    assert isinstance(error, DeadlineExceeded)
    assert "dispatched" in error.message


@pytest.mark.parametrize("event_type", SAMPLES)
@pytest.mark.parametrize(("state", "path"), {**LIVE, **ENDED}.items())
def test_every_pair_is_in_the_table_or_refused_by_name(
    state: RequestState, path: list[Event], event_type: type[Event]
) -> None:
    lifecycle, _ = after(*path)
    assert lifecycle.state is state
    event = SAMPLES[event_type]
    effects = lifecycle.handle(event)
    late = state is RequestState.WAITING and event_type is NodeGone  # it is on no node, and suspects none
    if (transition := TRANSITIONS.get((state, event_type))) and not late:
        assert Refused not in kinds(effects)
        assert lifecycle.state in transition.targets
    else:
        assert effects == [Refused(event, state, "late" if late else "terminal" if state.terminal else "out_of_place")]
        assert lifecycle.state is state


def test_every_event_has_a_sample() -> None:
    assert set(get_args(Event)) == set(SAMPLES)


def test_no_row_leads_out_of_a_terminal_state_and_each_names_a_method() -> None:
    for (state, _), transition in TRANSITIONS.items():
        assert not state.terminal
        assert callable(getattr(Lifecycle, transition.method))


def test_the_committed_diagram_is_the_tables() -> None:
    text = (pathlib.Path(__file__).parents[3] / "docs/lifecycle.md").read_text()
    (committed,) = re.findall(r"```mermaid\n(.*?)```", text, flags=re.DOTALL)
    assert committed == diagram()
