from pipelines.runtime.batching import StepBudget, blocks_for
from tests.fakes.canary_engine import canary_context


def test_windows_are_taken_whole_until_the_last_is_cut_to_what_is_left() -> None:
    budget = StepBudget(10)
    first, second, third = (canary_context(range(1, 1 + length)) for length in (4, 9, 1))
    assert budget.take(first) and budget.take(second) and not budget.take(third)
    assert [context.tokens.active_length for context in (first, second, third)] == [4, 6, 1]
    assert [context.tokens.actively_chunked for context in (first, second, third)] == [False, True, False]


def test_a_window_that_fits_exactly_is_no_chunk() -> None:
    budget, context = StepBudget(4), canary_context([1, 2, 3, 4])
    assert budget.take(context) and budget.tokens_left == 0
    assert not context.tokens.actively_chunked


def test_a_partial_block_counts_as_one() -> None:
    assert [blocks_for(tokens, 4) for tokens in (0, 1, 4, 5)] == [0, 1, 1, 2]
