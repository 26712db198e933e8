"""The one-shot scheduler as plays: strictly one after the other."""

import pytest

from pipelines.runtime.jobs import Done
from pipelines.runtime.one_shot_scheduler import OneShotScheduler
from pronghorn.errors import InternalError
from pronghorn.ids import RequestID
from tests.fakes.engine_play import fence


def scheduler(*names: str, max_waiting: int = 8) -> OneShotScheduler[str, bytes]:
    made: OneShotScheduler[str, bytes] = OneShotScheduler(max_waiting=max_waiting)
    for name in names:
        made.submit(fence(name), f"a picture of {name}", 10.0, 0.0)
    return made


def kinds(of: OneShotScheduler[str, bytes]) -> list[tuple[str, str]]:
    of.check()
    return [
        (answer.fence.request_id.value, "done" if isinstance(answer, Done) else answer.error.kind)
        for answer in of.take_answers()
    ]


@pytest.mark.conformance(54)
def test_one_request_is_computed_at_a_time_in_order_of_arrival() -> None:
    shots = scheduler("a", "b")
    for name in "ab":
        assert shots.next_batch(0.0) == {RequestID(name): f"a picture of {name}"}
        with pytest.raises(AssertionError, match="being computed already"):
            shots.next_batch(0.0)
        shots.complete({RequestID(name): b"png"}, {})
        assert shots.take_answers() == [Done(fence(name), b"png")]
    assert shots.next_batch(0.0) is None and not shots.has_work


@pytest.mark.conformance(54)
def test_a_queued_request_that_is_cancelled_is_never_begun() -> None:
    shots = scheduler("a", "b", "c")
    shots.next_batch(0.0)
    shots.cancel(fence("b"))
    assert kinds(shots) == [("b", "Cancelled")]
    shots.complete({RequestID("a"): b""}, {})
    assert shots.next_batch(0.0) == {RequestID("c"): "a picture of c"}
    assert kinds(shots) == [("a", "done")]


def test_cancelling_what_runs_answers_at_once_and_drops_what_comes_out() -> None:
    shots = scheduler("a")
    shots.next_batch(0.0)
    shots.cancel(fence("a"))
    shots.cancel(fence("a"))
    assert kinds(shots) == [("a", "Cancelled")]
    shots.complete({RequestID("a"): b""}, {})
    assert kinds(shots) == []


def test_a_failure_and_a_missing_result_are_typed_errors() -> None:
    shots = scheduler("a", "b")
    shots.next_batch(0.0)
    shots.complete({}, {RequestID("a"): InternalError("out of memory")})
    shots.next_batch(0.0)
    shots.complete({}, {})
    assert kinds(shots) == [("a", "InternalError"), ("b", "InternalError")]


@pytest.mark.conformance(54)
def test_the_queue_is_bounded_and_deadlines_hold_in_it() -> None:
    shots = scheduler("a", "b", "c", max_waiting=2)
    assert kinds(shots) == [("c", "Overloaded")]
    assert shots.next_batch(10.0) is None
    assert kinds(shots) == [("a", "DeadlineExceeded"), ("b", "DeadlineExceeded")]
    with pytest.raises(ValueError, match="max_waiting: 0 is not above 0"):
        OneShotScheduler(max_waiting=0)
