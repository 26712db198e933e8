"""Vector arithmetic over rows of float32 that LLVM does not make of loops by itself: products summed, maxima, exp.

Counts are multiples of LANES; offsets count elements from the start of an array's memory.
"""

import math
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pipelines.runtime.simd import FLOAT, INT32, LANES, VECTOR, broadcast, call, fold, load_vector, spread

_INTEGERS = ir.VectorType(INT32, LANES)
_ROUND = 12582912.0  # 1.5 * 2**23: adding it leaves the nearest integer in a float's low bits
_ROUND_BITS = 0x4B400000
_LN_2_HIGH, _LN_2_LOW = 0.693359375, -2.12194440e-4


def _pointer(context: Any, builder: Any, sig: Any, args: Any, array: int) -> Any:
    """To the element that args[array + 1] counts off in args[array]."""
    return builder.gep(context.make_array(sig.args[array])(context, builder, args[array]).data, [args[array + 1]])


def _store(builder: Any, value: Any, place: Any) -> None:
    builder.store(value, builder.bitcast(place, VECTOR.as_pointer()), align=4)


def _sum(builder: Any, vector: Any) -> Any:
    kind = ir.FunctionType(FLOAT, [FLOAT, VECTOR])
    reduce = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fadd.v{LANES}f32")
    return builder.call(reduce, [ir.Constant(FLOAT, 0.0), vector], fastmath=("reassoc",))


def _exponential(builder: Any, x: Any) -> Any:
    """exp to about 2e-7 of its value; NaN stays NaN; the argument is clamped to +-87."""
    for bound, outside in ((-87.0, "<"), (87.0, ">")):
        x = builder.select(builder.fcmp_ordered(outside, x, spread(bound)), spread(bound), x)
    rounded = call(builder, "fma", [x, spread(math.log2(math.e)), spread(_ROUND)])
    power = builder.sub(builder.bitcast(rounded, _INTEGERS), ir.Constant(_INTEGERS, [_ROUND_BITS] * LANES))
    whole = builder.sitofp(power, VECTOR)
    for part in (_LN_2_HIGH, _LN_2_LOW):
        x = call(builder, "fma", [whole, spread(-part), x])
    series = spread(1 / 720)
    for coefficient in (1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
        series = call(builder, "fma", [series, x, spread(coefficient)])
    exponent = builder.add(power, ir.Constant(_INTEGERS, [127] * LANES))
    scale = builder.bitcast(builder.shl(exponent, ir.Constant(_INTEGERS, [23] * LANES)), VECTOR)
    return builder.fmul(series, scale)


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def dot(typingctx: Any, x: Any, x_at: Any, cells: Any, cells_at: Any, count: Any) -> Any:
    """Sum over i < count of x[x_at + i] * cells[cells_at + i], cells float32 or the bits of a short type."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        left, right = (_pointer(context, builder, sig, args, array) for array in (0, 2))

        def step(offset: Any, so_far: Any) -> Any:
            stored = (sig.args[0].dtype, sig.args[2].dtype)
            operands = [
                load_vector(builder, builder.gep(pointer, [offset]), kind)
                for pointer, kind in zip((left, right), stored, strict=True)
            ]
            return call(builder, "fma", [*operands, so_far])

        return _sum(builder, fold(builder, args[4], spread(0.0), step))

    return types.float32(x, types.int64, cells, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def highest(typingctx: Any, x: Any, x_at: Any, count: Any) -> Any:
    """The largest of x[x_at : x_at + count]; NaNs are passed over."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        start = _pointer(context, builder, sig, args, 0)

        def step(offset: Any, so_far: Any) -> Any:
            value = load_vector(builder, builder.gep(start, [offset]), types.float32)
            return builder.select(builder.fcmp_ordered(">", value, so_far), value, so_far)

        best = fold(builder, args[2], spread(-math.inf), step)
        kind = ir.FunctionType(FLOAT, [VECTOR])
        reduce = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fmax.v{LANES}f32")
        return builder.call(reduce, [best])

    return types.float32(x, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def exponentials(typingctx: Any, x: Any, x_at: Any, count: Any, less: Any) -> Any:
    """Replace each of x[x_at : x_at + count] by exp(it - less); their sum."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        start = _pointer(context, builder, sig, args, 0)
        shift = broadcast(builder, args[3])

        def step(offset: Any, so_far: Any) -> Any:
            place = builder.gep(start, [offset])
            value = _exponential(builder, builder.fsub(load_vector(builder, place, types.float32), shift))
            _store(builder, value, place)
            return builder.fadd(so_far, value)

        return _sum(builder, fold(builder, args[2], spread(0.0), step))

    return types.float32(x, types.int64, types.int64, types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def gated(typingctx: Any, gate: Any, gate_at: Any, up: Any, up_at: Any, out: Any, out_at: Any, count: Any) -> Any:
    """out = silu(gate) * up = gate / (1 + exp(-gate)) * up, over `count` elements of each."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        gates, ups, outs = (_pointer(context, builder, sig, args, array) for array in (0, 2, 4))

        def step(offset: Any, so_far: Any) -> Any:
            opened = load_vector(builder, builder.gep(gates, [offset]), types.float32)
            below = builder.fadd(spread(1.0), _exponential(builder, builder.fsub(spread(0.0), opened)))
            value = builder.fmul(
                builder.fdiv(opened, below), load_vector(builder, builder.gep(ups, [offset]), types.float32)
            )
            _store(builder, value, builder.gep(outs, [offset]))
            return so_far

        fold(builder, args[6], spread(0.0), step)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(gate, i64, up, i64, out, i64, i64), generate
