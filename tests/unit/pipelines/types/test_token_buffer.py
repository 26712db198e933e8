from typing import Any

import numpy as np
import pytest

from pipelines.types.token_buffer import TokenBuffer


def buffer(n: int) -> TokenBuffer:
    return TokenBuffer(np.arange(n, dtype=np.int64))


@pytest.mark.conformance(22)
@pytest.mark.parametrize(
    "array", [np.zeros((2, 2), dtype=np.int64), np.zeros(3, dtype=np.int32), np.zeros(0, dtype=np.int64)]
)
def test_refuses_what_is_not_a_prompt(array: Any) -> None:
    with pytest.raises(ValueError, match="non-empty 1-D int64"):
        TokenBuffer(array)


def test_a_read_only_array_is_copied() -> None:
    array = np.arange(3, dtype=np.int64)
    array.flags.writeable = False
    made = TokenBuffer(array)
    made.advance_with_token(9)
    made.overwrite_last_token(8)
    assert made.all.tolist() == [0, 1, 2, 8]


def test_the_whole_prompt_is_active_at_first() -> None:
    made = buffer(4)
    assert made.active.tolist() == [0, 1, 2, 3]
    assert (made.prompt_length, made.generated_length, made.processed_length, made.current_position) == (4, 0, 0, 4)


@pytest.mark.conformance(22)
def test_a_token_becomes_the_next_window() -> None:
    made = buffer(2)
    for token in range(10, 20):
        made.advance_with_token(token)
        assert made.active.tolist() == [token]
        assert made.processed_length == len(made) - 1
    assert made.generated.tolist() == list(range(10, 20))
    assert made.prompt.tolist() == [0, 1]


@pytest.mark.conformance(22)
def test_chunks_cover_the_prompt() -> None:
    made = buffer(5)
    made.chunk(2)
    assert made.active.tolist() == [0, 1] and made.actively_chunked
    with pytest.raises(ValueError, match="chunk"):
        made.advance_with_token(9)
    made.advance_chunk()
    assert made.active.tolist() == [2, 3, 4] and not made.actively_chunked
    with pytest.raises(ValueError, match="not a chunk"):
        made.advance_chunk()


@pytest.mark.conformance(22)
@pytest.mark.parametrize("n", [-1, 0, 5, 6])
def test_a_chunk_is_a_proper_part(n: int) -> None:
    with pytest.raises(ValueError, match="proper part"):
        buffer(5).chunk(n)


@pytest.mark.conformance(22)
def test_one_token_must_stay_active() -> None:
    made = buffer(5)
    made.skip_processing(4)
    assert made.active.tolist() == [4] and made.processed_length == 4
    for n in (1, -1):
        with pytest.raises(ValueError, match="cannot skip"):
            made.skip_processing(n)


@pytest.mark.conformance(22)
def test_rewind_brings_tokens_back() -> None:
    made = buffer(5)
    made.skip_processing(4)
    made.rewind_processing(3)
    assert made.active.tolist() == [1, 2, 3, 4]
    for n in (2, -1):
        with pytest.raises(ValueError, match="cannot rewind"):
            made.rewind_processing(n)


@pytest.mark.conformance(22)
def test_an_offset_shortens_the_window_and_goes_with_the_next_token() -> None:
    made = buffer(5)
    made.apply_processing_offset(2)
    assert made.active.tolist() == [2, 3, 4]
    assert (made.active_length, made.processed_length, made.current_position) == (3, 0, 3)
    made.advance_with_token(9)
    assert (made.processed_length, made.active.tolist()) == (5, [9])
    with pytest.raises(ValueError, match="leaves nothing"):
        made.apply_processing_offset(1)


@pytest.mark.conformance(22)
def test_only_generated_tokens_are_overwritten() -> None:
    made = buffer(2)
    with pytest.raises(ValueError, match="generated"):
        made.overwrite_last_token(5)
    made.advance_with_token(10)
    made.advance_with_token(11)
    made.overwrite_token_at_offset_from_end(20, 2)
    assert made.all.tolist() == [0, 1, 20, 11]
    for offset in (0, 3):
        with pytest.raises(ValueError, match="generated"):
            made.overwrite_token_at_offset_from_end(5, offset)


@pytest.mark.conformance(22)
def test_generated_tokens_are_taken_once() -> None:
    made = buffer(2)
    with pytest.raises(ValueError, match="no generated tokens"):
        made.consume_recently_generated_tokens()
    for token in (10, 11, 12):
        made.advance_with_token(token)
    assert made.consume_recently_generated_tokens(1).tolist() == [10, 11]
    with pytest.raises(ValueError, match="no generated tokens"):
        made.consume_recently_generated_tokens(1)
    assert made.consume_recently_generated_tokens().tolist() == [12]


@pytest.mark.conformance(22)
def test_a_reset_makes_everything_a_prompt() -> None:
    made = buffer(3)
    made.advance_with_token(10)
    made.advance_with_token(11)
    made.reset_as_new_prompt(1)
    assert made.active.tolist() == [0, 1, 2, 10]
    assert (made.prompt_length, made.generated_length, made.processed_length) == (4, 0, 0)
    assert made.num_outstanding_generated_tokens == 0
    with pytest.raises(ValueError, match="cannot drop"):
        made.reset_as_new_prompt(1)


@pytest.mark.conformance(22)
def test_a_reset_undoes_a_chunk() -> None:
    made = buffer(5)
    made.chunk(2)
    made.reset_as_new_prompt()
    assert made.active_length == 5 and not made.actively_chunked


@pytest.mark.conformance(22)
def test_indices() -> None:
    made = buffer(3)
    made.advance_with_token(10)
    assert made[0] == 0 and made[-1] == 10 and made[1:].tolist() == [1, 2, 10] and made[:100].tolist() == [0, 1, 2, 10]
    for index in (4, -5):
        with pytest.raises(IndexError):
            made[index]
    for wrong in ("0", 1.0, True, [0]):
        with pytest.raises(TypeError):
            made[wrong]  # type: ignore[call-overload]  # what must be refused


def test_packing_refuses_numbers_that_do_not_fit() -> None:
    data, start, end, offset, completion, prompt = buffer(3).pack()
    assert TokenBuffer.unpack((data, start, end, offset, completion, prompt)) == buffer(3)
    for wrong in (
        (0, 4, 0, 3, 3),
        (3, 3, 0, 3, 3),
        (0, 3, 3, 3, 3),
        (0, 3, 0, 2, 3),
        (0, 3, 0, 3, 0),
        (-1, 3, 1, 3, 3),
    ):
        with pytest.raises(ValueError):
            TokenBuffer.unpack((data, *wrong))
    with pytest.raises(ValueError):
        TokenBuffer.unpack((b"", 0, 0, 0, 0, 0))
