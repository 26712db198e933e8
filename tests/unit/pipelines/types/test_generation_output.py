import msgspec
import pytest

from pipelines.types.generation_output import GenerationOutput, OutputImageContent
from pipelines.types.pipeline import PipelineOutput
from pipelines.types.status import GenerationStatus
from pronghorn.ids import RequestID


@pytest.mark.parametrize("status", GenerationStatus)
def test_it_is_an_output_that_is_done_with_its_status(status: GenerationStatus) -> None:
    made = GenerationOutput(request_id=RequestID("r"), final_status=status, output=[OutputImageContent(b"x")])
    assert isinstance(made, PipelineOutput) and made.is_done == status.is_done
    assert made.usage is None and made.output[0].format == "jpeg"


def test_it_is_frozen() -> None:
    made = GenerationOutput(request_id=RequestID("r"), final_status=GenerationStatus.CANCELLED, output=[])
    with pytest.raises(AttributeError):
        made.output = []  # type: ignore[misc]  # what is tested
    assert GenerationOutput.__struct_config__.tag == "GenerationOutput"
    assert msgspec.structs.fields(GenerationOutput)[0].name == "request_id"
