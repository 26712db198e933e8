import threading
from typing import Any

import pytest

from pipelines.runtime.padding import padding_context
from pipelines.runtime.replicated_pipeline import ReplicatedPipeline
from pipelines.runtime.request_failures import RequestFailures
from pipelines.types.batch import TextGenerationInputs
from pipelines.types.pipeline import Pipeline
from pipelines.types.text_context import TextContext
from pipelines.types.text_output import TextGenerationOutput
from pronghorn.errors import InternalError, PronghornError
from pronghorn.ids import RequestID
from tests.fakes.canary_engine import canary_context

Inputs = TextGenerationInputs[TextContext]


class Scripted(Pipeline[Inputs, TextGenerationOutput]):
    """Says `token` for each of its contexts; notes its batches and the threads that call it."""

    def __init__(self, token: int, meet: threading.Barrier | None = None) -> None:
        self.token = token
        self.meet = meet
        self.raises: Exception | None = None
        self.fails: dict[RequestID, PronghornError] = {}
        self.batches: list[Inputs] = []
        self.released: list[RequestID] = []
        self.threads: set[int] = set()

    @property
    def max_batch_size(self) -> int:
        return 4

    def execute(self, inputs: Inputs) -> dict[RequestID, TextGenerationOutput]:
        self.threads.add(threading.get_ident())
        self.batches.append(inputs)
        if self.meet is not None:
            self.meet.wait(5.0)
        if self.raises is not None:
            raise self.raises
        ids = [context.request_id for context in inputs.flat_batch]
        outputs = {i: output(i, self.token) for i in ids if i not in self.fails}
        if failed := {i: error for i, error in self.fails.items() if i in ids}:
            raise RequestFailures(failed, outputs)
        return outputs

    def release(self, request_id: RequestID) -> None:
        self.threads.add(threading.get_ident())
        self.released.append(request_id)


def output(request_id: RequestID, token: int) -> TextGenerationOutput:
    context = canary_context([1], request_id=request_id.value)
    context.update(token)
    return context.to_generation_output()


def context(name: str) -> TextContext:
    return canary_context([1, 2], request_id=name)


def tokens(outputs: dict[RequestID, Any]) -> dict[str, list[int]]:
    return {request_id.value: output.tokens for request_id, output in outputs.items()}


def test_each_replica_computes_its_inner_batch_side_by_side_on_its_own_thread() -> None:
    meet = threading.Barrier(2)
    replicas = [Scripted(7, meet), Scripted(8, meet)]
    pipeline = ReplicatedPipeline(replicas)
    for _ in range(2):
        outputs = pipeline.execute(Inputs([[context("a"), context("b")], [context("c")]]))
        assert tokens(outputs) == {"a": [7], "b": [7], "c": [8]}
    pipeline.release(RequestID("a"))
    assert [replica.released for replica in replicas] == [[RequestID("a")]] * 2
    assert all(len(replica.threads) == 1 for replica in replicas) and replicas[0].threads != replicas[1].threads
    assert pipeline.max_batch_size == 8


def test_a_replica_without_work_is_not_called() -> None:
    replicas = [Scripted(7), Scripted(8)]
    assert tokens(ReplicatedPipeline(replicas).execute(Inputs([[], [context("c")]]))) == {"c": [8]}
    assert replicas[0].batches == []


def test_padding_is_computed_and_says_nothing() -> None:
    replicas = [Scripted(7), Scripted(8)]
    inputs = Inputs([[context("a")], [padding_context()]])
    assert tokens(ReplicatedPipeline(replicas).execute(inputs)) == {"a": [7]}
    assert replicas[1].batches[0].flat_batch == inputs.batches[1]


def test_failures_of_single_requests_are_gathered_from_every_replica() -> None:
    replicas = [Scripted(7), Scripted(8)]
    replicas[0].fails[RequestID("a")] = InternalError("one")
    replicas[1].fails[RequestID("c")] = InternalError("two")
    with pytest.raises(RequestFailures) as caught:
        ReplicatedPipeline(replicas).execute(Inputs([[context("a"), context("b")], [context("c")]]))
    assert {request_id.value for request_id in caught.value.failures} == {"a", "c"}
    assert tokens(caught.value.outputs) == {"b": [7]}


def test_what_breaks_one_replica_breaks_the_step_once_the_others_have_ended() -> None:
    replicas = [Scripted(7), Scripted(8)]
    replicas[0].raises = ArithmeticError("the device is lost")
    with pytest.raises(ArithmeticError, match="the device is lost"):
        ReplicatedPipeline(replicas).execute(Inputs([[context("a")], [context("c")]]))
    assert len(replicas[1].batches) == 1
