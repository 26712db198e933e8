"""The few operations that numba's Python lacks, written as LLVM IR: the inner loop of every matrix product, bits of
floats, atomics.

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

_FLOAT = ir.FloatType()
_INT16, _INT32, _INT64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, LANES)


def _index(value: int) -> ir.Constant:
    return ir.Constant(_INT64, value)


def _widened(builder: Any, bits: Any, integers: Any, floats: Any) -> Any:
    """bfloat16 bits -> float32: they are its upper half."""
    sixteen = ir.Constant(integers, 16 if integers is _INT32 else [16] * LANES)
    return builder.bitcast(builder.shl(builder.zext(bits, integers), sixteen), floats)


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def panel_product(
    typingctx: Any, rows: Any, x: Any, x_at: Any, x_stride: Any, w: Any, w_at: Any, w_stride: Any, ahead: Any,
    depth: Any, out: Any, out_at: Any, out_stride: Any, accumulate: Any,
) -> Any:  # fmt: skip
    """out[out_at + r * out_stride + j] (+)= sum over k < depth of x[x_at + r * x_stride + k] *
    w[w_at + k * w_stride + j] for r < rows <= MAX_ROWS, j < PANEL.

    x and out are float32, w is float32 or the bits of bfloat16 (uint16). Offsets and strides count elements from the
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
            switch.add_case(_index(count), block)
            builder.position_at_end(block)
            _rows_loop(
                builder, count, (x_from, integer(3)), (w_from, integer(6), integer(7)), integer(8),
                (out_from, integer(11)),
                accumulating,
            )  # fmt: skip
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return signature, generate


def _rows_loop(
    builder: Any, count: int, x_rows: tuple[Any, Any], w_rows: tuple[Any, Any, Any], depth: Any,
    out_rows: tuple[Any, Any], accumulating: Any,
) -> None:  # fmt: skip
    """Rows are a pointer and a stride; those of w also how far ahead to prefetch."""
    zero = ir.Constant(_VECTOR, [0.0] * LANES)
    fma = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), f"llvm.fma.v{LANES}f32"
    )
    (x, x_stride), (out, out_stride) = x_rows, out_rows
    x_starts = [builder.gep(x, [builder.mul(x_stride, _index(r))]) for r in range(count)]
    places = [
        builder.bitcast(
            builder.gep(out, [builder.add(builder.mul(out_stride, _index(r)), _index(v * LANES))]),
            _VECTOR.as_pointer(),
        )
        for r in range(count)
        for v in range(_VECTORS)
    ]
    entry = builder.block
    loop, done = builder.append_basic_block("panel.k"), builder.append_basic_block("panel.stored")
    builder.cbranch(builder.icmp_signed(">", depth, _index(0)), loop, done)

    builder.position_at_end(loop)
    k = builder.phi(_INT64)
    k.add_incoming(_index(0), entry)
    sums = [builder.phi(_VECTOR) for _ in places]
    for total in sums:
        total.add_incoming(zero, entry)
    columns = _load_columns(builder, w_rows, k)
    added = []
    for r in range(count):
        spread = _broadcast(builder, builder.load(builder.gep(x_starts[r], [k])))
        added += [builder.call(fma, [columns[v], spread, sums[r * _VECTORS + v]]) for v in range(_VECTORS)]
    following = builder.add(k, _index(1))
    k.add_incoming(following, loop)
    for total, value in zip(sums, added, strict=True):
        total.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", following, depth), loop, done)

    builder.position_at_end(done)
    results = [builder.phi(_VECTOR) for _ in places]
    for result, value in zip(results, added, strict=True):
        result.add_incoming(zero, entry)
        result.add_incoming(value, loop)
    # What was there is added last: a sum that starts at a residual's largest activations rounds at their size at
    # every step (logits of the real model were off by 1.6e-3 instead of 3e-4).
    for result, place in zip(results, places, strict=True):
        before = builder.select(accumulating, builder.load(place, align=4), zero)
        builder.store(builder.fadd(result, before), place, align=4)


def _load_columns(builder: Any, rows: tuple[Any, Any, Any], k: Any) -> list[Any]:
    """Row k of the panel as float32 vectors; what lies further on is asked for on the way."""
    w, stride, ahead = rows
    columns = []
    for v in range(_VECTORS):
        place = builder.gep(w, [builder.add(builder.mul(k, stride), _index(v * LANES))])
        _prefetch(builder, builder.gep(place, [ahead]))
        columns.append(_load_vector(builder, place))
    return columns


def _prefetch(builder: Any, place: Any) -> None:
    bytes_ = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [bytes_] + [_INT32] * 3)
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read, second_level, data = (ir.Constant(_INT32, n) for n in (0, 2, 1))
    builder.call(prefetch, [builder.bitcast(place, bytes_), read, second_level, data])


def _load_vector(builder: Any, place: Any) -> Any:
    """The float32 vector that begins at `place`, a pointer to float32 or to the bits of bfloat16."""
    if place.type.pointee == _FLOAT:
        return builder.load(builder.bitcast(place, _VECTOR.as_pointer()), align=4)
    stored = builder.load(builder.bitcast(place, ir.VectorType(_INT16, LANES).as_pointer()), align=2)
    return _widened(builder, stored, ir.VectorType(_INT32, LANES), _VECTOR)


def _broadcast(builder: Any, value: Any) -> Any:
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    one = builder.insert_element(undefined, value, ir.Constant(_INT32, 0))
    return builder.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(_INT32, LANES), [0] * LANES))


