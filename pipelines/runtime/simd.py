"""Vectors in LLVM IR: the inner loop of every matrix product, and the small words that other kernels' IR is made of.

LLVM turns the vectors into whatever the processor has. Sizes are chosen by the processor's features: with AVX-512 a
tile of 14 x 32 fills its 32 registers, elsewhere 6 x 16.
"""

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_WIDE = bool(llvm.get_host_cpu_features().get("avx512f", False))
LANES = 16 if _WIDE else 8
_VECTORS = 2
PANEL = LANES * _VECTORS
"""Output columns that are computed together; packed weights come in panels of this width."""
MAX_ROWS = 14 if _WIDE else 6
"""Rows that are computed together."""

BFLOAT16_BITS, FLOAT16_BITS = types.uint16, types.int16
"""How an array of either is typed for numba, which knows neither; only their bits are kept in it."""

FLOAT, HALF = ir.FloatType(), ir.HalfType()
INT16, INT32, INT64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
VECTOR = ir.VectorType(FLOAT, LANES)


def index(value: int) -> ir.Constant:
    return ir.Constant(INT64, value)


def spread(value: float) -> ir.Constant:
    return ir.Constant(VECTOR, [value] * LANES)


def call(builder: Any, name: str, operands: list[Any]) -> Any:
    """An LLVM intrinsic that takes and gives vectors, such as fma."""
    kind = ir.FunctionType(VECTOR, [VECTOR] * len(operands))
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.v{LANES}f32")
    return builder.call(function, operands)


def widened(builder: Any, bits: Any, stored: Any) -> Any:
    """float32 of 16 bits, or a vector of them, that an array of numba's type `stored` holds."""
    lanes = LANES if isinstance(bits.type, ir.VectorType) else 0
    halves, floats = (ir.VectorType(kind, lanes) if lanes else kind for kind in (HALF, FLOAT))
    if stored == FLOAT16_BITS:
        return builder.fpext(builder.bitcast(bits, halves), floats)
    integers = ir.VectorType(INT32, lanes) if lanes else INT32  # a bfloat16 is a float32's upper half
    sixteen = ir.Constant(integers, [16] * lanes if lanes else 16)
    return builder.bitcast(builder.shl(builder.zext(bits, integers), sixteen), floats)


def load_vector(builder: Any, place: Any, stored: Any) -> Any:
    """The float32 vector that begins at `place`, in an array of numba's type `stored`."""
    if stored == types.float32:
        return builder.load(builder.bitcast(place, VECTOR.as_pointer()), align=4)
    bits = builder.load(builder.bitcast(place, ir.VectorType(INT16, LANES).as_pointer()), align=2)
    return widened(builder, bits, stored)


def broadcast(builder: Any, value: Any) -> Any:
    undefined = ir.Constant(VECTOR, ir.Undefined)
    one = builder.insert_element(undefined, value, ir.Constant(INT32, 0))
    return builder.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(INT32, LANES), [0] * LANES))


def ask_for(builder: Any, place: Any) -> None:
    bytes_ = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [bytes_] + [INT32] * 3)
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read, second_level, data = (ir.Constant(INT32, n) for n in (0, 2, 1))
    builder.call(prefetch, [builder.bitcast(place, bytes_), read, second_level, data])


