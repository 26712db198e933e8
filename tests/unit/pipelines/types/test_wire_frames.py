from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from pipelines.types import wire
from pipelines.types.embeddings import EmbeddingsGenerationOutput
from pipelines.types.frames import Abort, OrchestratorFrame, Submit
from pipelines.types.pixel import PixelContext, PixelGenerationRequest
from pipelines.types.scheduler_result import SchedulerResult
from pipelines.types.text_context import TextContext
from pipelines.types.text_output import TextGenerationOutput
from pipelines.types.text_request import ImageContentPart, TextGenerationRequest, TextGenerationRequestMessage
from pipelines.types.vision import TextAndVisionContext
from pronghorn.errors import InternalError
from pronghorn.ids import RequestID
from tests.fakes.wire_samples import FENCE, audio_context, pixel_context, same, samples, text_fields, vision_context

SAMPLES = [pytest.param(sample, type_, id=type(sample).__name__) for sample, type_ in samples()]
EMBEDDING_FLOATS = wire.OUT_OF_BAND_BYTES // 4


def embedding(size: int) -> EmbeddingsGenerationOutput:
    return EmbeddingsGenerationOutput(np.arange(size, dtype=np.float32))


def test_there_is_a_sample_of_every_registered_type() -> None:
    assert {type(sample).__name__ for sample, _ in samples()} == set(wire.REGISTRY)


@pytest.mark.conformance(29)
@pytest.mark.parametrize(("sample", "type_"), SAMPLES)
def test_every_registered_type_crosses_whole_either_way(sample: Any, type_: Any) -> None:
    assert same(wire.decode_frames(wire.encode_frames(sample), type_), sample)
    assert same(wire.decode(wire.encode(sample), type_), sample)


@pytest.mark.conformance(29)
@pytest.mark.parametrize(("floats", "frames"), [(EMBEDDING_FLOATS - 1, 1), (EMBEDDING_FLOATS, 2)])
def test_an_array_of_64_kib_has_a_frame_of_its_own(floats: int, frames: int) -> None:
    sent = embedding(floats)
    made = wire.encode_frames(sent)
    assert len(made) == frames
    received = wire.decode_frames(made, EmbeddingsGenerationOutput)
    assert same(received, sent)
    assert received.embeddings.flags.writeable == (frames == 1)
    if frames == 2:
        assert made[1] == sent.embeddings.tobytes()
        assert np.shares_memory(received.embeddings, np.frombuffer(made[1], dtype=np.uint8))


@pytest.mark.conformance(29)
def test_large_arrays_cross_in_every_variant() -> None:
    for sent, large in ((vision_context(96), 2), (pixel_context(200), 1), (audio_context(10_000), 1)):
        frames = wire.encode_frames(sent)
        assert len(frames) == 1 + large and len(frames[0]) < wire.OUT_OF_BAND_BYTES
        assert same(wire.decode_frames(frames, type(sent)), sent)


def test_a_batch_of_results_is_one_message() -> None:
    sent = {RequestID(str(i)): SchedulerResult.create(embedding(EMBEDDING_FLOATS + i)) for i in range(3)}
    frames = wire.encode_frames(sent)
    assert len(frames) == 4
    assert same(wire.decode_frames(frames, dict[RequestID, SchedulerResult[EmbeddingsGenerationOutput]]), sent)
    ids = [RequestID("a"), RequestID("b")]
    assert wire.decode_frames(wire.encode_frames(ids), list[RequestID]) == ids


def test_a_union_takes_each_of_its_types() -> None:
    assert wire.decode_frames(wire.encode_frames(Abort(FENCE)), OrchestratorFrame) == Abort(FENCE)
    either = TextContext | TextAndVisionContext
    assert same(wire.decode_frames(wire.encode_frames(vision_context()), either), vision_context())
    assert isinstance(wire.decode_frames(wire.encode_frames(TextContext(**text_fields())), either), TextContext)


class Foreign(msgspec.Struct):
    pass


FOREIGN = [Foreign(), [Foreign()], {RequestID("a"): Foreign()}, "text", None, (RequestID("a"),)]


@pytest.mark.conformance(29)
@pytest.mark.parametrize("obj", [*FOREIGN, SchedulerResult(is_done=True, result=Foreign())])  # type: ignore[type-var]
def test_what_is_not_registered_is_refused_by_name_when_it_is_sent(obj: object) -> None:
    with pytest.raises(InternalError, match=r"^(Foreign|str|NoneType|tuple) is not a type of the wire"):
        wire.encode_frames(obj)


@pytest.mark.conformance(29)
@pytest.mark.parametrize("type_", [Foreign, list[Foreign], SchedulerResult[Foreign], Foreign | TextContext, str, Any])
def test_what_is_not_registered_is_refused_by_name_when_it_is_expected(type_: Any) -> None:
    with pytest.raises(InternalError, match=r"(Foreign|str|Any) is not a type of the wire"):
        wire.decode_frames(wire.encode_frames(RequestID("a")), type_)


@pytest.mark.conformance(29)
def test_an_unknown_or_unexpected_type_that_arrives_is_refused_by_name() -> None:
    unknown = msgspec.msgpack.encode(("Bomb", {}))
    with pytest.raises(InternalError, match="as TextContext: a Bomb arrived, which is not a type of the wire"):
        wire.decode_frames([unknown], TextContext)
    with pytest.raises(InternalError, match="as TextContext: a PixelContext arrived"):
        wire.decode_frames(wire.encode_frames(pixel_context()), TextContext)


