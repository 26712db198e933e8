"""Matrix products with weights packed once, for any number of rows.

A weight [N, K] is kept as panels [ceil(N / PANEL), K, PANEL], the last one filled up with zeros: a panel is read from
front to back, one fused multiply-add a row and vector, without sums across lanes. The same panels serve one row (as
fast as memory gives) and hundreds (as fast as MKL's packed product on the machine where it was measured, and without
OpenMP), so there is one copy. The copy belongs to the process; the checkpoint's pages are not needed after packing.
"""

import math
import mmap

import numpy as np
import torch
from numpy.typing import NDArray

from pipelines.runtime.cell_values import Stored, as_tensor
from pipelines.runtime.jit import compiled
from pipelines.runtime.simd import MAX_ROWS, PANEL, panel_product

_AHEAD = 1024
"""Elements. Measured with float32 and 8 rows: 22 ms a pass over 538 MB, without prefetching 32 ms."""

Packed = Stored
"""[panels, K, PANEL]"""


def panels_of(columns: int) -> int:
    return -(-columns // PANEL)


def padded(columns: int) -> int:
    """`columns` rounded up to whole panels: the row length of whatever a product writes."""
    return panels_of(columns) * PANEL


def page_array(shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[np.generic]:
    """Zeroed, on pages of its own, huge ones where the system gives them: weights are read from end to end."""
    size_bytes = max(1, math.prod(shape)) * np.dtype(dtype).itemsize
    memory = mmap.mmap(-1, size_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=dtype, count=math.prod(shape)).reshape(shape)


def pack_into(target: Packed, weight: torch.Tensor) -> None:
    """Write `weight` [N, K], of any float type, into `target` [panels, K, PANEL], rounding it to target's type."""
    columns, depth = weight.shape
    whole = columns // PANEL
    destination = as_tensor(target)
    destination[:whole] = weight[: whole * PANEL].reshape(whole, PANEL, depth).transpose(1, 2)
    if rest := columns - whole * PANEL:
        destination[whole, :, :rest] = weight[whole * PANEL :].transpose(0, 1)


@compiled
def multiply_panel(
    x: NDArray[np.float32], weights: Packed, layer: int, panel: int, rows: int, out: NDArray[np.float32],
    out_column: int, accumulate: bool,
) -> None:  # fmt: skip
    """out[:rows, out_column :][:, :PANEL] (+)= x[:rows, :K] @ weights[layer, panel], weights [L, P, K, PANEL]."""
    depth = weights.shape[2]
    at = ((layer * weights.shape[1]) + panel) * depth * PANEL
    passes = (rows + MAX_ROWS - 1) // MAX_ROWS
    row = 0
    for done in range(passes):
        count = (rows - row) // (passes - done)  # even shares: 16 rows are 8 + 8, not 14 + 2
        panel_product(
            count, x, row * x.shape[1], x.shape[1], weights, at, PANEL, _AHEAD, depth,
            out, row * out.shape[1] + out_column, out.shape[1], accumulate,
        )  # fmt: skip
        row += count
