"""How the kernels read and write a KV cell: a float32, or the bits of a bfloat16 as uint16. Arithmetic is float32."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pipelines.runtime.simd import FLOAT, INT16, INT32, ask_for, widened


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def widen(typingctx: Any, stored: Any) -> Any:
    """float32 of what a cell holds: a float32, or the bits of a bfloat16 (uint16)."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return args[0] if sig.args[0] == types.float32 else widened(builder, args[0], INT32, FLOAT)

    return types.float32(stored), generate


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def narrow_like(typingctx: Any, value: Any, cells: Any) -> Any:
    """A float32 as `cells` (an array) stores it: unchanged, or rounded to the bits of the nearest bfloat16."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if sig.args[1].dtype == types.float32:
            return args[0]
        bits = builder.bitcast(args[0], INT32)
        odd = builder.and_(builder.lshr(bits, ir.Constant(INT32, 16)), ir.Constant(INT32, 1))
        rounded = builder.add(bits, builder.add(odd, ir.Constant(INT32, 0x7FFF)))
        # Rounding could carry a NaN's bits over into an infinity or a zero.
        quiet = builder.or_(bits, ir.Constant(INT32, 0x00400000))
        kept = builder.select(builder.fcmp_unordered("uno", args[0], args[0]), quiet, rounded)
        return builder.trunc(builder.lshr(kept, ir.Constant(INT32, 16)), INT16)

    return cells.dtype(types.float32, cells), generate


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def prefetch(typingctx: Any, array: Any, at: Any) -> Any:
    """Ask for the cache line of array[at], which may lie outside."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        data = context.make_array(sig.args[0])(context, builder, args[0]).data
        ask_for(builder, builder.gep(data, [args[1]]))
        return context.get_dummy_value()

    return types.void(array, types.int64), generate
