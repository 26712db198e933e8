"""How values are stored, of KV cells and of weights: float32, or the bits of a bfloat16 or a float16.

Arithmetic is float32. numba knows neither of the short types, so their bits travel as uint16 (bfloat16) and int16
(float16).
"""

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from pipelines.runtime.simd import FLOAT16_BITS, HALF, INT16, INT32, ask_for, widened

Stored = NDArray[np.float32] | NDArray[np.uint16] | NDArray[np.int16]

STORED_AS: dict[torch.dtype, type[np.generic]] = {
    torch.float32: np.float32,
    torch.bfloat16: np.uint16,
    torch.float16: np.int16,
}


def stored_values(values: torch.Tensor) -> Stored:
    """The same memory as an array that the kernels read."""
    if values.dtype == torch.float32:
        return values.numpy()
    return values.view(torch.int16).numpy().view(STORED_AS[values.dtype])


def as_tensor(stored: Stored) -> torch.Tensor:
    """The same memory as a tensor of the type that it stands for."""
    if stored.dtype == np.float32:
        return torch.from_numpy(stored)
    return torch.from_numpy(stored.view(np.int16)).view(torch.bfloat16 if stored.dtype == np.uint16 else torch.float16)


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def widen(typingctx: Any, stored: Any) -> Any:
    """float32 of what a cell holds."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return args[0] if sig.args[0] == types.float32 else widened(builder, args[0], sig.args[0])

    return types.float32(stored), generate


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def narrow_like(typingctx: Any, value: Any, cells: Any) -> Any:
    """A float32 as `cells` (an array) stores it: unchanged, or rounded to the bits of the nearest short value."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        stored = sig.args[1].dtype
        if stored == types.float32:
            return args[0]
        if stored == FLOAT16_BITS:
            return builder.bitcast(builder.fptrunc(args[0], HALF), INT16)
        return _bfloat16_bits(builder, args[0])

    return cells.dtype(types.float32, cells), generate


def _bfloat16_bits(builder: Any, value: Any) -> Any:
    bits = builder.bitcast(value, INT32)
    odd = builder.and_(builder.lshr(bits, ir.Constant(INT32, 16)), ir.Constant(INT32, 1))
    rounded = builder.add(bits, builder.add(odd, ir.Constant(INT32, 0x7FFF)))
    # Rounding could carry a NaN's bits over into an infinity or a zero.
    quiet = builder.or_(bits, ir.Constant(INT32, 0x00400000))
    kept = builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded)
    return builder.trunc(builder.lshr(kept, ir.Constant(INT32, 16)), INT16)


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def prefetch(typingctx: Any, array: Any, at: Any) -> Any:
    """Ask for the cache line of array[at], which may lie outside."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        data = context.make_array(sig.args[0])(context, builder, args[0]).data
        ask_for(builder, builder.gep(data, [args[1]]))
        return context.get_dummy_value()

    return types.void(array, types.int64), generate
