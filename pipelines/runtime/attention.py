"""Attention over paged keys and values: the port, and the plain version that says what is right.

The plain version computes on any device that torch knows. The pool stays where it is, in memory that the node shares:
a device of its own gets a copy of each context, which is right and slow. The CPU's version is `paged_attention.py`.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from pipelines.runtime.step import Step


class Attention(Protocol):
    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: Step
    ) -> torch.Tensor:
        """Write `key` and `value` into the step's cells, then attend causally over each sequence's context: all of it,
        or the last tokens of it where the layer has a window.

        query [T, heads, head_dim], key and value [T, kv_heads, head_dim], rotated already, float32; heads is a multiple
        of kv_heads. Gives [T, heads, head_dim], float32, on the query's device.
        """


class PlainAttention:
    """`pool` is [num_blocks, layers, 2, kv_heads, block_tokens, head_dim], in the type that the cells are stored in.

    `windows`, one a layer: how many tokens back a token sees, itself among them; None: all.
    """

    def __init__(self, pool: torch.Tensor, windows: Sequence[int | None], softcap: float | None = None) -> None:
        """With `softcap` scores are bent into -softcap to softcap by tanh (Gemma 2)."""
        self._pool = pool
        self._windows = windows
        self._softcap = softcap
        self._block_tokens = pool.shape[4]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: Step
    ) -> torch.Tensor:
        slots = torch.from_numpy(step.slots)
        blocks, places = slots // self._block_tokens, slots % self._block_tokens
        cells = self._pool[:, layer]  # [num_blocks, 2, kv_heads, block_tokens, head_dim]
        cells[blocks, 0, :, places] = key.to(cells)
        cells[blocks, 1, :, places] = value.to(cells)
        out = torch.empty_like(query)
        for s in range(step.num_sequences):
            rows = slice(int(step.starts[s]), int(step.starts[s + 1]))
            table = torch.from_numpy(step.tables[s])
            out[rows] = self._sequence(cells, table, query[rows], int(step.contexts[s]), self._windows[layer])
        return out

    def _sequence(
        self, cells: torch.Tensor, table: torch.Tensor, query: torch.Tensor, context: int, window: int | None
    ) -> torch.Tensor:
        blocks = cells[table[: -(-context // self._block_tokens)]]  # [B, 2, kv_heads, block_tokens, head_dim]
        # [2, kv_heads, context, head_dim]
        flat = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context].to(query)
        keys, values = flat.repeat_interleave(query.shape[1] // flat.shape[1], dim=1)
        scores = torch.einsum("thd,hcd->htc", query, keys) * query.shape[-1] ** -0.5
        if self._softcap is not None:
            scores = (scores / self._softcap).tanh() * self._softcap
        positions = torch.arange(context, device=query.device)
        back = positions[context - query.shape[0] :, None] - positions[None]  # [T, context] how far behind its row
        visible = (back >= 0) & (back < (window or context))
        weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
        return torch.einsum("htc,hcd->thd", weights, values)