def _vector_reduction(builder: Any, count: Any, start: Any, step: Any) -> Any:
    """Fold `step(offset, so far)` over offsets 0, LANES, ... below `count`, a multiple of LANES."""
    entry = builder.block
    loop, done = builder.append_basic_block("fold.loop"), builder.append_basic_block("fold.done")
    builder.cbranch(builder.icmp_signed(">", count, _index(0)), loop, done)
    builder.position_at_end(loop)
    offset, so_far = builder.phi(_INT64), builder.phi(_VECTOR)
    offset.add_incoming(_index(0), entry)
    so_far.add_incoming(start, entry)
    value = step(offset, so_far)
    following = builder.add(offset, _index(LANES))
    offset.add_incoming(following, builder.block)
    so_far.add_incoming(value, builder.block)
    last = builder.block
    builder.cbranch(builder.icmp_signed("<", following, count), loop, done)
    builder.position_at_end(done)
    result = builder.phi(_VECTOR)
    result.add_incoming(start, entry)
    result.add_incoming(value, last)
    return result


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def dot(typingctx: Any, x: Any, x_at: Any, cells: Any, cells_at: Any, count: Any) -> Any:
    """Sum over i < count, a multiple of LANES, of x[x_at + i] * cells[cells_at + i], cells as `widen` reads them."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        left, right = (
            builder.gep(context.make_array(sig.args[p])(context, builder, args[p]).data, [args[p + 1]]) for p in (0, 2)
        )
        kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
        fma = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")

        def step(offset: Any, so_far: Any) -> Any:
            operands = [_load_vector(builder, builder.gep(pointer, [offset])) for pointer in (left, right)]
            return builder.call(fma, [*operands, so_far])

        sums = _vector_reduction(builder, args[4], ir.Constant(_VECTOR, [0.0] * LANES), step)
        kind = ir.FunctionType(_FLOAT, [_FLOAT, _VECTOR])
        reduce = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fadd.v{LANES}f32")
        return builder.call(reduce, [ir.Constant(_FLOAT, 0.0), sums], fastmath=("reassoc",))

    return types.float32(x, types.int64, cells, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def highest(typingctx: Any, x: Any, x_at: Any, count: Any) -> Any:
    """The largest of x[x_at : x_at + count], count a multiple of LANES; NaNs are passed over."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        start = builder.gep(context.make_array(sig.args[0])(context, builder, args[0]).data, [args[1]])

        def step(offset: Any, so_far: Any) -> Any:
            value = _load_vector(builder, builder.gep(start, [offset]))
            return builder.select(builder.fcmp_ordered(">", value, so_far), value, so_far)

        lowest = ir.Constant(_VECTOR, [float("-inf")] * LANES)
        best = _vector_reduction(builder, args[2], lowest, step)
        kind = ir.FunctionType(_FLOAT, [_VECTOR])
        reduce = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fmax.v{LANES}f32")
        return builder.call(reduce, [best])

    return types.float32(x, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def prefetch(typingctx: Any, array: Any, at: Any) -> Any:
    """Ask for the cache line of array[at], which may lie outside."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        data = context.make_array(sig.args[0])(context, builder, args[0]).data
        _prefetch(builder, builder.gep(data, [args[1]]))
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def float_of_bits(typingctx: Any, bits: Any) -> Any:
    """The float32 with these bits (an int32)."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _FLOAT)

    return types.float32(types.int32), generate


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def bits_of_float(typingctx: Any, value: Any) -> Any:
    """The bits of a float32, as an int32."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _INT32)

    return types.int32(types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def widen(typingctx: Any, stored: Any) -> Any:
    """float32 of what a cell holds: a float32, or the bits of a bfloat16 (uint16)."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return args[0] if sig.args[0] == types.float32 else _widened(builder, args[0], _INT32, _FLOAT)

    return types.float32(stored), generate


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def narrow_like(typingctx: Any, value: Any, cells: Any) -> Any:
    """A float32 as `cells` (an array) stores it: unchanged, or rounded to the bits of the nearest bfloat16."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if sig.args[1].dtype == types.float32:
            return args[0]
        bits = builder.bitcast(args[0], _INT32)
        odd = builder.and_(builder.lshr(bits, ir.Constant(_INT32, 16)), ir.Constant(_INT32, 1))
        rounded = builder.add(bits, builder.add(odd, ir.Constant(_INT32, 0x7FFF)))
        # Rounding could carry a NaN's bits over into an infinity or a zero.
        quiet = builder.or_(bits, ir.Constant(_INT32, 0x00400000))
        kept = builder.select(builder.fcmp_unordered("uno", args[0], args[0]), quiet, rounded)
        return builder.trunc(builder.lshr(kept, ir.Constant(_INT32, 16)), _INT16)

    return cells.dtype(types.float32, cells), generate


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def atomic_add(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
    """Add to an int64 cell that other threads use too; what it held before. Sequentially consistent."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        data = context.make_array(sig.args[0])(context, builder, args[0]).data
        return builder.atomic_rmw("add", builder.gep(data, [args[1]]), args[2], "seq_cst")

    return types.int64(array, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def atomic_load(typingctx: Any, array: Any, index: Any) -> Any:
    """Read an int64 cell that other threads write."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        data = context.make_array(sig.args[0])(context, builder, args[0]).data
        return builder.load_atomic(builder.gep(data, [args[1]]), "seq_cst", 8)

    return types.int64(array, types.int64), generate
