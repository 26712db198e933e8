"""One object of every registered type, no field at its default, and equality that looks into arrays."""

import dataclasses
from typing import Any

import msgspec
import numpy as np

from pipelines.types.audio import AudioContext
from pipelines.types.batch import BatchType, CompletedBatchStats
from pipelines.types.embeddings import EmbeddingsGenerationOutput
from pipelines.types.eos import EOSTracker
from pipelines.types.frames import (
    Abort,
    BlockEvents,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Delta,
    DropPrefixCache,
    Failure,
    Heartbeat,
    NodeReport,
    Outputs,
    PrefillTarget,
    Pulled,
    ResendBlocks,
    Submit,
    TierReport,
)
from pipelines.types.generation_output import (
    GenerationOutput,
    GenerationUsage,
    OutputAudioContent,
    OutputImageContent,
    OutputVideoContent,
)
from pipelines.types.grammar_state import GrammarState
from pipelines.types.handover import FirstToken, Progress, Refusal, Welcome
from pipelines.types.log_probabilities import LogProbabilities
from pipelines.types.pixel import PixelContext
from pipelines.types.reasoning_span import ReasoningSpan
from pipelines.types.sampling import SamplingParams
from pipelines.types.scheduler_result import SchedulerResult
from pipelines.types.speculation import SpeculativeDecodingState
from pipelines.types.status import GenerationStatus
from pipelines.types.text_context import TextContext
from pipelines.types.text_output import TextGenerationOutput
from pipelines.types.token_buffer import TokenBuffer
from pipelines.types.vision import ImageMetadata, TextAndVisionContext
from pronghorn.errors import ErrorRecord
from pronghorn.ids import Fence, Incarnation, NodeName, RequestID

ID = RequestID("r")
FENCE = Fence(ID, 2, Incarnation("0" * 32))
LOGPROBS = LogProbabilities([-0.5], [{8: -0.5, 9: -3.0}], [8])
ERROR = ErrorRecord("Overloaded", "full", "rate_limit_exceeded", "model", 1.5)
SAMPLING = SamplingParams(
    top_k=3,
    top_p=0.5,
    min_p=0.1,
    temperature=0.7,
    thinking_temperature=0.9,
    frequency_penalty=0.2,
    presence_penalty=-0.3,
    repetition_penalty=1.1,
    max_new_tokens=9,
    min_new_tokens=2,
    ignore_eos=True,
    stop=["x"],
    stop_token_ids=[1],
    detokenize=False,
    seed=0,
    logits_processors=["p"],
)


def buffer(*tokens: int) -> TokenBuffer:
    return TokenBuffer(np.array(tokens or (5, 6, 7), dtype=np.int64))


def text_fields() -> dict[str, Any]:
    return {
        "max_length": 64,
        "tokens": buffer(),
        "request_id": ID,
        "eos_tracker": EOSTracker(eos_token_ids={1, 2}, eos_sequences=[[3, 4]], eos_stop_strings=["x"]),
        "vocab_size": 100,
        "log_probabilities": 2,
        "log_probabilities_echo": True,
        "ignore_eos": True,
        "json_schema": "{}",
        "grammar": "root",
        "grammar_state": GrammarState(
            enforced=True,
            tools_forced=True,
            has_json_schema=True,
            triggers=["<t>"],
            triggers_at_start=["{"],
            repeats=False,
        ),
        "sampling_params": SAMPLING,
        "model_name": "m",
        "status": GenerationStatus.CANCELLED,
        "target_endpoint": "tcp://host:1",
        "external_block_metadata": {"version": 1, "instances": [{"name": "a", "blocks": 3, "last_hash": "ff"}]},
        "cache_salt": "salt",
        "cached_prefix_length": 16,
        "cached_prefix_external_length": 8,
        "in_reasoning_phase": True,
        "reasoning": ReasoningSpan(start="<think>", end="</think>", max_tokens=5),
        "trace_carrier": {"traceparent": "00-1-2-01"},
        "_log_probabilities_data": {3: LOGPROBS},
        "_is_initial_prompt": False,
        "_is_padding_ctx": True,
        "_draft_offset": 1,
        "_spec_decoding_state": SpeculativeDecodingState(draft_tokens_to_verify=[1], maybe_accepted_draft_tokens=[2]),
        "_cache_metrics_emitted": True,
    }


def vision_context(side: int = 4) -> TextAndVisionContext:
    """`side` decides whether the pixels fit in the message or get a frame of their own."""
    pixels = np.arange(3 * side * side, dtype=np.float32).reshape(3, side, side)
    return TextAndVisionContext(
        **(text_fields() | {"tokens": buffer(5, 9, 9, 9, 9, 6)}),
        vision_token_ids=[9],
        images=[
            ImageMetadata(start_idx=1, end_idx=3, pixel_values=pixels, image_hash=2**64 - 1),
            ImageMetadata(start_idx=3, end_idx=5, pixel_values=pixels + 1, image_hash=2**63),
        ],
        extra_model_args={"grid": np.array([[1, 2, 2]], dtype=np.int64)},
    )


