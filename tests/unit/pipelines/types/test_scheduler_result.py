import msgspec
import pytest

from pipelines.types import wire
from pipelines.types.scheduler_result import SchedulerResult
from pipelines.types.status import GenerationStatus
from pipelines.types.text_output import TextGenerationOutput
from pronghorn.errors import InternalError
from pronghorn.ids import RequestID


def output(status: GenerationStatus) -> TextGenerationOutput:
    return TextGenerationOutput(request_id=RequestID("r"), tokens=[1], final_status=status)


@pytest.mark.parametrize("status", GenerationStatus)
def test_a_result_is_done_when_its_output_is(status: GenerationStatus) -> None:
    made = SchedulerResult.create(output(status))
    assert (made.is_done, made.result, made.error) == (status.is_done, output(status), None)


def test_cancelled_is_done_without_a_result() -> None:
    made = SchedulerResult[TextGenerationOutput].cancelled()
    assert (made.is_done, made.result, made.error) == (True, None, None)


def test_failed_says_why() -> None:
    made = SchedulerResult[TextGenerationOutput].failed("no such thing")
    assert (made.is_done, made.result, made.error) == (True, None, "no such thing")


def test_one_message_carries_a_batch_by_id() -> None:
    sent = {
        RequestID("a"): SchedulerResult.create(output(GenerationStatus.ACTIVE)),
        RequestID("b"): SchedulerResult[TextGenerationOutput].failed("x"),
    }
    type_ = dict[RequestID, SchedulerResult[TextGenerationOutput]]
    assert wire.decode(wire.encode(sent), type_) == sent
    assert wire.decode_frames(wire.encode_frames(sent), type_) == sent


def test_it_is_untagged_and_a_result_is_not_decoded_without_its_type() -> None:
    made = SchedulerResult.create(output(GenerationStatus.ACTIVE))
    assert set(msgspec.msgpack.decode(wire.encode(made))) == {"is_done", "result", "error"}
    with pytest.raises(InternalError, match="PipelineOutput"):
        wire.decode(wire.encode(made), SchedulerResult)
