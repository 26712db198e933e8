import pytest

from orchestrator.admission import Admission
from pronghorn.ids import RequestID

A, B, C, D = (RequestID(name) for name in "abcd")


def test_slots_are_given_first_and_then_places_in_the_queue() -> None:
    admission = Admission(max_in_flight=1, max_queue=1)
    assert admission.enter(A) is True
    assert admission.enter(B) is False
    assert (admission.running, admission.waiting) == (1, 1)
    assert admission.can_admit() == "1 requests are running and 1 are waiting, which are the bounds"
    admission.check()


def test_the_longest_waiting_gets_the_slot() -> None:
    admission = Admission(max_in_flight=1, max_queue=3)
    for request in (A, B, C):
        admission.enter(request)
    assert admission.leave(A) == B
    assert admission.leave(B) == C
    assert admission.leave(C) is None
    assert (admission.running, admission.waiting) == (0, 0)
    admission.check()


def test_who_leaves_the_queue_frees_a_place_and_no_slot() -> None:
    admission = Admission(max_in_flight=1, max_queue=1)
    admission.enter(A)
    admission.enter(B)
    assert admission.leave(B) is None
    assert admission.can_admit() is None
    assert admission.enter(C) is False
    assert admission.leave(A) == C
    admission.check()


def test_without_a_queue_the_bound_is_the_slots() -> None:
    admission = Admission(max_in_flight=2, max_queue=0)
    assert admission.enter(A) and admission.enter(B)
    assert admission.can_admit() is not None


def test_an_id_enters_once() -> None:
    admission = Admission(max_in_flight=2, max_queue=2)
    admission.enter(A)
    with pytest.raises(ValueError, match="already"):
        admission.enter(A)
