"""Quantising a row of activations to int8 blocks, as LLVM IR.

A block of 32 inputs of one row becomes a record of RECORD_WORDS words:

    0..7   32 int8 codes c:  x = scale * c
    8      scale, float32; NaN if the block holds anything but finite numbers; 0 if it would be subnormal
    9      -MAGIC * scale, exactly, for the last two bits of a scale are 0 (infinite if |x| > 3e33, and so the result)
    10 11  one term for each weight block of 16 or 32 inputs: with a minimum, scale * sum(c) in float32; without,
           start - 128 * sum(c) in int32, which the integer sum of q * c begins with

The sum is that of the codes, not of x: the rounding error of x then meets the weights less their minimum, and the error
of the product is a quarter (measured as KL).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from edge_llm.kernels.layout import ACTIVATION_BLOCK, RECORD_WORDS, ROW_TILE
from edge_llm.kernels.lowering import Lowering, fma
from edge_llm.kernels.vector_ir import (
    F32,
    I8,
    I32,
    I64,
    broadcast,
    call,
    constant,
    integers_to_float,
    load,
    offset,
    slice_lanes,
    store,
    vector,
)

MAGIC = 12582912.0
"""1.5 * 2^23: float32 numbers near it are whole, and their low bits that number"""
MAGIC_BITS = 0x4B400000
RECORD_BYTES = 4 * RECORD_WORDS
SCALE, NEGATIVE, TERMS = 32, 36, 40
"""byte offsets in a record of the words 8, 9 and 10"""
_TOGETHER = 4

Join = Callable[[Any, Any, Any], Any]


def integer_start(lowering: Lowering) -> int:
    """What integer sums start with, so that their bits are the float32 MAGIC + sum (where fma is fused), or 0."""
    return MAGIC_BITS if lowering.fused else 0


def quantise_row(lowering: Lowering) -> Callable[..., None]:
    """Intrinsic (x, record, blocks, halves, minimum): quantise `blocks` blocks of float32 at `x`.

    Records are ROW_TILE records apart. `halves` 1: a term for each 16 inputs; `minimum` 1: float32 terms (see above).
    """

    @intrinsic
    def quantise(typing_context: Any, x: Any, record: Any, blocks: Any, halves: Any, minimum: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: list[Any]) -> Any:
            x, record, blocks, halves, minimum = args
            halves, minimum = (builder.icmp_signed("!=", flag, I64(0)) for flag in (halves, minimum))
            last = builder.sub(blocks, I64(1))
            with cgutils.for_range_slice(builder, I64(0), blocks, I64(_TOGETHER), I64, inc=True) as (first, _):
                places = []
                for i in range(_TOGETHER):  # beyond the last block, that one again
                    number = call(builder, "llvm.smin.i64", I64, [builder.add(first, I64(i)), last])
                    from_x = builder.mul(number, I64(4 * ACTIVATION_BLOCK))
                    to_record = builder.mul(number, I64(ROW_TILE * RECORD_BYTES))
                    places.append((offset(builder, x, from_x), offset(builder, record, to_record)))
                _quantise_blocks(builder, lowering, places, halves, minimum)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    return quantise


def _quantise_blocks(
    builder: Any, lowering: Lowering, places: list[tuple[Any, Any]], halves: Any, minimum: Any
) -> None:
    """Four blocks (their inputs, their records) side by side: what is one number a block is a vector of four."""
    lanes = lowering.lanes
    words = vector(I32, lanes)
    starts = range(0, ACTIVATION_BLOCK, lanes)
    blocks = [[load(builder, offset(builder, x, 4 * at), vector(F32, lanes), 4) for at in starts] for x, _ in places]
    sizes = [[builder.and_(builder.bitcast(v, words), constant(I32, lanes, 0x7FFFFFFF)) for v in b] for b in blocks]
    scale, inverse = _scales(builder, _across(builder, [_fold(builder, b, _larger) for b in sizes], _larger))
    first, second = [], []
    for i, (values, (_, record)) in enumerate(zip(blocks, places, strict=True)):
        factor = broadcast(builder, builder.extract_element(inverse, I32(i)), lanes)
        rounded = [fma(builder, lowering, value, factor, constant(F32, lanes, MAGIC)) for value in values]
        bits = [builder.bitcast(value, words) for value in rounded]
        for at, value in zip(starts, bits, strict=True):  # the low byte of the bits is the code
            store(builder, builder.trunc(value, vector(I8, lanes)), offset(builder, record, at), min(lanes, 16))
        middle = len(bits) // 2
        first.append(_fold(builder, bits[:middle], _sum))
        second.append(_fold(builder, bits[middle:], _sum))
    # Sums of bits wrap, and so does what MAGIC adds to them.
    excess = constant(I32, _TOGETHER, (ACTIVATION_BLOCK // 2 * MAGIC_BITS) % (1 << 32))
    sums = [builder.sub(_across(builder, half, _sum), excess) for half in (first, second)]
    sums[0] = builder.select(halves, sums[0], builder.add(*sums))
    terms = [_term(builder, lowering, total, scale, minimum) for total in sums]
    negative = builder.fmul(scale, constant(F32, _TOGETHER, -MAGIC))
    tail = [builder.bitcast(value, vector(I32, _TOGETHER)) for value in (scale, negative)]
    for row, (_, record) in zip(_transpose(builder, [*tail, *terms]), places, strict=True):
        store(builder, row, offset(builder, record, SCALE), 16)


def _scales(builder: Any, largest: Any) -> tuple[Any, Any]:
    """Scales and their inverses, from the bits of the largest magnitudes.

    (NaN, 0) for a block that is not finite, (0, 0) if the scale would be subnormal.
    """

    def every(value: float) -> Any:
        return constant(F32, _TOGETHER, value)

    exact = builder.fmul(builder.bitcast(largest, vector(F32, _TOGETHER)), every(1 / 127))
    cut = builder.and_(builder.bitcast(exact, vector(I32, _TOGETHER)), constant(I32, _TOGETHER, ~3))
    short = builder.bitcast(cut, vector(F32, _TOGETHER))
    finite = builder.icmp_signed("<", largest, constant(I32, _TOGETHER, 0x7F800000))
    usable = builder.and_(finite, builder.fcmp_ordered(">=", short, every(2.0**-126)))
    scale = builder.select(usable, short, builder.select(finite, every(0.0), every(float("nan"))))
    return scale, builder.select(usable, builder.fdiv(every(1.0), short), every(0.0))


def _term(builder: Any, lowering: Lowering, total: Any, scale: Any, minimum: Any) -> Any:
    with_minimum = builder.fmul(scale, integers_to_float(builder, total))
    without = builder.sub(
        constant(I32, _TOGETHER, integer_start(lowering)), builder.mul(total, constant(I32, _TOGETHER, 128))
    )
    return builder.select(minimum, builder.bitcast(with_minimum, without.type), without)


def _larger(builder: Any, a: Any, b: Any) -> Any:
    """The larger of signed integers. Of the bits of magnitudes: so NaN is larger than anything."""
    return call(builder, f"llvm.smax.v{a.type.count}i32", a.type, [a, b])


def _sum(builder: Any, a: Any, b: Any) -> Any:
    return builder.add(a, b)


def _fold(builder: Any, values: list[Any], join: Join) -> Any:
    total = values[0]
    for value in values[1:]:
        total = join(builder, total, value)
    return total


def _across(builder: Any, values: list[Any], join: Join) -> Any:
    """i32 [4]: the lanes of each of four vectors joined, in shuffles that stay within 16 bytes as long as they can."""
    pairs = [
        join(builder, _interleave(builder, a, b, 1, 0), _interleave(builder, a, b, 1, 2))
        for a, b in (values[:2], values[2:])
    ]
    left, right = pairs
    total = join(builder, _interleave(builder, left, right, 2, 0), _interleave(builder, left, right, 2, 2))
    while (lanes := total.type.count) > _TOGETHER:
        total = join(
            builder, slice_lanes(builder, total, 0, lanes // 2), slice_lanes(builder, total, lanes // 2, lanes // 2)
        )
    return total


def _interleave(builder: Any, a: Any, b: Any, run: int, first: int) -> Any:
    """Runs of `run` lanes of a and b in turn, within each 16 bytes from lane `first` on (the unpack instructions)."""
    lanes = a.type.count
    order = []
    for group in range(first, lanes, 4):
        for at in range(group, group + 2, run):
            order += [*range(at, at + run), *range(lanes + at, lanes + at + run)]
    return builder.shuffle_vector(a, b, ir.Constant(vector(I32, lanes), order))


def _transpose(builder: Any, rows: list[Any]) -> list[Any]:
    """Four vectors of four, turned about."""
    result = []
    for first in (0, 2):
        left, right = (_interleave(builder, a, b, 1, first) for a, b in (rows[:2], rows[2:]))
        result += [_interleave(builder, left, right, 2, at) for at in (0, 2)]
    return result
