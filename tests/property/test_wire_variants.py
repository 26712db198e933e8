"""Round trips of every variant with any arrays, and refusal of any other bytes."""

from typing import Any

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipelines.types import wire
from pipelines.types.audio import AudioContext
from pipelines.types.embeddings import EmbeddingsGenerationOutput
from pipelines.types.generation_output import (
    GenerationOutput,
    GenerationUsage,
    OutputAudioContent,
    OutputImageContent,
    OutputVideoContent,
)
from pipelines.types.pixel import PixelContext
from pipelines.types.scheduler_result import SchedulerResult
from pipelines.types.status import GenerationStatus
from pipelines.types.text_output import TextGenerationOutput
from pipelines.types.token_buffer import TokenBuffer
from pipelines.types.vision import ImageMetadata, TextAndVisionContext
from pronghorn.errors import InternalError
from pronghorn.ids import RequestID
from tests.fakes.wire_samples import same, samples

IDS = st.text(max_size=8).map(RequestID)
STATUS = st.sampled_from(GenerationStatus)
NUMBERS = st.floats(allow_nan=False, width=32)
TOKENS = st.lists(st.integers(0, 2**40), min_size=1, max_size=8).map(lambda t: TokenBuffer(np.array(t, dtype=np.int64)))

LARGE = wire.OUT_OF_BAND_BYTES


