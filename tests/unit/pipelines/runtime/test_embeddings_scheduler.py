"""The embeddings scheduler as plays; a context is a text, an output its length."""

from collections.abc import Sequence

import pytest

from pipelines.runtime.embeddings_scheduler import EmbeddingsScheduler
from pipelines.runtime.jobs import TRANSITIONS, Done, State
from pipelines.runtime.messages import Failed
from pronghorn.errors import InternalError
from pronghorn.ids import RequestID
from tests.fakes.engine_play import fence


class Play:
    def __init__(self, max_batch_size: int = 2, max_waiting: int = 4, replicas: int = 1) -> None:
        self.scheduler: EmbeddingsScheduler[str, int] = EmbeddingsScheduler(
            max_batch_size=max_batch_size, max_waiting=max_waiting, replicas=replicas
        )
        self.now_s = 0.0

    def submit(self, *names: str, budget_s: float = 10.0) -> None:
        for name in names:
            self.scheduler.submit(fence(name), f"text of {name}", budget_s, self.now_s)
            self.scheduler.check()

    def begin(self) -> list[list[str]] | None:
        """Names of the next batch, by replica."""
        batches = self.scheduler.next_batch(self.now_s)
        self.scheduler.check()
        return batches and [[request_id.value for request_id in batch] for batch in batches]

    def finish(self, *names: str, failed: Sequence[str] = ()) -> None:
        outputs = {RequestID(name): len(name) for name in names}
        self.scheduler.complete(outputs, {RequestID(name): InternalError("not finite") for name in failed})
        self.scheduler.check()

    def answers(self) -> dict[str, int | str]:
        """By name and attempt: outputs, or the kinds of errors."""
        answers = self.scheduler.take_answers()
        said = {f"{a.fence.request_id.value}.{a.fence.attempt}": a for a in answers}
        assert len(said) == len(answers), "a fence was answered twice"
        return {name: a.output if isinstance(a, Done) else a.error.kind for name, a in said.items()}


@pytest.mark.conformance(54)
def test_what_waits_is_computed_in_order_of_arrival_a_batch_at_a_time() -> None:
    play = Play()
    assert play.begin() is None and not play.scheduler.has_work
    play.submit("a", "bb", "ccc")
    assert play.begin() == [["a", "bb"]] and play.scheduler.has_work
    play.finish("bb", "a")
    assert play.answers() == {"a.1": 1, "bb.1": 2}
    assert play.begin() == [["ccc"]]
    play.finish("ccc")
    assert play.answers() == {"ccc.1": 3} and play.begin() is None


def test_a_batch_is_dealt_out_over_the_replicas() -> None:
    play = Play(replicas=2, max_waiting=8)
    play.submit("a", "b", "c", "d", "e")
    assert play.begin() == [["a", "c"], ["b", "d"]]
    play.finish("a", "b", "c", "d")
    assert play.begin() == [["e"], []]


def test_contexts_reach_the_batch_untouched() -> None:
    play = Play()
    play.submit("a")
    assert play.scheduler.next_batch(0.0) == [{RequestID("a"): "text of a"}]


@pytest.mark.conformance(54)
def test_a_request_that_is_cancelled_while_it_waits_is_never_computed() -> None:
    play = Play()
    play.submit("a", "b")
    play.scheduler.cancel(fence("a"))
    assert play.answers() == {"a.1": "Cancelled"}
    assert play.begin() == [["b"]]


@pytest.mark.conformance(54)
def test_a_request_that_is_cancelled_while_it_runs_is_answered_at_once_and_its_output_dropped() -> None:
    play = Play()
    play.submit("a", "b")
    play.begin()
    play.scheduler.cancel(fence("a"))
    play.scheduler.check()
    assert play.answers() == {"a.1": "Cancelled"}
    play.finish("a", "b")
    assert play.answers() == {"b.1": 1}


@pytest.mark.conformance(54)
def test_an_id_that_is_missing_from_the_result_is_told_so() -> None:
    play = Play()
    play.submit("a", "b")
    play.begin()
    play.finish("b")
    (failed, done) = play.scheduler.take_answers()
    assert isinstance(failed, Failed) and failed.error.kind == "InternalError" and "request a" in failed.error.message
    assert done == Done(fence("b"), 1)


def test_a_failure_is_the_requests_own_and_ids_that_nobody_asked_for_are_ignored() -> None:
    play = Play()
    play.submit("a", "b")
    play.begin()
    play.finish("b", "stranger", failed=["a"])
    assert play.answers() == {"a.1": "InternalError", "b.1": 1}


def test_one_too_many_is_refused_and_what_runs_does_not_count() -> None:
    play = Play(max_waiting=2)
    play.submit("a", "b", "c")
    assert play.answers() == {"c.1": "Overloaded"}
    play.begin()
    play.submit("d", "e")
    assert play.answers() == {}


def test_deadlines_end_what_waits_and_what_runs() -> None:
    play = Play(max_batch_size=1)
    play.submit("runs", "late", budget_s=5.0)
    play.submit("waits")
    play.begin()
    play.now_s = 5.0
    play.scheduler.sweep(play.now_s)
    assert play.answers() == {"runs.1": "DeadlineExceeded", "late.1": "DeadlineExceeded"}
    play.finish("runs")
    assert play.answers() == {} and play.begin() == [["waits"]]
    play.submit("short", budget_s=1.0)
    play.finish("waits")
    play.now_s = 6.0
    assert play.begin() is None, "what is late is not begun"


def test_attempts_replace_each_other() -> None:
    play = Play()
    play.submit("a")
    play.submit("a")
    play.begin()
    play.scheduler.submit(fence("a", attempt=2), "again", 10.0, 0.0)
    play.scheduler.submit(fence("a", attempt=0), "late", 10.0, 0.0)
    assert play.answers() == {"a.1": "Cancelled", "a.0": "Cancelled"}
    play.finish("a")
    assert play.answers() == {}, "that output was the first attempt's"
    assert play.begin() == [["a"]]
    play.finish("a")
    assert play.answers() == {"a.2": 1}


@pytest.mark.parametrize("name", ["max_batch_size", "max_waiting", "replicas"])
def test_a_bound_below_1_is_refused_by_name(name: str) -> None:
    bounds = {"max_batch_size": 1, "max_waiting": 1, "replicas": 1, name: 0}
    with pytest.raises(ValueError, match=f"{name}: 0 is not above 0"):
        EmbeddingsScheduler(**bounds)


def test_every_state_but_the_last_can_be_answered_from() -> None:
    assert {state for state, _ in TRANSITIONS} == set(State) - {State.ANSWERED}
