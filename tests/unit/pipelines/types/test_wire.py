import numpy as np
import pytest
from numpy.typing import NDArray

from pipelines.runtime.messages import Admit, EngineCommand, EngineMessage, FirstToken, StepReport
from pipelines.types import wire
from pipelines.types.batch import BatchType, CompletedBatchStats
from pipelines.types.eos import EOSTracker
from pipelines.types.frames import OrchestratorFrame, PrefillTarget, Submit
from pipelines.types.log_probabilities import LogProbabilities
from pipelines.types.sampling import SamplingParams
from pipelines.types.text_context import TextContext
from pipelines.types.token_buffer import TokenBuffer
from pronghorn.errors import InternalError
from pronghorn.ids import Fence, Incarnation, NodeName, RequestID

FENCE = Fence(RequestID("r"), 2, Incarnation("0" * 32))


def full_context() -> TextContext:
    """No field has its default."""
    context = TextContext(
        max_length=64,
        tokens=TokenBuffer(np.array([5, 6, 7], dtype=np.int64)),
        request_id=RequestID("r"),
        eos_tracker=EOSTracker(eos_token_ids={1, 2}, eos_sequences=[[3, 4]], eos_stop_strings=["x"]),
        vocab_size=100,
        log_probabilities=2,
        log_probabilities_echo=True,
        ignore_eos=True,
        json_schema="{}",
        grammar="root",
        sampling_params=SamplingParams(
            top_k=3, top_p=0.5, stop=["x"], stop_token_ids=[1], seed=0, max_new_tokens=4, logits_processors=["p"]
        ),
        model_name="m",
        target_endpoint="tcp://host:1",
        external_block_metadata={"version": 1, "instances": [{"name": "a", "blocks": 3, "last_hash": "ff"}]},
        cache_salt="salt",
        cached_prefix_length=16,
        cached_prefix_external_length=8,
        in_reasoning_phase=True,
        trace_carrier={"traceparent": "00-1-2-01"},
    )
    context.update(8, LogProbabilities([-0.5], [{8: -0.5, 9: -3.0}], [8]))
    return context


@pytest.mark.conformance(29)
def test_a_context_crosses_a_frame_whole() -> None:
    submit = Submit(FENCE, full_context(), 2.5, [PrefillTarget(NodeName("p"), "h:1", FENCE.incarnation)])
    received = wire.decode(wire.encode(submit), OrchestratorFrame)
    assert received == submit
    received.context.update(9)
    assert received.context.to_generation_output().tokens == [8, 9]


@pytest.mark.conformance(29)
def test_a_context_crosses_to_the_engine_whole() -> None:
    context = full_context()
    context.reset()
    admit = Admit(FENCE, context, 1.0, prefill_here=True)
    received = wire.decode(wire.encode(admit), EngineCommand)
    assert received == admit
    assert received.context.original_prompt_length == 3 and received.context.tokens.prompt_length == 4


def test_a_seed_drawn_at_random_is_kept() -> None:
    params = SamplingParams()
    assert wire.decode(wire.encode(params), SamplingParams) == params


def test_reports_cross_with_numpy_scalars() -> None:
    stats = CompletedBatchStats(BatchType.CE, 1, 2, 3, 0.5)
    assert wire.decode(wire.encode(stats), CompletedBatchStats) == stats
    event = FirstToken(FENCE, np.int64(7))  # type: ignore[arg-type]  # what an array's element is
    assert wire.decode(wire.encode(event), FirstToken) == FirstToken(FENCE, 7)
    assert StepReport in EngineMessage.__args__  # type: ignore[attr-defined]  # a union


@pytest.mark.conformance(29)
@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.arange(6, dtype=np.int64).reshape(2, 3).T,
        np.zeros((0, 4), dtype=np.uint8),
        np.arange(3, dtype=">i4"),
        np.array([True, False]),
    ],
)
def test_arrays(array: NDArray[np.generic]) -> None:
    received: NDArray[np.generic] = wire.decode(wire.encode(array), np.ndarray)
    assert received.shape == array.shape and received.dtype == array.dtype.newbyteorder("<")
    assert received.flags.writeable
    np.testing.assert_array_equal(received, array)


def test_what_cannot_cross_is_named() -> None:
    with pytest.raises(InternalError, match="object"):
        wire.encode(object())
    with pytest.raises(InternalError, match="ndarray"):
        wire.encode(np.array([object()]))
    with pytest.raises(InternalError, match="int"):
        wire.encode(2**80)


@pytest.mark.parametrize("data", [b"", b"\xc1", wire.encode({"type": "Submit"}), wire.encode({"type": "Bomb"})])
def test_garbage_is_refused_naming_the_type(data: bytes) -> None:
    with pytest.raises(InternalError, match="Submit"):
        wire.decode(data, OrchestratorFrame)


def test_a_context_that_breaks_its_rules_is_refused() -> None:
    context = full_context()
    context.max_length = 2
    with pytest.raises(InternalError, match="TextContext.*min_new_tokens"):
        wire.decode(wire.encode(context), TextContext)


def test_a_buffer_that_makes_no_sense_is_refused() -> None:
    for packed in ((b"\0" * 8, 0, 2, 0, 1, 1), (b"\0" * 7, 0, 1, 0, 1, 1), (b"\0" * 8,)):
        with pytest.raises(InternalError, match="TokenBuffer"):
            wire.decode(wire.encode(packed), TokenBuffer)
    with pytest.raises(InternalError, match="ndarray"):
        wire.decode(wire.encode(("|O", (1,), b"\0" * 8)), np.ndarray)
