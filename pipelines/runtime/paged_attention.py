"""Attention over the block-major pool on the CPU, in kernels.

A sequence with one new token reads its keys and values where they lie. A longer window gathers its context once a
layer into panels (keys transposed), and both of its products, scores and weighted values, become `panel_product`s: the
scores of up to MAX_ROWS tokens at once, softmax over whole rows, no rescaling. A head's group of query heads shares
each key that is read.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pipelines.runtime.cell_values import Stored, narrow_like, prefetch, stored_values, widen
from pipelines.runtime.jit import compiled
from pipelines.runtime.linear import padded
from pipelines.runtime.simd import LANES, MAX_ROWS, PANEL, panel_product
from pipelines.runtime.step import Step
from pipelines.runtime.team import Sync, Team, meet, take_ticket
from pipelines.runtime.vector_math import dot, exponentials, highest

__all__ = ["Cells", "PagedAttention", "Plan", "attend_all", "cells_of", "plan_of", "store_all"]

_LINE = 16  # float32 in a cache line of 64 bytes


class Cells(NamedTuple):
    """The pool as the kernels see it."""

    flat: Stored  # [blocks * layers * 2 * kv_heads * block_tokens * head_dim]
    cosines: NDArray[np.float32]  # [positions, head_dim / 2]
    sines: NDArray[np.float32]
    num_layers: int
    num_heads: int
    num_kv_heads: int
    block_tokens: int
    head_dim: int
    reach: NDArray[np.int64]  # [layers] how many tokens back a token sees, itself among them
    rotary: NDArray[np.bool_]  # [layers] whether queries and keys are turned by position


class Plan(NamedTuple):
    """A step's arrays, and room for its attention. W sequences have windows of several tokens, D have one token."""

    positions: NDArray[np.int64]  # [T]
    slots: NDArray[np.int64]  # [T]
    starts: NDArray[np.int64]  # [S + 1]
    contexts: NDArray[np.int64]  # [S]
    tables: NDArray[np.int64]  # [S, blocks]
    decoding: NDArray[np.int64]  # [D] sequences, the longest context first
    windows: NDArray[np.int64]  # [W] sequences
    window_panels: NDArray[np.int64]  # [W + 1] running sum of the panels that each window's context fills
    window_blocks: NDArray[np.int64]  # [W + 1] running sum of the row blocks of each window
    keys: NDArray[np.float32]  # [kv_heads * panels * head_dim * PANEL]
    values: NDArray[np.float32]  # [kv_heads * panels * padded head_dim * PANEL]
    scores: NDArray[np.float32]  # [members * (MAX_ROWS or group), padded context]
    weighted: NDArray[np.float32]  # [members * MAX_ROWS, padded head_dim]


