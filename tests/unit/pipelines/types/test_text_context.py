import dataclasses
from typing import Any

import numpy as np
import pytest

from pipelines.types.eos import EOSTracker
from pipelines.types.log_probabilities import LogProbabilities
from pipelines.types.sampling import SamplingParams
from pipelines.types.speculation import SpeculativeDecodingState
from pipelines.types.status import GenerationStatus
from pipelines.types.text_context import TextContext
from pipelines.types.token_buffer import TokenBuffer
from pronghorn.errors import InternalError, InvalidRequest


def context(prompt: int = 4, max_length: int = 100, **fields: Any) -> TextContext:
    return TextContext(max_length=max_length, tokens=TokenBuffer(np.arange(prompt, dtype=np.int64)), **fields)


def logprobs(token: int) -> LogProbabilities:
    return LogProbabilities([-0.5], [{token: -0.5}], [token])


@pytest.mark.conformance(23)
def test_min_new_tokens_must_fit() -> None:
    context(4, 10, sampling_params=SamplingParams(min_new_tokens=6))
    with pytest.raises(InvalidRequest, match="min_new_tokens is 7; it must be at most 6") as caught:
        context(4, 10, sampling_params=SamplingParams(min_new_tokens=7))
    assert isinstance(caught.value, ValueError)


@pytest.mark.conformance(44)
@pytest.mark.parametrize("endpoint", ["prefill-1", "http://a:1", "tcp://host", "tcp://", "ipc://", ""])
def test_an_endpoint_is_an_address(endpoint: str) -> None:
    with pytest.raises(InvalidRequest, match="target_endpoint"):
        context(target_endpoint=endpoint)


@pytest.mark.parametrize("endpoint", ["tcp://host:1", "ipc:///tmp/x", None])
def test_good_endpoints(endpoint: str | None) -> None:
    assert context(target_endpoint=endpoint).target_endpoint == endpoint


@pytest.mark.conformance(23)
def test_update_on_a_chunk_only_goes_on() -> None:
    made = context(4)
    made.tokens.chunk(3)
    made.update(99)
    assert made.tokens.all.tolist() == [0, 1, 2, 3]
    assert made.tokens.active.tolist() == [3]
    assert made.is_initial_prompt and made.to_generation_output().tokens == []


@pytest.mark.conformance(23)
def test_update_appends_and_streams_once() -> None:
    made = context(4, cached_prefix_length=2, vocab_size=50)
    made.update(10, logprobs(10))
    made.update(11, logprobs(11))
    out = made.to_generation_output()
    assert out.tokens == [10, 11] and out.num_cached_tokens == 2 and not out.is_done
    assert out.log_probabilities == [logprobs(10), logprobs(11)]
    again = made.to_generation_output()
    assert again.tokens == [] and again.log_probabilities is None


@pytest.mark.conformance(23)
@pytest.mark.parametrize(("max_length", "tokens"), [(4, 1), (5, 1), (6, 2)])
def test_ends_at_its_length_but_gives_one_token_at_least(max_length: int, tokens: int) -> None:
    made = context(4, max_length)
    while not made.is_done:
        made.update(7)
    assert made.num_generated_tokens == tokens
    assert made.status is GenerationStatus.MAXIMUM_LENGTH


@pytest.mark.conformance(24)
def test_ends_at_an_eos_id_before_its_length() -> None:
    made = context(4, 5, eos_tracker=EOSTracker(eos_token_ids={7}))
    made.update(7)
    assert made.status is GenerationStatus.END_OF_SEQUENCE
    assert made.to_generation_output().tokens == [7]


@pytest.mark.conformance(24)
def test_a_sequence_ends_it_only_within_what_was_generated() -> None:
    made = context(4, eos_tracker=EOSTracker(eos_sequences=[[3, 9]]))
    made.update(9)
    assert not made.is_done
    made.update(3)
    made.update(9)
    assert made.status is GenerationStatus.END_OF_SEQUENCE


