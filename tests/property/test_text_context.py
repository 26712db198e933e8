"""TextContext under chunks, preemptions and crossings: what comes out is what went in, once, and ends where it must."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.types import wire
from pipelines.types.eos import EOSTracker
from pipelines.types.log_probabilities import LogProbabilities
from pipelines.types.sampling import SamplingParams
from pipelines.types.status import GenerationStatus
from pipelines.types.text_context import TextContext
from pipelines.types.token_buffer import TokenBuffer

EOS_ID, EOS_SEQUENCE = 0, [1, 2]


def expected(sampled: list[int], room: int) -> tuple[list[int], GenerationStatus]:
    out: list[int] = []
    for token in sampled:
        out.append(token)
        if token == EOS_ID or out[-2:] == EOS_SEQUENCE:
            return out, GenerationStatus.END_OF_SEQUENCE
        if len(out) >= room:
            return out, GenerationStatus.MAXIMUM_LENGTH
    return out, GenerationStatus.ACTIVE


@settings(max_examples=150, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    sampled=st.lists(st.integers(0, 4), min_size=1, max_size=12),
    room=st.integers(0, 10),
    with_logprobs=st.booleans(),
    data=st.data(),
)
def test_any_history_gives_the_same_tokens(
    prompt: list[int], sampled: list[int], room: int, with_logprobs: bool, data: st.DataObject
) -> None:
    context = TextContext(
        max_length=len(prompt) + room,
        tokens=TokenBuffer(np.array(prompt, dtype=np.int64)),
        eos_tracker=EOSTracker(eos_token_ids={EOS_ID}, eos_sequences=[EOS_SEQUENCE]),
        vocab_size=5,
        sampling_params=SamplingParams(min_new_tokens=min(room, 2)),
    )
    out: list[int] = []
    logged: list[int] = []

    def stream() -> None:
        output = context.to_generation_output()
        out.extend(output.tokens)
        logged.extend(entry.sampled_token_ids[0] for entry in output.log_probabilities or [])

    for token in sampled:
        match data.draw(st.sampled_from(["go", "preempt", "cross", "stream"])):
            case "preempt":
                stream()
                context.reset()
            case "cross":
                context = wire.decode(wire.encode(context), TextContext)
            case "stream":
                stream()
        while context.tokens.active_length > 1 and data.draw(st.booleans()):
            context.tokens.chunk(data.draw(st.integers(1, context.tokens.active_length - 1)))
            context.update(EOS_ID)  # what a chunk's last position would sample is discarded
        entry = LogProbabilities([-1.0], [{token: -1.0}], [token]) if with_logprobs else None
        context.update(token, entry)
        if context.is_done:
            break
    stream()
    assert (out, context.status) == expected(sampled, max(room, 1))
    assert logged == (out if with_logprobs else [])
    assert context.original_prompt_length == len(prompt) and context.num_generated_tokens == len(out)
