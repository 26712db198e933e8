"""A request that moves from node to node, wherever it is cut, says what it would have said on one."""

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.progress import Progress
from pipelines.runtime.sampler import sample
from pipelines.types.eos import EOSTracker
from pipelines.types.frames import Delta
from pipelines.types.log_probabilities import LogProbabilities
from pipelines.types.sampling import SamplingParams
from pipelines.types.status import GenerationStatus
from pipelines.types.text_context import TextContext
from pipelines.types.token_buffer import TokenBuffer
from pipelines.types.wire import decode, encode
from pronghorn.ids import Fence, Incarnation, RequestID

VOCAB = 24
FENCE = Fence(RequestID("r"), 1, Incarnation("a"))

params = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32),
        "temperature": st.sampled_from([0.0, 0.7, 1.3]),
        "top_k": st.sampled_from([-1, 5]),
        "top_p": st.sampled_from([0.8, 1.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.8]),
        "presence_penalty": st.sampled_from([0.0, -0.5]),
        "repetition_penalty": st.sampled_from([1.0, 1.4]),
        "min_new_tokens": st.integers(0, 6),
    }
)


def request(prompt: list[int], new_tokens: int, sampling: dict[str, Any], num_choices: int = 1) -> TextContext:
    return TextContext(
        request_id=FENCE.request_id,
        tokens=TokenBuffer(np.array(prompt, dtype=np.int64)),
        max_length=len(prompt) + max(new_tokens, sampling["min_new_tokens"]),
        eos_tracker=EOSTracker(eos_token_ids={3}, eos_sequences=[[5, 6]]),
        vocab_size=VOCAB,
        log_probabilities=2,
        num_choices=num_choices,
        sampling_params=SamplingParams(**sampling),
    )


def logits(context: TextContext) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A model: a function of all the tokens."""
    digest = hashlib.blake2b(context.tokens.all.tobytes(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "little")).normal(0, 2, VOCAB).astype(np.float32)


def node(context: TextContext) -> Iterator[Delta]:
    """What a node says of a request that was sent to it."""
    first: TextContext = decode(encode(context), TextContext)
    drawn = sample(first, logits(first))
    choices = [first]
    first.update(drawn[0].token, drawn[0].log_probabilities)
    choices += [first.sibling(i, token) for i, token in enumerate(drawn[1:], 1)]
    open_choices = len(choices)
    cached = 1 + context.original_prompt_length
    while open_choices:
        for index, choice in enumerate(choices):
            if choice.num_generated_tokens and choice.tokens.num_outstanding_generated_tokens == 0:
                if choice.is_done:
                    continue
                (token,) = sample(choice, logits(choice))
                choice.update(token.token, token.log_probabilities)
            output = choice.to_generation_output()
            ended = output.final_status if output.is_done else None
            open_choices -= ended is not None
            last = ended is not None and open_choices == 0
            yield Delta(
                FENCE,
                output.tokens,
                status=output.final_status if last else GenerationStatus.ACTIVE,
                num_cached_tokens=cached if index == 0 else None,
                log_probabilities=output.log_probabilities,
                choice=index,
                choice_status=None if last else ended,
            )


Said = list[tuple[list[int], list[LogProbabilities], GenerationStatus]]


def played(context: TextContext, cuts: list[int]) -> tuple[Said, list[int | None]]:
    """What the client gets of each choice where each attempt is cut after so many of its messages; and the cached
    counts."""
    progress = Progress(context)
    said: Said = [([], [], GenerationStatus.ACTIVE) for _ in range(context.num_choices)]
    cached: list[int | None] = []
    for cut in [*cuts, 10_000]:
        if progress.status().is_done:
            said[0] = (*said[0][:2], progress.status())
            return said, cached
        for count, delta in enumerate(node(progress.context())):
            if count == cut:
                break
            assert not progress.diverges(delta)
            if (output := progress.take(delta)) is not None:
                tokens, entries, _ = said[output.choice]
                said[output.choice] = (
                    tokens + output.tokens,
                    entries + (output.log_probabilities or []),
                    output.final_status,
                )
                cached.append(output.num_cached_tokens)
        else:
            return said, cached
    raise AssertionError("the last attempt was not cut")


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6),
    st.integers(1, 14),
    params,
    st.integers(1, 3),
    st.lists(st.integers(0, 20), max_size=4),
)
def test_however_often_it_moves_it_says_the_same(
    prompt: list[int], new_tokens: int, sampling: dict[str, Any], num_choices: int, cuts: list[int]
) -> None:
    whole, _ = played(request(prompt, new_tokens, sampling, num_choices), [])
    moved, cached = played(request(prompt, new_tokens, sampling, num_choices), cuts)
    assert moved == whole
    assert sum(count is not None for count in cached) == 1, "cached tokens are told once"
    for tokens, entries, status in moved:
        assert len(tokens) == len(entries)
        assert status.is_done


def test_a_replay_that_says_something_else_is_found_before_it_leaves() -> None:
    progress = Progress(request([1, 2], 8, {"min_new_tokens": 0}, num_choices=2))
    progress.take(Delta(FENCE, [7, 8], choice=1))
    progress.context()
    assert not progress.diverges(Delta(FENCE, [7], choice=1))
    assert progress.take(Delta(FENCE, [7], choice=1)) is None
    assert progress.diverges(Delta(FENCE, [9], choice=1))
    output = progress.take(Delta(FENCE, [8, 9], choice=1))
    assert output is not None and output.tokens == [9]