def fold(builder: Any, count: Any, start: Any, step: Any) -> Any:
    """Fold `step(offset, so far)` over offsets 0, LANES, ... below `count`, a multiple of LANES."""
    entry = builder.block
    loop, done = builder.append_basic_block("fold.loop"), builder.append_basic_block("fold.done")
    builder.cbranch(builder.icmp_signed(">", count, index(0)), loop, done)
    builder.position_at_end(loop)
    offset, so_far = builder.phi(INT64), builder.phi(VECTOR)
    offset.add_incoming(index(0), entry)
    so_far.add_incoming(start, entry)
    value = step(offset, so_far)
    following = builder.add(offset, index(LANES))
    offset.add_incoming(following, builder.block)
    so_far.add_incoming(value, builder.block)
    last = builder.block
    builder.cbranch(builder.icmp_signed("<", following, count), loop, done)
    builder.position_at_end(done)
    result = builder.phi(VECTOR)
    result.add_incoming(start, entry)
    result.add_incoming(value, last)
    return result


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def panel_product(
    typingctx: Any, rows: Any, x: Any, x_at: Any, x_stride: Any, w: Any, w_at: Any, w_stride: Any, ahead: Any,
    depth: Any, out: Any, out_at: Any, out_stride: Any, accumulate: Any,
) -> Any:  # fmt: skip
    """out[out_at + r * out_stride + j] (+)= sum over k < depth of x[x_at + r * x_stride + k] *
    w[w_at + k * w_stride + j] for r < rows <= MAX_ROWS, j < PANEL.

    x and out are float32, w is float32 or the bits of bfloat16 or float16. Offsets and strides count elements from the
    start of the array's memory; `ahead` says how far on from what is read w is prefetched. Every row is summed in the
    order of k by fused multiply-adds, so that a row's result does not depend on the rows beside it.
    """
    signature = types.void(
        rows, x, x_at, x_stride, w, w_at, w_stride, ahead, depth, out, out_at, out_stride, accumulate
    )

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        def data(position: int) -> Any:
            return context.make_array(sig.args[position])(context, builder, args[position]).data

        def integer(position: int) -> Any:
            return context.cast(builder, args[position], sig.args[position], types.int64)

        x_from = builder.gep(data(1), [integer(2)])
        w_from = builder.gep(data(4), [integer(5)])
        out_from = builder.gep(data(9), [integer(10)])
        accumulating = context.cast(builder, args[12], sig.args[12], types.boolean)
        end = builder.append_basic_block("panel.end")
        switch = builder.switch(integer(0), end)
        for count in range(1, MAX_ROWS + 1):
            block = builder.append_basic_block(f"panel.rows{count}")
            switch.add_case(index(count), block)
            builder.position_at_end(block)
            _rows_loop(
                builder, count, (x_from, integer(3)), (w_from, integer(6), integer(7), sig.args[4].dtype), integer(8),
                (out_from, integer(11)),
                accumulating,
            )  # fmt: skip
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return signature, generate


def _rows_loop(
    builder: Any, count: int, x_rows: tuple[Any, Any], w_rows: tuple[Any, Any, Any, Any], depth: Any,
    out_rows: tuple[Any, Any], accumulating: Any,
) -> None:  # fmt: skip
    """Rows are a pointer and a stride; those of w also how far ahead to prefetch, and what is stored."""
    zero = spread(0.0)
    (x, x_stride), (out, out_stride) = x_rows, out_rows
    x_starts = [builder.gep(x, [builder.mul(x_stride, index(r))]) for r in range(count)]
    places = [
        builder.bitcast(
            builder.gep(out, [builder.add(builder.mul(out_stride, index(r)), index(v * LANES))]),
            VECTOR.as_pointer(),
        )
        for r in range(count)
        for v in range(_VECTORS)
    ]
    entry = builder.block
    loop, done = builder.append_basic_block("panel.k"), builder.append_basic_block("panel.stored")
    builder.cbranch(builder.icmp_signed(">", depth, index(0)), loop, done)

    builder.position_at_end(loop)
    k = builder.phi(INT64)
    k.add_incoming(index(0), entry)
    sums = [builder.phi(VECTOR) for _ in places]
    for total in sums:
        total.add_incoming(zero, entry)
    columns = _load_columns(builder, w_rows, k)
    added = []
    for r in range(count):
        value = broadcast(builder, builder.load(builder.gep(x_starts[r], [k])))
        added += [call(builder, "fma", [columns[v], value, sums[r * _VECTORS + v]]) for v in range(_VECTORS)]
    following = builder.add(k, index(1))
    k.add_incoming(following, loop)
    for total, new in zip(sums, added, strict=True):
        total.add_incoming(new, loop)
    builder.cbranch(builder.icmp_signed("<", following, depth), loop, done)

    builder.position_at_end(done)
    results = [builder.phi(VECTOR) for _ in places]
    for result, new in zip(results, added, strict=True):
        result.add_incoming(zero, entry)
        result.add_incoming(new, loop)
    # What was there is added last: a sum that starts at a residual's largest activations rounds at their size at
    # every step (logits of the real model were off by 1.6e-3 instead of 3e-4).
    for result, place in zip(results, places, strict=True):
        before = builder.select(accumulating, builder.load(place, align=4), zero)
        builder.store(builder.fadd(result, before), place, align=4)


def _load_columns(builder: Any, rows: tuple[Any, Any, Any, Any], k: Any) -> list[Any]:
    """Row k of the panel as float32 vectors; what lies further on is asked for on the way."""
    w, stride, ahead, stored = rows
    columns = []
    for v in range(_VECTORS):
        place = builder.gep(w, [builder.add(builder.mul(k, stride), index(v * LANES))])
        ask_for(builder, builder.gep(place, [ahead]))
        columns.append(load_vector(builder, place, stored))
    return columns
