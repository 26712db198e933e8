import pytest

from orchestrator.admission import Admission, Limits, Refusal, Ticket, Turn, Why
from pronghorn.ids import RequestID

A, B, C, D, E = (RequestID(name) for name in "abcde")


def made(max_in_flight: int, max_queue: int, **limits: float) -> Admission:
    return Admission(Limits(max_in_flight, max_queue, **limits))  # type: ignore[arg-type]  # the tests' own


def enter(admission: Admission, request: RequestID, now_s: float = 0.0, **asked: object) -> Turn:
    turn = admission.enter(Ticket(request, **asked), now_s)  # type: ignore[arg-type]  # the tests' own
    assert isinstance(turn, Turn), turn
    admission.check()
    return turn


def refused(admission: Admission, request: RequestID, now_s: float = 0.0, **asked: object) -> Refusal:
    refusal = admission.enter(Ticket(request, **asked), now_s)  # type: ignore[arg-type]  # the tests' own
    assert isinstance(refusal, Refusal), refusal
    admission.check()
    return refusal


def drained(admission: Admission, per_s: float, seconds: int) -> None:
    """Let so many pass through the queue, from time 0 on, that its rate is known. One runs and two wait in the end."""
    for number in range(3):
        enter(admission, RequestID(f"drained {number}"))
    for number in range(round(per_s * seconds)):
        admission.leave(RequestID(f"drained {number}"), (number + 1) / per_s)
        enter(admission, RequestID(f"drained {number + 3}"), (number + 1) / per_s)


def test_slots_are_given_first_and_then_places_in_the_queue() -> None:
    admission = made(1, 1)
    assert enter(admission, A).granted == [A]
    assert enter(admission, B).granted == []
    assert (admission.running, admission.waiting) == (1, 1)
    refusal = refused(admission, C)
    assert refusal.why is Why.QUEUE_FULL and refusal.retry_after_s is None
    assert refusal.message == "1 requests are running and 1 are waiting, which are the bounds"


def test_the_longest_waiting_gets_the_slot() -> None:
    admission = made(1, 3)
    for request in (A, B, C):
        enter(admission, request)
    assert admission.leave(A, 0.0).granted == [B]
    assert admission.leave(B, 0.0).granted == [C]
    assert admission.leave(C, 0.0) == Turn()
    assert (admission.running, admission.waiting) == (0, 0)
    admission.check()


def test_who_leaves_the_queue_frees_a_place_and_no_slot() -> None:
    admission = made(1, 1)
    enter(admission, A)
    enter(admission, B)
    assert admission.leave(B, 0.0) == Turn()
    assert enter(admission, C).granted == []
    assert admission.leave(A, 0.0).granted == [C]
    admission.check()


def test_without_a_queue_the_bound_is_the_slots() -> None:
    admission = made(2, 0)
    assert enter(admission, A).granted and enter(admission, B).granted
    assert refused(admission, C).why is Why.QUEUE_FULL


def test_an_id_enters_once() -> None:
    admission = made(2, 2)
    enter(admission, A)
    with pytest.raises(ValueError, match="already"):
        admission.enter(Ticket(A), 0.0)


def test_the_lowest_priority_number_is_next_whenever_it_came() -> None:
    admission = made(1, 3)
    enter(admission, A)
    enter(admission, B, priority=5)
    enter(admission, C, priority=0)
    enter(admission, D, priority=-3)
    order = []
    for request in (A, D, C):
        order += admission.leave(request, 0.0).granted
    assert order == [D, C, B]


def test_what_has_no_first_token_yet_bounds_who_may_begin_and_only_for_those_no_more_urgent() -> None:
    admission = made(10, 10)
    admission.make_room(1, 0.0)
    assert enter(admission, A).granted == [A]
    assert enter(admission, B).granted == []
    assert enter(admission, C, priority=-1).granted == [C]
    assert enter(admission, D, priority=-1).granted == []
    assert admission.started(A, 0.0).granted == []
    assert admission.started(C, 0.0).granted == [D]
    assert admission.started(D, 0.0).granted == [B]
    admission.check()


def test_the_last_slots_are_kept_for_the_urgent() -> None:
    admission = made(16, 1)
    for number in range(15):
        assert enter(admission, RequestID(str(number))).granted
    assert enter(admission, A).granted == []
    assert enter(admission, B, priority=-1).granted == [B]


def test_more_room_lets_in_all_that_fit_it_and_no_bound_lets_in_all() -> None:
    admission = made(10, 10)
    admission.make_room(1, 0.0)
    for request in (A, B, C, D):
        enter(admission, request)
    assert admission.make_room(2, 0.0).granted == [B]
    assert admission.make_room(None, 0.0).granted == [C, D]


def test_a_key_that_has_had_less_comes_before_one_that_came_earlier() -> None:
    admission = made(1, 4)
    enter(admission, A, share="greedy", prompt_tokens=100)
    enter(admission, B, share="greedy", prompt_tokens=100)
    enter(admission, C, share="greedy", prompt_tokens=100)
    enter(admission, D, share="modest", prompt_tokens=100)
    assert admission.leave(A, 0.0).granted == [B], "a key that is new begins as the least of those that wait"
    assert admission.leave(B, 0.0).granted == [D]


