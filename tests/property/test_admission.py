"""Whatever comes, in whatever order: bounds hold, each request is decided once, nobody starves, shares are fair."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.admission import Admission, Limits, Refusal, Ticket, Turn
from pronghorn.ids import RequestID

SLOTS, PLACES, BYTES = 3, 6, 900

arrivals = st.tuples(
    st.just("enter"),
    st.integers(-1, 1),
    st.sampled_from("abc"),
    st.integers(1, 200),
    st.sampled_from([0.5, 3.0, 1e9]),
)
moves = st.one_of(
    arrivals,
    st.tuples(st.sampled_from(["leave", "started", "wait", "room", "overdue", "delivered"]), st.integers(0, 30)),
)


class Ledger:
    """What was decided of each request, beside the admission that decided it."""

    def __init__(self) -> None:
        self.here: dict[RequestID, str] = {}
        self.decided: Counter[RequestID] = Counter()
        self.entered = 0

    def follow(self, turn: Turn) -> None:
        for request_id in turn.granted:
            assert self.here.get(request_id) == "waits", f"{request_id} is granted, and was {self.here.get(request_id)}"
            self.here[request_id] = "runs"
            self.decided[request_id] += 1
        for request_id, refusal in turn.dismissed:
            assert self.here.get(request_id) == "waits" and refusal.message
            self.here[request_id] = "dismissed"
            self.decided[request_id] += 1


@given(st.lists(moves, max_size=60))
@settings(max_examples=150, deadline=None)
def test_bounds_hold_and_each_request_is_granted_or_refused_once(script: list[tuple[object, ...]]) -> None:
    admission = Admission(Limits(SLOTS, PLACES, BYTES, 5.0, max_idle_keys=2))
    ledger, now_s = Ledger(), 0.0
    for move in script:
        if move[0] == "enter":
            _, priority, share, size, within_s = move
            request_id = RequestID(str(ledger.entered))
            ledger.entered += 1
            ticket = Ticket(request_id, priority, share, size, size, now_s + within_s)  # type: ignore[arg-type, operator]  # as drawn
            answer = admission.enter(ticket, now_s)
            if isinstance(answer, Refusal):
                ledger.decided[request_id] += 1
                assert request_id not in admission
            else:
                ledger.here[request_id] = "waits"
                ledger.follow(answer)
        else:
            what, number = str(move[0]), int(move[1])  # type: ignore[call-overload]  # as drawn
            known = list(ledger.here)
            request_id = known[number % len(known)] if known else RequestID("nobody")
            state = ledger.here.get(request_id)
            if what == "wait":
                now_s += number / 10
            elif what == "room":
                ledger.follow(admission.make_room(number or None, now_s))
            elif what == "leave" and known:
                del ledger.here[request_id]
                ledger.follow(admission.leave(request_id, now_s))
            elif what == "started" and state == "runs":
                ledger.follow(admission.started(request_id, now_s))
            elif what == "overdue" and known:
                ledger.follow(admission.overdue(request_id, now_s))
            elif what == "delivered":
                admission.delivered(request_id, number)
        admission.check()
        states = Counter(ledger.here.values())
        assert admission.running == states["runs"] and admission.waiting == states["waits"]
    for request_id in list(ledger.here):
        del ledger.here[request_id]
        ledger.follow(admission.leave(request_id, now_s))
    admission.check()
    assert admission.running == admission.waiting == admission.dismissed == 0
    assert max(ledger.decided.values(), default=0) <= 1
    assert admission.gauges(now_s)["admission_keys"] <= 2, "keys that hold nothing are forgotten"


costs = st.lists(st.tuples(st.integers(1, 100), st.integers(0, 50)), min_size=4, max_size=20)


@given(st.lists(costs, min_size=2, max_size=4), st.integers(1, 4), st.integers(5, 60))
@settings(max_examples=100, deadline=None)
def test_of_keys_that_always_wait_none_gets_more_than_its_share(
    kinds: list[list[tuple[int, int]]], slots: int, rounds: int
) -> None:
    admission = Admission(Limits(slots, 1000))
    running: list[tuple[RequestID, int, int]] = []
    served: Counter[int] = Counter()
    asked: Counter[int] = Counter()
    costs_of: dict[RequestID, tuple[int, int, int]] = {}

    def enter(key: int) -> None:
        prompt, output = kinds[key][asked[key] % len(kinds[key])]
        asked[key] += 1
        request_id = RequestID(f"{key}/{asked[key]}")
        costs_of[request_id] = (key, prompt, output)
        turn = admission.enter(Ticket(request_id, 0, str(key), prompt), 0.0)
        assert isinstance(turn, Turn)
        grant(turn)

    def grant(turn: Turn) -> None:
        for request_id in turn.granted:
            key, prompt, output = costs_of[request_id]
            running.append((request_id, key, output))
            if counting:
                served[key] += prompt
            enter(key)  # so that it always has one that waits

    counting = False
    for number in range(slots):
        blocker = admission.enter(Ticket(RequestID(f"blocker {number}"), 0, "blocker"), 0.0)
        assert isinstance(blocker, Turn)
    for key in range(len(kinds)):
        enter(key)
        enter(key)
    counting = True
    for number in range(slots):
        grant(admission.leave(RequestID(f"blocker {number}"), 0.0))
    for _ in range(rounds):
        request_id, key, output = running.pop(0)
        admission.delivered(request_id, output)
        served[key] += 2 * output
        grant(admission.leave(request_id, 0.0))
        admission.check()
    dearest = max(max(prompt + 2 * output * slots for prompt, output in kind) for kind in kinds)
    given_out = [served[key] for key in range(len(kinds))]
    assert max(given_out) - min(given_out) <= 2 * dearest + 100


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=40), st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_within_a_priority_nobody_is_passed_over_for_ever(crowd: list[str], slots: int) -> None:
    """One request of a modest key, and crowds of others that keep coming: its turn comes."""
    admission = Admission(Limits(slots, 10_000))
    running = [RequestID(f"first {number}") for number in range(slots)]
    for request_id in running:
        admission.enter(Ticket(request_id, 0, "first"), 0.0)
    for number, key in enumerate(crowd):
        admission.enter(Ticket(RequestID(f"crowd {number}"), 0, key), 0.0)
    modest = RequestID("modest")
    admission.enter(Ticket(modest, 0, "modest"), 0.0)
    for late in range(len(crowd) + slots + 2):
        if modest in running:
            return
        admission.enter(Ticket(RequestID(f"late {late}"), 0, crowd[late % len(crowd)]), 0.0)
        running += admission.leave(running.pop(0), 0.0).granted
    raise AssertionError("it was passed over by all that came later")
