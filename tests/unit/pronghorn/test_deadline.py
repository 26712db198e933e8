import pytest

from pronghorn.clock import ManualClock
from pronghorn.deadline import Deadline
from pronghorn.errors import DeadlineExceeded


def test_a_deadline_counts_down_and_never_below_zero() -> None:
    clock = ManualClock(100.0)
    deadline = Deadline.after(clock.now_s(), 5.0)
    clock.advance(2.0)
    assert deadline.remaining_s(clock.now_s()) == 3.0
    clock.advance(10.0)
    assert deadline.remaining_s(clock.now_s()) == 0.0 and deadline.passed(clock.now_s())


def test_requiring_time_that_is_gone_says_what_was_being_done() -> None:
    deadline = Deadline.after(0.0, 5.0)
    assert deadline.require(1.0, "queued") == 4.0
    with pytest.raises(DeadlineExceeded, match="while waiting for blocks"):
        deadline.require(6.0, "waiting for blocks")