def test_generated_tokens_count_twice() -> None:
    admission = made(2, 2)
    enter(admission, A, share="talks", prompt_tokens=10)
    enter(admission, B, share="reads", prompt_tokens=11)
    enter(admission, C, share="talks")
    enter(admission, D, share="reads")
    admission.delivered(A, 1)
    assert admission.leave(B, 0.0).granted == [D]


def test_having_been_away_saves_nothing_up() -> None:
    admission = made(1, 9)
    new = [RequestID(f"new {number}") for number in range(3)]
    enter(admission, A, share="steady", prompt_tokens=1000)
    for request in (B, C):
        enter(admission, request, share="steady", prompt_tokens=10)
    for request in new:
        enter(admission, request, share="new", prompt_tokens=10)
    order, last = [], A
    while turn := admission.leave(last, 0.0).granted:
        (last,) = turn
        order.append(last)
    assert order == [B, new[0], C, new[1], new[2]], "that the other has had 1000 tokens is not owed to it"


def test_an_urgent_one_takes_the_place_of_the_newest_of_the_least_urgent() -> None:
    admission = made(1, 2)
    enter(admission, A)
    enter(admission, B, priority=1)
    enter(admission, C, priority=1)
    ((victim, refusal),) = enter(admission, D, priority=0).dismissed
    assert (victim, refusal.why) == (C, Why.DISPLACED)
    assert refused(admission, E, priority=1).why is Why.QUEUE_FULL
    assert admission.leave(C, 0.0) == Turn()
    assert admission.leave(A, 0.0).granted == [D]


def test_a_key_that_fills_the_queue_gives_way_until_both_have_as_much_of_it() -> None:
    admission = made(1, 4)
    enter(admission, A, share="greedy")
    for number in range(4):
        enter(admission, RequestID(f"greedy {number}"), share="greedy")
    assert [v for v, _ in enter(admission, B, share="modest").dismissed] == [RequestID("greedy 3")]
    assert [v for v, _ in enter(admission, C, share="modest").dismissed] == [RequestID("greedy 2")]
    assert refused(admission, D, share="modest").why is Why.QUEUE_FULL
    assert refused(admission, E, share="greedy").why is Why.QUEUE_FULL


def test_bytes_are_bounded_too_and_one_that_never_fits_displaces_nobody() -> None:
    admission = made(1, 10, max_queue_bytes=100)
    enter(admission, A, size_bytes=1000)
    enter(admission, B, size_bytes=60)
    assert refused(admission, C, size_bytes=41).why is Why.QUEUE_BYTES
    assert refused(admission, C, size_bytes=101, priority=-1).why is Why.QUEUE_BYTES
    assert admission.waiting == 1
    assert [victim for victim, _ in enter(admission, D, size_bytes=50, priority=-1).dismissed] == [B]


def test_who_would_wait_longer_than_its_deadline_or_the_bound_allows_is_refused_at_once() -> None:
    admission = made(1, 100, max_queue_wait_s=4.0)
    drained(admission, per_s=2.0, seconds=5)
    for number in range(6):
        enter(admission, RequestID(str(number)), 5.0)
    refusal = refused(admission, A, 5.0, start_by_s=8.0)
    assert refusal.why is Why.DEADLINE and refusal.retry_after_s == pytest.approx(1.0)
    assert enter(admission, B, 5.0, start_by_s=9.5).granted == []
    refusal = refused(admission, C, 5.0)
    assert refusal.why is Why.WAIT and refusal.retry_after_s == pytest.approx(0.5)
    assert enter(admission, D, 5.0, priority=-1, start_by_s=5.1).granted == [], "nobody is before it"


def test_a_full_queue_says_when_it_will_have_drained() -> None:
    admission = made(1, 6)
    drained(admission, per_s=2.0, seconds=5)
    for number in range(4):
        enter(admission, RequestID(str(number)), 5.0)
    assert refused(admission, A, 5.0).retry_after_s == pytest.approx(3.0)
    assert refused(admission, A, 45.0).retry_after_s == pytest.approx(60.0), "nothing has moved for forty seconds"


def test_who_still_waits_when_it_is_too_late_is_dismissed_and_takes_nobodys_turn() -> None:
    admission = made(1, 3)
    enter(admission, A)
    enter(admission, B, start_by_s=1.0)
    enter(admission, C)
    turn = admission.leave(A, 2.0)
    assert turn.granted == [C] and [(r, why.why) for r, why in turn.dismissed] == [(B, Why.DEADLINE)]
    enter(admission, D, 2.0, start_by_s=3.0)
    assert [request for request, _ in admission.overdue(D, 3.0).dismissed] == [D]
    assert admission.overdue(D, 3.0) == Turn() and admission.overdue(C, 3.0) == Turn()
    for request in (B, D):
        admission.leave(request, 3.0)
    assert admission.dismissed == 0
