import dataclasses

import pytest

from pipelines.types.audio import AudioContext, AudioGenerationInputs
from pipelines.types.context import BaseContext
from pipelines.types.pipeline import PipelineInputs
from pipelines.types.status import GenerationStatus
from tests.fakes.wire_samples import buffer


@pytest.mark.conformance(28)
def test_duration_and_steps_are_required_and_the_rest_has_defaults() -> None:
    context = AudioContext(tokens=buffer(), audio_duration=2.0, num_inference_steps=8)
    assert (context.negative_tokens, context.guidance_scale, context.seed, context.waveform) == (None,) * 4
    assert (context.audio_format, context.status, context.is_done) == ("wav", GenerationStatus.ACTIVE, False)
    assert isinstance(context, BaseContext)
    required = {f.name for f in dataclasses.fields(AudioContext) if f.default is f.default_factory}
    assert required == {"tokens", "audio_duration", "num_inference_steps"}
    with pytest.raises(TypeError, match="audio_duration"):
        AudioContext(tokens=buffer(), num_inference_steps=8)  # type: ignore[call-arg]  # what is tested


@pytest.mark.conformance(28)
def test_inputs_are_one_frozen_batch_and_nothing_else() -> None:
    context = AudioContext(tokens=buffer(), audio_duration=2.0, num_inference_steps=8)
    inputs = AudioGenerationInputs(batch={context.request_id: context})
    assert isinstance(inputs, PipelineInputs) and [f.name for f in dataclasses.fields(inputs)] == ["batch"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        inputs.batch = {}  # type: ignore[misc]  # what is tested