def pixel_context(latents: int = 4) -> PixelContext:
    mask = np.array([True, True, False])
    image = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    return PixelContext(
        tokens=buffer(),
        request_id=ID,
        model_name="m",
        status=GenerationStatus.END_OF_SEQUENCE,
        mask=mask,
        secondary_tokens=buffer(1),
        secondary_mask=mask,
        negative_tokens=buffer(2),
        negative_mask=mask,
        secondary_negative_tokens=buffer(3),
        secondary_negative_mask=mask,
        timesteps=np.linspace(1, 0, 4, dtype=np.float32),
        sigmas=np.linspace(1, 0, 4, dtype=np.float32),
        latents=np.ones((1, latents, latents), dtype=np.float32),
        latent_image_ids=np.zeros((latents, 3), dtype=np.float32),
        text_ids=np.arange(3, dtype=np.int64),
        negative_text_ids=np.arange(2, dtype=np.int64),
        height=512,
        width=256,
        num_inference_steps=4,
        num_warmup_steps=1,
        num_images_per_prompt=2,
        guidance_scale=1.5,
        true_cfg_scale=2.5,
        strength=0.5,
        cfg_normalization=True,
        cfg_truncation=0.5,
        seed=0,
        output_format="png",
        input_image=image,
        prompt_images=[image, image],
        vae_images=[np.ones((3, 2, 2), dtype=np.float32)],
    )


def audio_context(samples: int = 8) -> AudioContext:
    return AudioContext(
        tokens=buffer(),
        audio_duration=1.5,
        num_inference_steps=4,
        negative_tokens=buffer(1),
        request_id=ID,
        model_name="m",
        status=GenerationStatus.END_OF_SEQUENCE,
        guidance_scale=2.0,
        seed=0,
        audio_format="flac",
        waveform=np.zeros((2, samples), dtype=np.float32),
    )


def text_output() -> TextGenerationOutput:
    return TextGenerationOutput(
        request_id=ID,
        tokens=[1, 2],
        final_status=GenerationStatus.MAXIMUM_LENGTH,
        log_probabilities=[LOGPROBS],
        num_cached_tokens=3,
    )


def generation_output() -> GenerationOutput:
    contents = [OutputImageContent(b"i", "png"), OutputVideoContent(b"v", "webm"), OutputAudioContent(b"a", "flac")]
    return GenerationOutput(
        request_id=ID,
        final_status=GenerationStatus.END_OF_SEQUENCE,
        output=contents,  # type: ignore[arg-type]  # a list of all three
        usage=GenerationUsage(3, 4),
    )


def samples() -> list[tuple[Any, Any]]:
    """(object, the type to decode it at)."""
    submit = Submit(FENCE, TextContext(**text_fields()), 2.5, [PrefillTarget(NodeName("p"), "h:1", FENCE.incarnation)])
    submit = msgspec.structs.replace(submit, only_these=True, key="mine", deaths=1)
    delta = Delta(FENCE, [1], GenerationStatus.CANCELLED, 4, [LOGPROBS])
    report = NodeReport(
        *(NodeName("n"), "decode", "m", "h:1", FENCE.incarnation, True, *range(1, 9), True, 7, {"a": 1}),
        tiers={"host": TierReport(5, 1e9)},
    )
    stats = CompletedBatchStats(BatchType.CE, 1, 2, 3, 0.5, 6, 7, 5, 1.5, 2, [0.5, 0.25], 0.125)
    plain = [
        TextContext(**text_fields()),
        vision_context(),
        pixel_context(),
        audio_context(),
        text_output(),
        EmbeddingsGenerationOutput(np.arange(4, dtype=np.float32)),
        generation_output(),
        ID,
        SAMPLING,
        EOSTracker(eos_token_ids={1}, eos_sequences=[[2, 3]], eos_stop_strings=["x"]),
        LOGPROBS,
        stats,
        submit,
        Abort(FENCE),
        DropPrefixCache(),
        ResendBlocks(),
        BlockEvents(
            3,
            [BlocksStored(1, bytes(8)), BlocksRemoved(bytes(8)), BlocksCleared()],
            True,
            True,
            {"host": [BlocksStored(None, bytes(8))]},
        ),
        Outputs([delta], [Failure(FENCE, ERROR)], [Pulled(FENCE, FENCE.incarnation, ERROR)]),
        Heartbeat(report),
        Welcome(b"hello"),
        Progress(),
        FirstToken(7, LOGPROBS),
        Refusal(ERROR),
    ]
    result = SchedulerResult(is_done=True, result=text_output(), error="late")
    return [(sample, type(sample)) for sample in plain] + [(result, SchedulerResult[TextGenerationOutput])]


def same(left: Any, right: Any) -> bool:
    """Equal in type and in every field, arrays by dtype, shape and values."""
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if dataclasses.is_dataclass(left) and not isinstance(left, type):
        return all(same(getattr(left, f.name), getattr(right, f.name)) for f in dataclasses.fields(left))
    if isinstance(left, msgspec.Struct):
        return all(same(getattr(left, name), getattr(right, name)) for name in left.__struct_fields__)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return bool(left == right)
