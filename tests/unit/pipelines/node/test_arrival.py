import math
from typing import Any

import pytest

from pipelines.node.arrival import check_arrival, check_window
from pipelines.runtime.messages import EngineReady
from pipelines.types.status import GenerationStatus
from pronghorn.errors import InvalidRequest
from tests.fakes.canary_engine import canary_context

ENGINE = EngineReady(layout={}, vocab_size=1000, max_length=64, startup_s=0.0)


def test_what_the_engine_can_compute_passes() -> None:
    check_arrival(canary_context([0, 999], 62), 0.0, ENGINE)
    check_window(canary_context([0, 999]))


@pytest.mark.parametrize("token", [-1, 1000, 2**40])
def test_a_token_outside_the_engines_vocabulary_is_named(token: int) -> None:
    with pytest.raises(InvalidRequest, match=f"token {token}.*0 to 999"):
        check_arrival(canary_context([1, token, 2]), 1.0, ENGINE)


@pytest.mark.parametrize("budget_s", [math.nan, math.inf, -math.inf])
def test_a_budget_that_is_no_time_is_named(budget_s: float) -> None:
    with pytest.raises(InvalidRequest, match="budget_s"):
        check_arrival(canary_context([1]), budget_s, ENGINE)


@pytest.mark.parametrize(("field", "value"), [("max_length", 65), ("status", GenerationStatus.END_OF_SEQUENCE)])
def test_what_is_beyond_the_engine_or_over_is_named(field: str, value: Any) -> None:
    context = canary_context([1, 2], 8)
    setattr(context, field, value)
    with pytest.raises(InvalidRequest, match=field.replace("_", ".")):
        check_arrival(context, 1.0, ENGINE)


def test_a_window_that_has_moved_or_was_cut_is_refused() -> None:
    moved, cut = canary_context([1, 2, 3]), canary_context([1, 2, 3])
    moved.tokens.skip_processing(1)
    cut.tokens.chunk(1)
    for context in (moved, cut):
        with pytest.raises(InvalidRequest, match="of 3 tokens"):
            check_window(context)
