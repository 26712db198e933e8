import dataclasses

import msgspec
import numpy as np
import pytest

from pipelines.types import wire
from pipelines.types.context import BaseContext
from pipelines.types.embeddings import EmbeddingsContext, EmbeddingsGenerationInputs, EmbeddingsGenerationOutput
from pipelines.types.pipeline import PipelineInputs, PipelineOutput
from pipelines.types.text_context import TextContext
from pronghorn.ids import RequestID
from tests.fakes.wire_samples import audio_context, buffer


def context() -> TextContext:
    return TextContext(max_length=9, tokens=buffer())


@pytest.mark.conformance(26)
def test_a_text_context_is_an_embeddings_context_and_less_is_not() -> None:
    class Nameless:
        request_id, status, is_done, tokens = RequestID(), None, False, buffer()

    assert isinstance(context(), EmbeddingsContext) and isinstance(audio_context(), EmbeddingsContext)
    assert isinstance(context(), BaseContext)
    assert not isinstance(Nameless(), EmbeddingsContext)


@pytest.mark.conformance(26)
def test_the_batch_merges_the_replicas_and_the_later_wins() -> None:
    first, second, third = context(), context(), context()
    shared, own = RequestID("shared"), RequestID("own")
    inputs = EmbeddingsGenerationInputs(batches=[{shared: first, own: second}, {shared: third}])
    assert inputs.batch == {shared: third, own: second}
    assert inputs.batch[shared] is third and isinstance(inputs, PipelineInputs)
    with pytest.raises(dataclasses.FrozenInstanceError):
        inputs.batches = []  # type: ignore[misc]  # what is tested


@pytest.mark.conformance(26)
def test_an_output_is_tagged_and_always_done() -> None:
    output = EmbeddingsGenerationOutput(np.arange(3, dtype=np.float16))
    assert output.is_done and isinstance(output, PipelineOutput)
    assert msgspec.msgpack.decode(wire.encode(output))["type"] == "EmbeddingsGenerationOutput"
    assert EmbeddingsGenerationOutput.__struct_config__.omit_defaults