@pytest.mark.conformance(23, 24)
def test_preemption_changes_nothing_that_sampling_sees() -> None:
    made = context(
        4, 8, eos_tracker=EOSTracker(eos_sequences=[[10, 11]]), sampling_params=SamplingParams(min_new_tokens=3)
    )
    made.update(10)
    made.to_generation_output()
    made.reset()
    assert made.tokens.active.tolist() == [0, 1, 2, 3, 10] and made.tokens.generated_length == 0
    assert made.original_prompt_length == 4 and made.num_generated_tokens == 1 and made.below_min_new_tokens
    made.update(11)
    assert made.status is GenerationStatus.END_OF_SEQUENCE
    assert made.to_generation_output().tokens == [11]


def test_a_placeholder_is_held_back_until_it_is_known() -> None:
    made = context(4, eos_tracker=EOSTracker(eos_token_ids={12}), vocab_size=50)
    made.update(10)
    made.update_with_future_token()
    assert made.to_generation_output().tokens == [10]
    assert made.last_realized_token == 10 and made.pending_future_count == 1
    with pytest.raises(ValueError, match="still waits"):
        made.update_with_future_token()
    made.realize_future_token(12, logprobs(12))
    assert made.is_done and made.last_realized_token == 12 and made.pending_future_count == 0
    assert made.to_generation_output().tokens == [12]
    with pytest.raises(ValueError, match="waits for no token"):
        made.realize_future_token(13)


def test_a_reset_drops_the_placeholder() -> None:
    made = context(4)
    made.update(10)
    made.update_with_future_token()
    made.reset()
    assert made.tokens.all.tolist() == [0, 1, 2, 3, 10]


@pytest.mark.conformance(23)
@pytest.mark.parametrize("token", [-1, 50])
def test_a_token_outside_the_vocabulary_is_not_given_out(token: int) -> None:
    made = context(4, vocab_size=50)
    made.update(token)
    with pytest.raises(InternalError, match=str(token)):
        made.to_generation_output()


@pytest.mark.conformance(24)
def test_ignore_eos_keeps_strings_only() -> None:
    tracker = EOSTracker.build([1], [[2, 3]], ["x"], ignore_eos=True)
    assert tracker == EOSTracker(eos_stop_strings=["x"])
    assert EOSTracker.build([1], [[2, 3], []], ["x"], ignore_eos=False).eos_sequences == [[2, 3]]


@pytest.mark.conformance(23)
def test_every_default() -> None:
    made = context(4)
    values = {f.name: getattr(made, f.name) for f in dataclasses.fields(made)}
    for name in ("max_length", "tokens", "request_id", "eos_tracker", "sampling_params"):
        del values[name]
    assert values == {
        "original_prompt_length": 4,
        "vocab_size": None,
        "log_probabilities": 0,
        "log_probabilities_echo": False,
        "ignore_eos": False,
        "json_schema": None,
        "grammar": None,
        "grammar_state": None,
        "model_name": "",
        "status": GenerationStatus.ACTIVE,
        "target_endpoint": None,
        "external_block_metadata": None,
        "cache_salt": None,
        "cached_prefix_length": None,
        "cached_prefix_external_length": 0,
        "in_reasoning_phase": False,
        "reasoning": None,
        "trace_carrier": None,
        "priority": 0,
        "_log_probabilities_data": {},
        "_prompt_log_probabilities": None,
        "num_choices": 1,
        "thinking_markers": None,
        "_is_initial_prompt": True,
        "_is_padding_ctx": False,
        "_draft_offset": 0,
        "_spec_decoding_state": None,
        "_cache_metrics_emitted": False,
        "_concrete": "TextContext",
    }
    assert made.request_id != context(4).request_id and made.eos_tracker == EOSTracker()


def test_a_reset_drops_drafts() -> None:
    drafts = SpeculativeDecodingState(draft_tokens_to_verify=[1], maybe_accepted_draft_tokens=[2])
    made = context(4, _spec_decoding_state=drafts, _draft_offset=1)
    made.reset()
    assert made._spec_decoding_state is None and made._draft_offset == 0
