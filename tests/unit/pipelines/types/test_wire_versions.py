"""Protocol versions N and N-1 read each other: fields come with defaults, and fields of a later version are ignored."""

import dataclasses
from typing import Any

import msgspec
import pytest

from pipelines.types import wire
from pipelines.types.frames import Abort, Delta, NodeReport, OrchestratorFrame, PrefillTarget
from pipelines.types.generation_output import GenerationUsage
from pipelines.types.grammar_state import GrammarState
from pipelines.types.speculation import SpeculativeDecodingState
from pipelines.types.vision import ImageMetadata
from pronghorn.errors import ErrorRecord
from pronghorn.ids import Fence, Incarnation, NodeName, RequestID
from tests.fakes.wire_samples import FENCE, same, samples

SAMPLES = [pytest.param(sample, type_, id=type(sample).__name__) for sample, type_ in samples()]

REQUIRED: dict[type, set[str]] = {
    RequestID: set(),
    Fence: {"request_id", "attempt", "incarnation"},
    ErrorRecord: {"kind", "message"},
    PrefillTarget: {"name", "address", "incarnation"},
    Delta: {"fence", "tokens"},
    NodeReport: {
        *("name", "role", "model", "address", "incarnation", "healthy", "in_flight", "total_blocks", "free_blocks"),
        *("held_blocks", "cached_blocks", "waiting", "running", "awaiting_blocks"),
    },
    GenerationUsage: set(),
    GrammarState: set(),
    SpeculativeDecodingState: set(),
    ImageMetadata: {"start_idx", "end_idx", "pixel_values"},
    **{
        wire.REGISTRY[name]: set(fields.split())
        for name, fields in {
            "TextContext": "max_length tokens",
            "TextAndVisionContext": "max_length tokens vision_token_ids",
            "PixelContext": "tokens",
            "AudioContext": "tokens audio_duration num_inference_steps",
            "TextGenerationOutput": "request_id tokens final_status",
            "EmbeddingsGenerationOutput": "embeddings",
            "GenerationOutput": "request_id final_status output",
            "SchedulerResult": "is_done",
            "SamplingParams": "",
            "EOSTracker": "",
            "LogProbabilities": "token_log_probabilities top_log_probabilities sampled_token_ids",
            "CompletedBatchStats": "batch_type batch_size num_input_tokens num_context_tokens execution_time_s",
            "Submit": "fence context budget_s",
            "Abort": "fence",
            "DropPrefixCache": "",
            "ResendBlocks": "",
            "BlockEvents": "sequence events",
            "Outputs": "deltas",
            "Heartbeat": "report",
            "Welcome": "hello",
            "Progress": "",
            "FirstToken": "token",
            "Refusal": "error",
        }.items()
    },
}
"""What protocol version 1 cannot do without. It never grows: a field that comes later has a default."""


def required(type_: type) -> set[str]:
    if issubclass(type_, msgspec.Struct):
        return {f.name for f in msgspec.structs.fields(type_) if f.required}
    return {f.name for f in dataclasses.fields(type_) if f.init and f.default is f.default_factory}


@pytest.mark.conformance(29)
def test_every_type_is_in_the_table() -> None:
    assert set(wire.REGISTRY.values()) <= set(REQUIRED)


@pytest.mark.conformance(29)
@pytest.mark.parametrize("type_", REQUIRED, ids=lambda type_: type_.__name__)
def test_a_new_field_has_a_default(type_: type) -> None:
    assert required(type_) == REQUIRED[type_], "what an older version sends would not be read any more"


def fields_of(sample: Any) -> dict[str, Any]:
    return dict(msgspec.msgpack.decode(wire.encode(sample), strict=False))


@pytest.mark.conformance(29)
@pytest.mark.parametrize(("sample", "type_"), SAMPLES)
def test_a_record_without_the_newer_fields_is_read_with_their_defaults(sample: Any, type_: Any) -> None:
    needed = REQUIRED[type(sample)] | {"type"}
    old = {name: value for name, value in fields_of(sample).items() if name in needed}
    received = wire.decode(wire.encode(old), type_)
    assert all(same(getattr(received, name), getattr(sample, name)) for name in REQUIRED[type(sample)])


@pytest.mark.conformance(29)
@pytest.mark.parametrize(("sample", "type_"), SAMPLES)
def test_a_field_of_the_next_version_is_ignored(sample: Any, type_: Any) -> None:
    newer = fields_of(sample) | {"field_of_the_next_version": {"a": [1]}}
    assert same(wire.decode(wire.encode(newer), type_), sample)
    assert same(wire.decode_frames([wire.encode((type(sample).__name__, newer, "more"))], type_), sample)


def test_a_fence_may_grow_at_its_end() -> None:
    newer = {"type": "Abort", "fence": [{"value": "r"}, 2, FENCE.incarnation, "later"]}
    assert wire.decode(wire.encode(newer), OrchestratorFrame) == Abort(
        Fence(RequestID("r"), 2, Incarnation(FENCE.incarnation))
    )


def test_nested_records_grow_too() -> None:
    newer = {"name": "p", "address": "h:1", "incarnation": "i", "zone": "a"}
    assert wire.decode(wire.encode(newer), PrefillTarget) == PrefillTarget(NodeName("p"), "h:1", Incarnation("i"))