def plan_of(step: Step, cells: Cells, members: int) -> Plan:
    lengths = np.diff(step.starts)
    windows = np.flatnonzero(lengths > 1)
    decoding = np.flatnonzero(lengths == 1)
    decoding = decoding[np.argsort(-step.contexts[decoding], kind="stable")]
    panels = np.concatenate(([0], np.cumsum(-(-step.contexts[windows] // PANEL))))
    blocks = np.concatenate(([0], np.cumsum(-(-lengths[windows] // MAX_ROWS))))
    wide = padded(cells.head_dim)
    rows = max(MAX_ROWS, cells.num_heads // cells.num_kv_heads)
    gathered = cells.num_kv_heads * int(panels[-1]) * PANEL
    return Plan(
        positions=step.positions,
        slots=step.slots,
        starts=step.starts,
        contexts=step.contexts,
        tables=step.tables,
        decoding=decoding,
        windows=windows,
        window_panels=panels,
        window_blocks=blocks,
        keys=np.empty(gathered * cells.head_dim, dtype=np.float32),
        values=np.zeros(gathered * wide, dtype=np.float32),
        scores=np.empty((members * rows, padded(int(step.contexts.max()))), dtype=np.float32),
        weighted=np.empty((members * MAX_ROWS, wide), dtype=np.float32),
    )


@compiled
def soften(scores: NDArray[np.float32], row: int, lowest: int, end: int, first: int, length: int) -> None:
    """Softmax of scores[row, lowest:end]; the rest from `first` to `length`, both multiples of LANES, becomes 0."""
    at = row * scores.shape[1] + first
    for c in range(first, lowest):
        scores[row, c] = np.float32(-np.inf)
    for c in range(end, length):
        scores[row, c] = np.float32(-np.inf)
    share = np.float32(1.0) / exponentials(scores, at, length - first, highest(scores, at, length - first))
    for c in range(lowest, end):
        scores[row, c] *= share
    for c in range(first, lowest):
        scores[row, c] = np.float32(0.0)
    for c in range(end, length):
        scores[row, c] = np.float32(0.0)


@compiled
def lowest_seen(cells: Cells, layer: int, position: int) -> int:
    """The first position that a token at `position` sees."""
    return max(0, position + 1 - cells.reach[layer])  # type: ignore[no-any-return]  # numba has no types


@compiled
def cell_at(cells: Cells, block: int, layer: int, kv: int, head: int) -> int:
    """Where the block_tokens * head_dim cells of one block, layer and head begin: keys (kv 0) or values (1)."""
    row = ((block * cells.num_layers + layer) * 2 + kv) * cells.num_kv_heads + head
    return row * cells.block_tokens * cells.head_dim


@compiled
def store_token(cells: Cells, plan: Plan, layer: int, token: int, qkv: NDArray[np.float32]) -> None:
    """Rotate the token's queries and keys, where the layer does; store keys and values in its cells.

    Queries are left scaled by 1 / sqrt(head_dim).
    """
    dim, half = cells.head_dim, cells.head_dim // 2
    scale = np.float32(1.0 / np.sqrt(dim))
    position = plan.positions[token]
    turned = cells.rotary[layer]
    block, place = plan.slots[token] // cells.block_tokens, plan.slots[token] % cells.block_tokens
    for head in range(cells.num_heads):
        at = head * dim
        for d in range(half):
            low, high = qkv[token, at + d], qkv[token, at + half + d]
            cosine = cells.cosines[position, d] * scale if turned else scale
            sine = cells.sines[position, d] * scale if turned else np.float32(0.0)
            qkv[token, at + d] = low * cosine - high * sine
            qkv[token, at + half + d] = high * cosine + low * sine
    for head in range(cells.num_kv_heads):
        at = (cells.num_heads + head) * dim
        to = cell_at(cells, block, layer, 0, head) + place * dim
        for d in range(half):
            low, high = qkv[token, at + d], qkv[token, at + half + d]
            cosine = cells.cosines[position, d] if turned else np.float32(1.0)
            sine = cells.sines[position, d] if turned else np.float32(0.0)
            cells.flat[to + d] = narrow_like(np.float32(low * cosine - high * sine), cells.flat)
            cells.flat[to + half + d] = narrow_like(np.float32(high * cosine + low * sine), cells.flat)
        at += cells.num_kv_heads * dim
        to = cell_at(cells, block, layer, 1, head) + place * dim
        for d in range(dim):
            cells.flat[to + d] = narrow_like(qkv[token, at + d], cells.flat)


@compiled
def product_sum(x: NDArray[np.float32], x_at: int, cells: Stored, cells_at: int, count: int) -> float:
    whole = count // LANES * LANES
    total = dot(x, x_at, cells, cells_at, whole)
    for i in range(whole, count):
        total += x.flat[x_at + i] * widen(cells[cells_at + i])
    return total  # type: ignore[no-any-return]  # numba has no types


@compiled
def blocks_at(cells: Cells, plan: Plan, layer: int, kv: int, head: int, sequence: int, index: int) -> tuple[int, int]:
    """Where the cells of a sequence's block `index` begin, and those of the block after it, to prefetch."""
    following = min(index + 1, (plan.contexts[sequence] - 1) // cells.block_tokens)
    start = cell_at(cells, plan.tables[sequence, index], layer, kv, head)
    return start, cell_at(cells, plan.tables[sequence, following], layer, kv, head)


@compiled
def attend_token(
    cells: Cells, plan: Plan, layer: int, sequence: int, kv_head: int, qkv: NDArray[np.float32], scratch_row: int,
    out: NDArray[np.float32],
) -> None:  # fmt: skip
    """The query heads of one group of the one new token of `sequence`, over its context in place."""
    dim, tokens = cells.head_dim, cells.block_tokens
    group = cells.num_heads // cells.num_kv_heads
    row, context = plan.starts[sequence], plan.contexts[sequence]
    query, to = row * qkv.shape[1] + kv_head * group * dim, row * out.shape[1] + kv_head * group * dim
    scores, stride = plan.scores, plan.scores.shape[1]
    lowest = lowest_seen(cells, layer, context - 1)
    begin = lowest // tokens * tokens  # the block that holds it
    for first in range(begin, context, tokens):
        start, following = blocks_at(cells, plan, layer, 0, kv_head, sequence, first // tokens)
        for t in range(min(tokens, context - first)):
            for line in range(0, dim, _LINE):
                prefetch(cells.flat, following + t * dim + line)
            for g in range(group):
                score = product_sum(qkv, query + g * dim, cells.flat, start + t * dim, dim)
                scores[scratch_row + g, first + t] = score
    for g in range(group):
        aligned = begin // LANES * LANES
        soften(scores, scratch_row + g, lowest, context, aligned, (context + LANES - 1) // LANES * LANES)
    for i in range(group * dim):
        out[row, kv_head * group * dim + i] = np.float32(0.0)
    for first in range(begin, context, tokens):
        start, following = blocks_at(cells, plan, layer, 1, kv_head, sequence, first // tokens)
        count = min(tokens, context - first)
        whole = dim // PANEL * PANEL
        for at in range(0, whole, PANEL):
            for g in range(0, group, MAX_ROWS):
                panel_product(
                    min(MAX_ROWS, group - g), scores, (scratch_row + g) * stride + first, stride,
                    cells.flat, start + at, dim, following - start, count, out, to + g * dim + at, dim, True,
                )  # fmt: skip
        for g in range(group):
            for d in range(whole, dim):
                for t in range(count):
                    value = widen(cells.flat[start + t * dim + d])
                    out[row, (kv_head * group + g) * dim + d] += scores[scratch_row + g, first + t] * value


@compiled
def gather_panel(cells: Cells, plan: Plan, layer: int, window: int, kv_head: int, panel: int) -> None:
    """Copy PANEL tokens of a window's context: keys as [head_dim, PANEL], values as rows of panels."""
    dim, tokens = cells.head_dim, cells.block_tokens
    sequence = plan.windows[window]
    panels = plan.window_panels[window + 1] - plan.window_panels[window]
    before = cells.num_kv_heads * plan.window_panels[window] + kv_head * panels
    keys_at = (before + panel) * dim * PANEL
    seen = lowest_seen(cells, layer, plan.positions[plan.starts[sequence]]) // PANEL
    if panel < seen:
        return  # no token of the window reaches so far back
    for j in range(PANEL):
        position = panel * PANEL + j
        if position >= plan.contexts[sequence]:
            for d in range(dim):
                plan.keys[keys_at + d * PANEL + j] = np.float32(0.0)
            continue
        block, place = plan.tables[sequence, position // tokens], position % tokens
        start = cell_at(cells, block, layer, 0, kv_head) + place * dim
        for d in range(dim):
            plan.keys[keys_at + d * PANEL + j] = widen(cells.flat[start + d])
        start = cell_at(cells, block, layer, 1, kv_head) + place * dim
        for wide in range((dim + PANEL - 1) // PANEL):
            to = (before * padded_dim(dim) + (wide * panels * PANEL + position)) * PANEL
            for d in range(min(PANEL, dim - wide * PANEL)):
                plan.values[to + d] = widen(cells.flat[start + wide * PANEL + d])


@compiled
def padded_dim(dim: int) -> int:
    return (dim + PANEL - 1) // PANEL * PANEL


@compiled
def attend_block(
    cells: Cells, plan: Plan, layer: int, window: int, head: int, row_block: int, qkv: NDArray[np.float32],
    member: int, out: NDArray[np.float32],
) -> None:  # fmt: skip
    """Up to MAX_ROWS tokens of a window, one query head, over the gathered context."""
    dim, wide = cells.head_dim, padded_dim(cells.head_dim)
    sequence = plan.windows[window]
    first_row = plan.starts[sequence] + row_block * MAX_ROWS
    rows = min(MAX_ROWS, plan.starts[sequence + 1] - first_row)
    limit = plan.positions[first_row + rows - 1] + 1  # keys that the last of these rows sees
    panels = plan.window_panels[window + 1] - plan.window_panels[window]
    kv_head = head // (cells.num_heads // cells.num_kv_heads)
    before = cells.num_kv_heads * plan.window_panels[window] + kv_head * panels
    scores, stride = plan.scores, plan.scores.shape[1]
    scratch = member * (scores.shape[0] // (plan.weighted.shape[0] // MAX_ROWS))
    begin = lowest_seen(cells, layer, plan.positions[first_row]) // PANEL  # the first panel that one of them sees
    for panel in range(begin, (limit + PANEL - 1) // PANEL):
        panel_product(
            rows, qkv, first_row * qkv.shape[1] + head * dim, qkv.shape[1],
            plan.keys, (before + panel) * dim * PANEL, PANEL, 0, dim,
            scores, scratch * stride + panel * PANEL, stride, False,
        )  # fmt: skip
    for r in range(rows):
        position = plan.positions[first_row + r]
        lowest = lowest_seen(cells, layer, position)
        soften(scores, scratch + r, lowest, position + 1, begin * PANEL, (limit + PANEL - 1) // PANEL * PANEL)
    for column in range(wide // PANEL):
        values_at = (before * wide + (column * panels + begin) * PANEL) * PANEL
        panel_product(
            rows, scores, scratch * stride + begin * PANEL, stride,
            plan.values, values_at, PANEL, 0, limit - begin * PANEL,
            plan.weighted, member * MAX_ROWS * wide + column * PANEL, wide, False,
        )  # fmt: skip
    for r in range(rows):
        for d in range(dim):
            out[first_row + r, head * dim + d] = plan.weighted[member * MAX_ROWS + r, d]


@compiled
def store_all(member: int, members: int, cells: Cells, plan: Plan, layer: int, qkv: NDArray[np.float32]) -> None:
    """Every token's keys and values into their cells. A barrier must follow."""
    for token in range(member, plan.positions.shape[0], members):
        store_token(cells, plan, layer, token, qkv)


@compiled
def attend_all(
    member: int, members: int, sync: Sync, cells: Cells, plan: Plan, layer: int, qkv: NDArray[np.float32],
    out: NDArray[np.float32],
) -> None:  # fmt: skip
    """Attention of every token, from rotated and scaled queries. Tickets must be at 0; ends with a barrier."""
    kv_heads = cells.num_kv_heads
    num_windows = plan.windows.shape[0]
    if num_windows > 0:
        ticket = take_ticket(sync)
        while ticket < plan.window_panels[num_windows] * kv_heads:
            kv_head, panel = ticket % kv_heads, ticket // kv_heads
            window = 0
            while panel >= plan.window_panels[window + 1]:
                window += 1
            gather_panel(cells, plan, layer, window, kv_head, panel - plan.window_panels[window])
            ticket = take_ticket(sync)
        meet(sync, members)
    scratch = member * (plan.scores.shape[0] // members)
    tokens = plan.decoding.shape[0] * kv_heads
    blocks = plan.window_blocks[num_windows] * cells.num_heads
    ticket = take_ticket(sync)
    while ticket < tokens + blocks:
        if ticket < tokens:
            sequence = plan.decoding[ticket // kv_heads]
            attend_token(cells, plan, layer, sequence, ticket % kv_heads, qkv, scratch, out)
        else:
            # From the last block of rows back: the longest work first, so that members end together.
            left = tokens + blocks - 1 - ticket
            head, block = left % cells.num_heads, left // cells.num_heads
            window = 0
            while block >= plan.window_blocks[window + 1]:
                window += 1
            attend_block(cells, plan, layer, window, head, block - plan.window_blocks[window], qkv, member, out)
        ticket = take_ticket(sync)
    meet(sync, members)


@compiled
def _store_and_attend(
    member: int, members: int, sync: Sync, cells: Cells, plan: Plan, layer: int, qkv: NDArray[np.float32],
    out: NDArray[np.float32],
) -> None:  # fmt: skip
    store_all(member, members, cells, plan, layer, qkv)
    meet(sync, members)
    attend_all(member, members, sync, cells, plan, layer, qkv, out)


def cells_of(
    pool: torch.Tensor, num_heads: int, tables: tuple[NDArray[np.float32], NDArray[np.float32]],
    windows: Sequence[int | None], rotary: Sequence[bool],
) -> Cells:  # fmt: skip
    """The same memory as `pool` [num_blocks, layers, 2, kv_heads, block_tokens, head_dim], with cosines and sines."""
    _, layers, _, kv_heads, block_tokens, dim = pool.shape
    reach = np.array([np.iinfo(np.int64).max // 2 if window is None else window for window in windows], dtype=np.int64)
    turned = np.array(rotary, dtype=np.bool_)
    return Cells(
        stored_values(pool).reshape(-1), *tables, layers, num_heads, kv_heads, block_tokens, dim, reach, turned
    )


class PagedAttention:
    """The kernels as an `Attention`, one layer at a time. `CompiledDecoder` runs the same kernels for all layers."""

    def __init__(self, pool: torch.Tensor, num_heads: int, team: Team, windows: Sequence[int | None]) -> None:
        self._pool = pool
        self._windows = windows
        self._num_heads = num_heads
        self._team = team

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: Step
    ) -> torch.Tensor:
        dim = query.shape[2]
        nothing = np.zeros((0, dim // 2), dtype=np.float32)  # the vectors come rotated
        cells = cells_of(self._pool, self._num_heads, (nothing, nothing), self._windows, [False] * len(self._windows))
        plan = plan_of(step, cells, self._team.members)
        qkv = torch.cat([query.flatten(1), key.flatten(1), value.flatten(1)], dim=1).contiguous().numpy()
        out = np.empty((step.num_tokens, self._num_heads * dim), dtype=np.float32)
        self._team.run(_store_and_attend, cells, plan, layer, qkv, out)
        return torch.from_numpy(out).view_as(query)