@pytest.mark.conformance(29)
def test_a_context_is_never_decoded_as_a_poorer_class() -> None:
    with pytest.raises(InternalError, match="as TextContext: a TextAndVisionContext arrived"):
        wire.decode_frames(wire.encode_frames(vision_context()), TextContext)
    with pytest.raises(InternalError, match=r"TextAndVisionContext.*\$\.context\._concrete"):
        wire.decode(wire.encode(Submit(FENCE, vision_context(), 1.0)), OrchestratorFrame)
    with pytest.raises(InternalError, match="as TextAndVisionContext.*'TextContext'"):
        wire.decode(wire.encode(TextContext(**text_fields())), TextAndVisionContext)


def requests() -> list[Any]:
    message = TextGenerationRequestMessage(role="user", content=[ImageContentPart()])
    decoded = np.zeros((2, 2, 3), dtype=np.uint8)
    return [
        TextGenerationRequest(RequestID(), "m", prompt="x"),
        TextGenerationRequest(RequestID(), "m", messages=[message], images=[b"png"], decoded_images=[decoded]),
        PixelGenerationRequest(RequestID(), "m", "x"),
    ]


@pytest.mark.conformance(29)
@pytest.mark.parametrize("request_", requests(), ids=["text", "images", "pixel"])
def test_a_request_and_its_decoded_images_never_leave_the_process(request_: Any) -> None:
    name = type(request_).__name__
    with pytest.raises(InternalError, match=f"{name} does not leave the process"):
        wire.encode(request_)
    with pytest.raises(InternalError, match=f"{name} is not a type of the wire"):
        wire.encode_frames(request_)
    with pytest.raises(InternalError, match=f"{name} is not a type of the wire"):
        wire.encode_frames([request_])
    assert name not in wire.REGISTRY


def first_frame(array: Any) -> bytes:
    body = {"type": "EmbeddingsGenerationOutput", "embeddings": array}
    return msgspec.msgpack.encode(("EmbeddingsGenerationOutput", body))


BAD_ARRAYS: list[tuple[Any, list[bytes], str]] = [
    (("<f4", (2,), 1), [], "frame 1 of 1"),
    (("<f4", (2,), 0), [b"\0" * 8], "frame 0 of 2"),
    (("<f4", (2,), 2), [b"\0" * 8], "frame 2 of 2"),
    (("<f4", (3,), 1), [b"\0" * 8], "8 bytes are not an array"),
    (("<f4", (2,), b"\0" * 7), [], "7 bytes are not an array"),
    (("<f4", (-1,), b"\0" * 8), [], r"\(-1,\)"),
    (("|O", (1,), b"\0" * 8), [], r"\|O has no place"),
    (("<c8", (1,), b"\0" * 8), [], "<c8 has no place"),
    (("<i8", (1,), b"\0" * 8), [], "<i8 stands where one of floating is declared"),
    (["<f4"], [], "EmbeddingsGenerationOutput"),
]


@pytest.mark.parametrize(("array", "rest", "reason"), BAD_ARRAYS)
def test_an_array_that_makes_no_sense_is_refused(array: Any, rest: list[bytes], reason: str) -> None:
    with pytest.raises(InternalError, match=reason):
        wire.decode_frames([first_frame(array), *rest], EmbeddingsGenerationOutput)


@pytest.mark.parametrize("frames", [[], [b""], [b"\xc1"], [msgspec.msgpack.encode("TextContext")]])
def test_garbage_is_refused_naming_the_expected_type(frames: list[bytes]) -> None:
    with pytest.raises(InternalError, match="as TextContext"):
        wire.decode_frames(frames, TextContext)


def test_bytes_nested_without_end_are_refused() -> None:
    body = msgspec.msgpack.encode("external_block_metadata") + b"\x81\xa1a" + b"\x91" * 100_000 + b"\x01"
    with pytest.raises(InternalError, match="as TextContext"):
        wire.decode(b"\x81" + body, TextContext)
    with pytest.raises(InternalError, match="as TextContext"):
        wire.decode_frames([b"\x92" + msgspec.msgpack.encode("TextContext") + b"\x81" + body], TextContext)


def test_an_array_in_a_frame_is_refused_where_there_are_no_frames() -> None:
    body = msgspec.msgpack.encode({"type": "EmbeddingsGenerationOutput", "embeddings": ("<f4", (2,), 1)})
    with pytest.raises(InternalError, match="there are no frames"):
        wire.decode(body, EmbeddingsGenerationOutput)


@pytest.mark.parametrize("array", [np.array([1j]), np.array(["x"]), np.array([object()]), np.zeros(9000, "m8[s]")])
def test_an_array_that_is_not_plain_is_refused_large_or_small(array: NDArray[Any]) -> None:
    context = PixelContext(tokens=vision_context().tokens, latents=array)
    for encode in (wire.encode, wire.encode_frames):
        with pytest.raises(InternalError, match="PixelContext.*has no place on the wire"):
            encode(context)


def test_a_frame_may_be_a_writable_view() -> None:
    frames = [memoryview(bytearray(frame)) for frame in wire.encode_frames(embedding(EMBEDDING_FLOATS))]
    assert wire.decode_frames(frames, EmbeddingsGenerationOutput).embeddings.flags.writeable


def test_a_text_output_is_not_taken_for_another_result() -> None:
    output = next(sample for sample, _ in samples() if isinstance(sample, TextGenerationOutput))
    frames = wire.encode_frames(SchedulerResult.create(output))
    with pytest.raises(InternalError, match="EmbeddingsGenerationOutput"):
        wire.decode_frames(frames, SchedulerResult[EmbeddingsGenerationOutput])
