import pytest

from pipelines.types.log_probabilities import LogProbabilities
from pipelines.types.pipeline import PipelineOutput
from pipelines.types.status import GenerationStatus
from pipelines.types.text_output import TextGenerationOutput
from pronghorn.ids import RequestID

ID = RequestID("r")


def output(
    tokens: list[int], logprobs: bool = False, status: GenerationStatus = GenerationStatus.ACTIVE
) -> TextGenerationOutput:
    entries = [LogProbabilities([-1.0], [{t: -1.0}], [t]) for t in tokens] if logprobs else None
    return TextGenerationOutput(
        request_id=ID, tokens=tokens, final_status=status, log_probabilities=entries, num_cached_tokens=len(tokens)
    )


@pytest.mark.conformance(21)
def test_nothing_to_merge() -> None:
    with pytest.raises(ValueError):
        TextGenerationOutput.merge([])


@pytest.mark.conformance(21)
def test_one_is_returned_as_it_is() -> None:
    only = output([1])
    assert TextGenerationOutput.merge([only]) is only


@pytest.mark.conformance(21)
def test_many_become_one() -> None:
    merged = TextGenerationOutput.merge([output([1, 2], True), output([3], True, GenerationStatus.END_OF_SEQUENCE)])
    assert merged.tokens == [1, 2, 3] and merged.is_done and merged.num_cached_tokens == 2
    assert merged.log_probabilities is not None and len(merged.log_probabilities) == 3
    assert TextGenerationOutput.merge([output([1]), output([2])]).log_probabilities is None


@pytest.mark.conformance(21)
def test_log_probabilities_on_some_only_are_refused() -> None:
    with pytest.raises(ValueError, match="1 of 2"):
        TextGenerationOutput.merge([output([1], True), output([2])])


@pytest.mark.conformance(21)
def test_done_is_everything_but_active() -> None:
    assert [status for status in GenerationStatus if not status.is_done] == [GenerationStatus.ACTIVE]
    assert isinstance(output([1]), PipelineOutput)
