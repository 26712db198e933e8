import numpy as np
import pytest

from pipelines.runtime.step import build_step
from pipelines.types.text_context import TextContext
from pipelines.types.token_buffer import TokenBuffer


def context_of(length: int) -> TextContext:
    return TextContext(max_length=100, tokens=TokenBuffer(np.arange(length)))


def test_windows_are_laid_end_to_end_with_their_cells() -> None:
    whole, decoding, chunk = context_of(5), context_of(6), context_of(9)
    decoding.update(77)
    chunk.tokens.skip_processing(4)
    chunk.tokens.chunk(3)
    step = build_step([whole, decoding, chunk], [[7, 2], [5, 9], [1, 3, 8]], block_tokens=4)
    assert step.token_ids.tolist() == [0, 1, 2, 3, 4, 77, 4, 5, 6]
    assert step.positions.tolist() == [0, 1, 2, 3, 4, 6, 4, 5, 6]
    assert step.slots.tolist() == [28, 29, 30, 31, 8, 38, 12, 13, 14]
    assert step.starts.tolist() == [0, 5, 6, 9]
    assert step.contexts.tolist() == [5, 7, 7]
    assert step.tables.tolist() == [[7, 2], [5, 9], [1, 3]]
    assert step.sample_rows.tolist() == [4, 5]  # the chunk is not sampled
    assert (step.num_tokens, step.num_sequences) == (9, 3)


def test_a_table_that_is_too_short_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="1 blocks do not hold 5 tokens"):
        build_step([context_of(5)], [[7]], block_tokens=4)
