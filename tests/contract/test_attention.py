"""What every `Attention` must do; `PlainAttention` is also checked against torch's own on contiguous tensors."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pipelines.runtime.attention import Attention, PlainAttention
from pipelines.runtime.paged_attention import PagedAttention
from pipelines.runtime.step import Step
from pipelines.runtime.team import Team

LAYERS, BLOCKS, BLOCK_TOKENS = 2, 40, 16
WINDOWS = [20, None]
"""Of layer 0 and of layer 1."""
Make = Callable[[torch.Tensor, int], Attention]


@pytest.fixture(params=["plain", "paged", "paged, 3 threads"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    if request.param == "plain":
        yield lambda pool, heads: PlainAttention(pool, WINDOWS)
        return
    team = Team(3 if "3" in request.param else 1)
    yield lambda pool, heads: PagedAttention(pool, heads, team, WINDOWS)
    team.close()


def new_pool(kv_heads: int, dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Full of NaN: a cell that was never written shows in whatever reads it."""
    return torch.full((BLOCKS, LAYERS, 2, kv_heads, BLOCK_TOKENS, dim), float("nan"), dtype=dtype)


class Sequence:
    """Random keys and values of one sequence, in blocks that lie scattered in the pool."""

    def __init__(self, blocks: list[int], length: int, kv_heads: int, dim: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.blocks = blocks
        self.keys, self.values = (torch.randn(length, kv_heads, dim, generator=generator) for _ in "kv")

    def rows(self, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys[first:end], self.values[first:end]


def step_of(windows: list[tuple[Sequence, int, int]]) -> Step:
    """(sequence, first, end) of each window."""
    width = max(-(-end // BLOCK_TOKENS) for _, _, end in windows)
    tables = np.zeros((len(windows), width), dtype=np.int64)
    positions, slots, starts = [], [], [0]
    for row, (sequence, first, end) in zip(tables, windows, strict=True):
        needed = -(-end // BLOCK_TOKENS)
        row[:needed] = sequence.blocks[:needed]
        where = np.arange(first, end)
        positions.append(where)
        slots.append(row[where // BLOCK_TOKENS] * BLOCK_TOKENS + where % BLOCK_TOKENS)
        starts.append(starts[-1] + end - first)
    flat = np.concatenate(positions)
    ends = np.array([end for _, _, end in windows])
    return Step(
        np.zeros_like(flat), flat, np.concatenate(slots), np.array(starts), ends, tables, np.array(starts[1:]) - 1
    )


def attend(attention: Attention, layer: int, heads: int, windows: list[tuple[Sequence, int, int]]) -> torch.Tensor:
    """With queries that depend on position alone."""
    step = step_of(windows)
    parts = [sequence.rows(first, end) for sequence, first, end in windows]
    keys, values = (torch.cat([part[i] for part in parts]) for i in (0, 1))
    return attention.attend(layer, queries(step.positions, heads, keys.shape[2]), keys, values, step)


def queries(positions: np.ndarray, heads: int, dim: int) -> torch.Tensor:
    return torch.stack(
        [torch.randn(heads, dim, generator=torch.Generator().manual_seed(1000 + int(p))) for p in positions]
    )


def expected(sequence: Sequence, heads: int, first: int, end: int, window: int | None = None) -> torch.Tensor:
    """torch's attention over contiguous keys, rows first..end."""
    keys, values = (
        x[:end].repeat_interleave(heads // x.shape[1], dim=1).transpose(0, 1) for x in (sequence.keys, sequence.values)
    )
    query = queries(np.arange(end), heads, sequence.keys.shape[2]).transpose(0, 1)
    back = torch.arange(end)[:, None] - torch.arange(end)
    seen = (back >= 0) & (back < (window or end))
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=seen).transpose(0, 1)[first:end]


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 32), (4, 1, 8), (2, 1, 80), (16, 1, 64)])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 33, 64, 97])
def test_a_whole_prompt_gives_what_plain_attention_gives(
    make: Make, heads: int, kv_heads: int, dim: int, length: int
) -> None:
    sequence = Sequence([7, 3, 30, 0, 12, 5, 39], length, kv_heads, dim, seed=1)
    out = attend(make(new_pool(kv_heads, dim), heads), 1, heads, [(sequence, 0, length)])
    torch.testing.assert_close(out, expected(sequence, heads, 0, length), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("cut", [1, 15, 16, 17, 31, 40, 49])
def test_chunks_and_single_tokens_see_the_context_before_them(make: Make, cut: int) -> None:
    sequence = Sequence([7, 3, 30, 0], 52, 3, 64, seed=2)
    attention = make(new_pool(3, 64), 9)
    attend(attention, 1, 9, [(sequence, 0, cut)])
    for first, end in ((cut, 50), (50, 51), (51, 52)):
        out = attend(attention, 1, 9, [(sequence, first, end)])
        torch.testing.assert_close(out, expected(sequence, 9, first, end), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dim", [64, 80])
def test_a_layer_with_a_window_sees_the_last_tokens_alone(make: Make, dim: int) -> None:
    sequences = [Sequence(list(range(10 * i, 10 * i + 10)), 130, 3, dim, seed=i) for i in range(3)]
    attention = make(new_pool(3, dim), 9)
    steps = [
        [(sequences[0], 0, 99), (sequences[1], 0, 20)],
        [(sequences[0], 99, 100), (sequences[1], 20, 81), (sequences[2], 0, 1)],
        [(sequences[0], 100, 130), (sequences[1], 81, 82), (sequences[2], 1, 37)],
        [(sequences[1], 82, 83), (sequences[2], 37, 38)],
    ]
    for windows in steps:
        out = attend(attention, 0, 9, windows)
        wanted = torch.cat([expected(sequence, 9, first, end, WINDOWS[0]) for sequence, first, end in windows])
        torch.testing.assert_close(out, wanted, atol=2e-5, rtol=2e-5)


def test_prompts_chunks_and_single_tokens_mix_in_a_step(make: Make) -> None:
    sequences = [Sequence(list(range(10 * i, 10 * i + 10)), 120, 3, 64, seed=i) for i in range(4)]
    attention = make(new_pool(3, 64), 9)
    attend(attention, 1, 9, [(sequences[0], 0, 99), (sequences[2], 0, 20)])
    windows = [(sequences[0], 99, 100), (sequences[1], 0, 37), (sequences[2], 20, 81), (sequences[3], 0, 1)]
    out = attend(attention, 1, 9, windows)
    wanted = torch.cat([expected(sequence, 9, first, end) for sequence, first, end in windows])
    torch.testing.assert_close(out, wanted, atol=2e-5, rtol=2e-5)


def test_only_the_cells_of_the_step_are_written(make: Make) -> None:
    pool = new_pool(3, 64)
    sequence = Sequence([4, 9], 20, 3, 64, seed=3)
    attend(make(pool, 9), 1, 9, [(sequence, 0, 20)])
    written = ~pool.isnan().any(dim=-1)  # [blocks, layers, 2, kv_heads, tokens]
    wanted = torch.zeros_like(written)
    wanted[4, 1], wanted[9, 1, :, :, :4] = True, True
    assert torch.equal(written, wanted)
    torch.testing.assert_close(pool[4, 1, 0].transpose(0, 1), sequence.keys[:16], atol=0, rtol=0)
    torch.testing.assert_close(pool[9, 1, 1, :, :4].transpose(0, 1), sequence.values[16:], atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_cells_are_rounded_to_nearest_and_computed_in_float32(make: Make, dtype: torch.dtype) -> None:
    pool = new_pool(3, 64, dtype)
    sequence = Sequence([4, 9, 2, 1], 60, 3, 64, seed=4)
    attention = make(pool, 9)
    attend(attention, 1, 9, [(sequence, 0, 59)])
    out = attend(attention, 1, 9, [(sequence, 59, 60)])
    sequence.keys, sequence.values = sequence.keys.to(dtype).float(), sequence.values.to(dtype).float()
    assert torch.equal(pool[4, 1, 0].transpose(0, 1).float(), sequence.keys[:16])
    torch.testing.assert_close(out, expected(sequence, 9, 59, 60), atol=2e-5, rtol=2e-5)


def test_a_nan_among_the_keys_comes_out_as_nan(make: Make) -> None:
    sequence = Sequence([4, 9], 20, 3, 64, seed=5)
    sequence.keys[3, 0, 5] = float("nan")
    attention = make(new_pool(3, 64), 9)
    out = attend(attention, 0, 9, [(sequence, 0, 20)])
    assert out[19, :3].isnan().all()
    assert out[19, 3:].isfinite().all()
