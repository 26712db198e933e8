"""Whatever happens in whatever order, a request ends once, gives back its slot once, and abandons no node silently."""

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.lifecycle import Effect, Lifecycle
from orchestrator.request_events import (
    Admitted,
    AttemptFailed,
    Cancel,
    Choose,
    ClientGone,
    Complete,
    DeadlinePassed,
    Deliver,
    Dispatch,
    Event,
    Fail,
    Finish,
    NodeGone,
    NodeHeard,
    NodeUnfit,
    PrefillFailed,
    Produced,
    ReleaseSlot,
    Routed,
    SendAbort,
    ShuttingDown,
    StoppedEarly,
    Unroutable,
    Wait,
    WaitOver,
)
from pipelines.types.frames import Delta
from pipelines.types.status import GenerationStatus
from pronghorn.errors import EngineDied, InvalidRequest, NodeLost, NodeRefused, Unavailable
from pronghorn.ids import Fence, Incarnation, NodeName, RequestID

REQUEST = RequestID("r")
MAX_ATTEMPTS = 3

incarnations = st.sampled_from(["a", "b"]).map(Incarnation)
fences = st.builds(Fence, st.just(REQUEST), st.integers(1, 5), incarnations)
errors = st.sampled_from([NodeRefused("no"), EngineDied("gone"), NodeLost("reset"), InvalidRequest("bad")])
deltas = st.builds(Delta, fences, st.lists(st.integers(0, 9), max_size=2), st.sampled_from(GenerationStatus))
events: st.SearchStrategy[Event] = st.one_of(
    st.just(Admitted()),
    st.builds(Routed, st.just(NodeName("n")), incarnations),
    st.builds(Unroutable, st.builds(Unavailable, st.just("nobody"))),
    st.builds(Produced, deltas),
    st.builds(AttemptFailed, fences, errors),
    st.builds(NodeGone, incarnations, st.just("cut"), st.booleans()),
    st.builds(NodeUnfit, incarnations),
    st.builds(NodeHeard, incarnations),
    st.builds(PrefillFailed, fences, incarnations, errors, st.booleans()),
    st.builds(Complete, st.just(GenerationStatus.END_OF_SEQUENCE)),
    st.sampled_from([WaitOver(), DeadlinePassed(), StoppedEarly(), ClientGone(), ShuttingDown()]),
)


@settings(max_examples=400)
@given(st.lists(events, max_size=40))
def test_any_sequence_that_ends_in_a_deadline_has_one_end(sequence: list[Event]) -> None:
    lifecycle = Lifecycle(REQUEST, MAX_ATTEMPTS)
    happened: list[tuple[Event, Effect]] = []
    for event in [Admitted(), Routed(NodeName("n"), Incarnation("a")), *sequence, DeadlinePassed()]:
        happened += [(event, effect) for effect in lifecycle.handle(event)]
    effects = [effect for _, effect in happened]
    assert lifecycle.state.terminal
    assert lifecycle.fence is None
    assert sum(isinstance(effect, Finish | Fail | Cancel) for effect in effects) == 1
    assert sum(isinstance(effect, ReleaseSlot) for effect in effects) == 1
    told = [e for e in effects if isinstance(e, Finish | Fail | Cancel | ReleaseSlot | Deliver)]
    assert isinstance(told[-1], ReleaseSlot)
    _check_attempts(happened)


def _check_attempts(happened: list[tuple[Event, Effect]]) -> None:
    """Attempts count up from 1 and are bounded until a token was delivered; each ends by the node's word, its loss or
    one abort; only the current one is delivered, and the next one begins when it has ended."""
    current: Fence | None = None
    delivered = False
    attempts = 0
    for event, effect in happened:
        if isinstance(effect, Dispatch):
            attempts += 1
            assert current is None
            assert effect.fence.attempt == attempts
            assert delivered or attempts <= MAX_ATTEMPTS
            current = effect.fence
        elif isinstance(effect, Deliver):
            assert effect.delta.fence == current
            delivered = delivered or bool(effect.delta.tokens)
        elif isinstance(effect, Choose):
            current = None
        elif isinstance(effect, Wait):
            assert delivered or effect.in_doubt
            assert current is None or isinstance(event, Produced | AttemptFailed | NodeGone), "a node was left at work"
            current = None
        elif isinstance(effect, SendAbort):
            assert effect.fence == current
            current = None
        elif isinstance(effect, Fail | Finish | Cancel) and current is not None:
            assert isinstance(event, Produced | AttemptFailed | NodeGone), "a node was left at work"
