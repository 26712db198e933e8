"""What one step computes, as flat arrays: the windows of all sequences laid end to end.

Pure bookkeeping: tokens, positions, where each token's KV cell is, and which rows are to be sampled. Knows neither
weights nor how attention is done.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipelines.types.text_context import TextContext


@dataclass(frozen=True)
class Step:
    """`T` tokens of `S` sequences. Sequence s owns rows starts[s] : starts[s + 1]."""

    token_ids: NDArray[np.int64]  # [T]
    positions: NDArray[np.int64]  # [T]
    slots: NDArray[np.int64]  # [T] block id * block_tokens + place in the block
    starts: NDArray[np.int64]  # [S + 1]
    contexts: NDArray[np.int64]  # [S] tokens whose KV is there once the step has written its own
    tables: NDArray[np.int64]  # [S, blocks of the longest] filled up with zeros
    sample_rows: NDArray[np.int64]  # [R] ascending

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        return len(self.contexts)


def build_step(contexts: Sequence[TextContext], tables: Sequence[Sequence[int]], block_tokens: int) -> Step:
    """Of the active windows of `contexts`, whose KV goes into the blocks of `tables`, context by context.

    A window that ends its sequence is sampled by its last row; a chunk is not. Of a prompt whose log probabilities are
    asked for every row is.
    """
    lengths = np.array([context.tokens.active_length for context in contexts], dtype=np.int64)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    firsts = [context.tokens.processed_length + context.tokens.processing_offset for context in contexts]
    ends = np.array(firsts, dtype=np.int64) + lengths
    width = max(-(-int(end) // block_tokens) for end in ends)
    padded = np.zeros((len(contexts), width), dtype=np.int64)
    for row, table, end in zip(padded, tables, ends, strict=True):
        needed = -(-int(end) // block_tokens)
        assert len(table) >= needed, f"{len(table)} blocks do not hold {end} tokens"
        row[:needed] = table[:needed]
    positions = np.concatenate([np.arange(first, end) for first, end in zip(firsts, ends, strict=True)])
    owners = np.repeat(np.arange(len(contexts)), lengths)
    return Step(
        token_ids=np.concatenate([context.tokens.active for context in contexts]),
        positions=positions,
        slots=padded[owners, positions // block_tokens] * block_tokens + positions % block_tokens,
        starts=starts,
        contexts=ends,
        tables=padded,
        sample_rows=np.concatenate([first + sampled_rows(c) for first, c in zip(starts[:-1], contexts, strict=True)]),
    )


def sampled_rows(context: TextContext) -> NDArray[np.int64]:
    """Which rows of its window have their logits looked at, ascending."""
    length = context.tokens.active_length
    if context.awaits_prompt_log_probabilities:
        return np.arange(length)
    return np.array([] if context.tokens.actively_chunked else [length - 1], dtype=np.int64)