@st.composite
def arrays(draw: st.DrawFn, dtype: str) -> NDArray[Any]:
    """Of any layout and up to four dimensions; one in four is large enough for a frame of its own."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    if draw(st.integers(0, 3)) == 0:
        shape = [LARGE // np.dtype(dtype).itemsize + draw(st.integers(0, 3)), 1]
    bits = np.random.default_rng(draw(st.integers(0, 2**32))).integers(0, 2, size=shape)
    array = np.asarray(bits * draw(st.integers(1, 100))).astype(dtype)
    if draw(st.booleans()):
        array = np.asfortranarray(array.T)
    return np.asarray(array).astype(array.dtype.newbyteorder(">")) if draw(st.booleans()) else array


def optional(dtype: str) -> st.SearchStrategy[NDArray[Any] | None]:
    return st.none() | arrays(dtype)


@st.composite
def vision_contexts(draw: st.DrawFn) -> TextAndVisionContext:
    tokens, images = [0], []
    for width in draw(st.lists(st.integers(1, 3), max_size=3)):
        image_hash = draw(st.none() | st.integers(0, 2**64 - 1))
        start, end = len(tokens), len(tokens) + width
        pixels = draw(arrays("float32"))
        images.append(ImageMetadata(start_idx=start, end_idx=end, pixel_values=pixels, image_hash=image_hash))
        tokens += [9] * width + draw(st.lists(st.integers(0, 8), max_size=2))
    return TextAndVisionContext(
        max_length=100,
        tokens=TokenBuffer(np.array(tokens, dtype=np.int64)),
        vision_token_ids=[9],
        images=images,
        extra_model_args=draw(st.dictionaries(st.text(max_size=3), arrays("int64") | arrays("bool"), max_size=2)),
    )


PIXEL_CONTEXTS = st.builds(
    PixelContext,
    tokens=TOKENS,
    request_id=IDS,
    status=STATUS,
    mask=optional("bool"),
    negative_tokens=st.none() | TOKENS,
    latents=optional("float32"),
    text_ids=optional("int64"),
    guidance_scale=NUMBERS,
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    input_image=optional("uint8"),
    prompt_images=st.lists(arrays("uint8"), max_size=2),
    vae_images=st.lists(arrays("float32"), max_size=2),
)

AUDIO_CONTEXTS = st.builds(
    AudioContext,
    tokens=TOKENS,
    audio_duration=NUMBERS,
    num_inference_steps=st.integers(1, 99),
    guidance_scale=st.none() | NUMBERS,
    waveform=optional("float32"),
)

CONTENTS = st.one_of(
    *(st.builds(kind, st.binary(max_size=8), st.text(max_size=4)) for kind in (OutputImageContent, OutputVideoContent)),
    st.builds(OutputAudioContent, st.binary(max_size=8)),
)
GENERATION_OUTPUTS = st.builds(
    GenerationOutput,
    request_id=IDS,
    final_status=STATUS,
    output=st.lists(CONTENTS, max_size=3),
    usage=st.none() | st.builds(GenerationUsage, st.integers(0, 99)),
)
EMBEDDINGS = (arrays("float32") | arrays("float16") | arrays("float64")).map(EmbeddingsGenerationOutput)
TEXT_OUTPUTS = st.builds(
    TextGenerationOutput,
    request_id=IDS,
    tokens=st.lists(st.integers(0, 2**40), max_size=4),
    final_status=STATUS,
    log_probabilities=st.none(),
)

RESULTS = [
    (SchedulerResult[TextGenerationOutput], TEXT_OUTPUTS),
    (SchedulerResult[EmbeddingsGenerationOutput], EMBEDDINGS),
    (SchedulerResult[GenerationOutput], GENERATION_OUTPUTS),
]


def little(value: Any) -> Any:
    """As it arrives: arrays are little-endian whatever they were."""
    return value.astype(value.dtype.newbyteorder("<")) if isinstance(value, np.ndarray) else value


def equal(received: Any, sent: Any) -> bool:
    """`same`, but for the byte order of arrays."""
    if isinstance(sent, np.ndarray):
        return same(received, little(sent))
    if isinstance(sent, list):
        return len(received) == len(sent) and all(map(equal, received, sent))
    if isinstance(sent, dict):
        return received.keys() == sent.keys() and all(equal(received[key], sent[key]) for key in sent)
    if isinstance(sent, msgspec.Struct | ImageMetadata | TextAndVisionContext | PixelContext | AudioContext):
        fields = sent.__struct_fields__ if isinstance(sent, msgspec.Struct) else sent.__dataclass_fields__
        return type(received) is type(sent) and all(equal(getattr(received, n), getattr(sent, n)) for n in fields)
    return same(received, sent)


def crosses(sent: Any, type_: Any) -> None:
    frames = wire.encode_frames(sent)
    assert equal(wire.decode_frames(frames, type_), sent)
    assert all(len(frame) >= LARGE for frame in frames[1:])
    assert equal(wire.decode(wire.encode(sent), type_), sent)


@settings(max_examples=120, deadline=None)
@given(sent=st.one_of(vision_contexts(), PIXEL_CONTEXTS, AUDIO_CONTEXTS, EMBEDDINGS, GENERATION_OUTPUTS))
def test_every_variant_loses_nothing(sent: Any) -> None:
    crosses(sent, type(sent))


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_a_batch_of_results_loses_nothing(data: st.DataObject) -> None:
    type_, outputs = data.draw(st.sampled_from(RESULTS))
    result = outputs.map(SchedulerResult.create) | st.just(type_.cancelled()) | st.text().map(type_.failed)
    crosses(data.draw(st.dictionaries(IDS, result, max_size=3)), dict[RequestID, type_])  # type: ignore[valid-type]


@settings(max_examples=150, deadline=None)
@given(index=st.integers(0), flip=st.integers(0, 10_000), bit=st.integers(0, 7), cut=st.integers(0, 2))
def test_damaged_frames_give_an_object_or_one_error(index: int, flip: int, bit: int, cut: int) -> None:
    sample, type_ = samples()[index % len(samples())]
    frames = wire.encode_frames(sample)
    damaged = bytearray(frames[0])
    damaged[flip % len(damaged)] ^= 1 << bit
    try:
        received = wire.decode_frames([bytes(damaged[: len(damaged) - cut]), *frames[1:]], type_)
    except InternalError:
        return
    wire.encode_frames(received)


@settings(max_examples=100, deadline=None)
@given(frames=st.lists(st.binary(max_size=40), max_size=3))
def test_any_bytes_give_one_error(frames: list[bytes]) -> None:
    try:
        wire.decode_frames(frames, PixelContext)
    except InternalError as error:
        assert "PixelContext" in str(error)
    else:
        raise AssertionError("garbage was taken for a PixelContext")
