import pytest

from pipelines.types.audio import AudioGenerationInputs
from pipelines.types.batch import TextGenerationInputs
from pipelines.types.embeddings import EmbeddingsGenerationInputs, EmbeddingsGenerationOutput
from pipelines.types.generation_output import GenerationOutput
from pipelines.types.pipeline import Pipeline, PipelineInputs, PipelineOutput, PipelineOutputsDict
from pipelines.types.pixel import PixelGenerationInputs
from pipelines.types.scheduler_result import SchedulerResult
from pipelines.types.status import GenerationStatus
from pipelines.types.text_output import TextGenerationOutput
from pronghorn.ids import RequestID
from tests.fakes.wire_samples import samples

INPUTS = [TextGenerationInputs, EmbeddingsGenerationInputs, PixelGenerationInputs, AudioGenerationInputs]


class Echo(Pipeline[TextGenerationInputs, TextGenerationOutput]):
    @property
    def max_batch_size(self) -> int:
        return 1

    def execute(self, inputs: TextGenerationInputs) -> PipelineOutputsDict[TextGenerationOutput]:
        active = GenerationStatus.ACTIVE
        return {
            context.request_id: TextGenerationOutput(request_id=context.request_id, tokens=[1], final_status=active)
            for context in inputs.flat_batch
        }

    def release(self, request_id: RequestID) -> None:
        pass


@pytest.mark.conformance(25)
@pytest.mark.parametrize("missing", ["max_batch_size", "execute", "release"])
def test_a_pipeline_has_a_batch_size_executes_and_releases(missing: str) -> None:
    assert Echo().execute(TextGenerationInputs(batches=[])) == {}
    assert missing in Pipeline.__abstractmethods__
    lacking = type("Lacking", (Echo,), {missing: getattr(Pipeline, missing)})
    with pytest.raises(TypeError, match=missing):
        lacking()


@pytest.mark.conformance(25)
@pytest.mark.parametrize("inputs", INPUTS)
def test_every_variants_inputs_are_pipeline_inputs(inputs: type) -> None:
    assert issubclass(inputs, PipelineInputs)


@pytest.mark.conformance(25)
def test_what_says_whether_it_is_done_is_an_output() -> None:
    outputs = (TextGenerationOutput, EmbeddingsGenerationOutput, GenerationOutput, SchedulerResult)
    assert {type(sample) for sample, _ in samples() if isinstance(sample, PipelineOutput)} >= set(outputs)
    assert not isinstance(RequestID(), PipelineOutput)
