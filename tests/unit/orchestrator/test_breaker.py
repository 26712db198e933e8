import itertools

import pytest

from orchestrator.breaker import TRANSITIONS, Breaker, BreakerEvent, BreakerPolicy, BreakerState, counts_as_failure
from pronghorn.errors import (
    DeadlineExceeded,
    EndpointNotFound,
    EngineDied,
    InsufficientBlocks,
    InternalError,
    InvalidRequest,
    NodeLost,
    NodeRefused,
    NoPrefill,
    Overloaded,
    PronghornError,
    RequestInProgress,
    TransferFailed,
)

POLICY = BreakerPolicy(failures=3, open_min_s=1.0, open_max_s=4.0)


def opened(at_s: float = 0.0) -> Breaker:
    breaker = Breaker(POLICY)
    for _ in range(3):
        breaker.failed(at_s)
    return breaker


def test_the_table_is_complete() -> None:
    assert set(TRANSITIONS) == set(itertools.product(BreakerState, BreakerEvent))


def test_only_failures_in_a_row_open_it() -> None:
    breaker = Breaker(POLICY)
    for _ in range(5):
        breaker.failed(0.0)
        breaker.failed(0.0)
        assert breaker.refusal(0.0) is None
        breaker.succeeded(0.0)
    breaker.failed(0.0)
    breaker.failed(0.0)
    breaker.failed(0.0)
    assert breaker.refusal(0.5) == "breaker open after 3 failures, for 0.5 s more"


@pytest.mark.field("sglang#31206")
def test_after_its_time_one_request_at_a_time_tries_the_node() -> None:
    breaker = opened()
    assert breaker.refusal(0.99) is not None
    assert breaker.refusal(1.0) is None
    breaker.asked(1.0)
    assert breaker.refusal(1.0) == "breaker half open, one request tries it"
    breaker.let_go()
    assert breaker.refusal(1.0) is None, "that request has not tried it after all"
    breaker.asked(1.0)
    breaker.succeeded(1.1)
    assert breaker.state is BreakerState.CLOSED
    assert breaker.refusal(1.1) is None


def test_each_trial_that_fails_doubles_the_time_up_to_a_bound() -> None:
    breaker, now_s = opened(), 0.0
    for open_s in (1.0, 2.0, 4.0, 4.0):
        assert breaker.refusal(now_s + open_s - 0.01) is not None
        now_s += open_s
        assert breaker.refusal(now_s) is None
        breaker.asked(now_s)
        breaker.failed(now_s)
    breaker.asked(now_s + 4.0)
    breaker.succeeded(now_s + 4.0)
    for _ in range(3):
        breaker.failed(100.0)
    assert breaker.refusal(101.0) is None, "a success brings back the shortest time"


def test_what_began_before_it_opened_changes_nothing() -> None:
    breaker = opened()
    breaker.succeeded(0.5)
    assert breaker.refusal(0.5) is not None
    breaker.failed(0.9)
    assert breaker.refusal(1.0) is None, "a late failure does not hold it open"


@pytest.mark.field("sglang#31206")
def test_a_node_that_nobody_asks_comes_back_by_itself() -> None:
    assert opened().refusal(1e6) is None


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        (EngineDied("x"), True),
        (NodeLost("x"), True),
        (NodeRefused("x"), True),
        (TransferFailed("x"), True),
        (InternalError("x"), True),
        (InvalidRequest("x"), False),
        (EndpointNotFound("x"), False),
        (RequestInProgress("x"), False),
        (Overloaded("x"), False),
        (InsufficientBlocks("x"), False),
        (NoPrefill("x"), False),
        (DeadlineExceeded("x"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_whose_fault_an_error_is(error: PronghornError, counts: bool) -> None:
    assert counts_as_failure(error) is counts
