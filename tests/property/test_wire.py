"""Round trips over any valid parameters and contexts, and refusal of any other bytes."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.types import wire
from pipelines.types.eos import EOSTracker
from pipelines.types.frames import OrchestratorFrame, Submit
from pipelines.types.sampling import SamplingParams
from pipelines.types.text_context import TextContext
from pipelines.types.token_buffer import TokenBuffer
from pronghorn.errors import InternalError
from pronghorn.ids import Fence, Incarnation, RequestID

PARAMS = st.builds(
    SamplingParams,
    top_k=st.integers(-1, 2**31),
    top_p=st.floats(0, 1),
    min_p=st.floats(0, 1),
    temperature=st.floats(0, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.01, 10),
    max_new_tokens=st.none() | st.integers(0, 100),
    min_new_tokens=st.integers(0, 4),
    stop=st.none() | st.lists(st.text(min_size=1), max_size=3),
    stop_token_ids=st.none() | st.lists(st.integers(0, 2**31), max_size=3),
    seed=st.integers(-(2**63), 2**63 - 1),
)

CONTEXTS = st.builds(
    TextContext,
    max_length=st.integers(30, 2**40),
    tokens=st.lists(st.integers(-999, 2**50), min_size=1, max_size=20).map(
        lambda tokens: TokenBuffer(np.array(tokens, dtype=np.int64))
    ),
    eos_tracker=st.builds(EOSTracker, eos_token_ids=st.sets(st.integers(0, 2**31), max_size=3)),
    sampling_params=PARAMS,
    external_block_metadata=st.none() | st.dictionaries(st.text(), st.integers(0, 9) | st.text() | st.none()),
    cache_salt=st.none() | st.text(),
    cached_prefix_length=st.none() | st.integers(0, 100),
)


@settings(max_examples=100, deadline=None)
@given(context=CONTEXTS)
def test_a_context_loses_nothing(context: TextContext) -> None:
    submit = Submit(Fence(RequestID(), 1, Incarnation("i")), context, 1.0)
    assert wire.decode(wire.encode(submit), OrchestratorFrame) == submit


@settings(max_examples=200, deadline=None)
@given(cut=st.integers(0, 10_000), flip=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_damaged_bytes_give_a_message_or_one_error(cut: int, flip: int, bit: int) -> None:
    context = TextContext(max_length=30, tokens=TokenBuffer(np.arange(5, dtype=np.int64)))
    data = bytearray(wire.encode(Submit(Fence(RequestID(), 1, Incarnation("i")), context, 1.0)))
    data[flip % len(data)] ^= 1 << bit
    try:
        received = wire.decode(bytes(data[: len(data) - cut % 3]), OrchestratorFrame)
    except InternalError:
        return
    wire.encode(received)
