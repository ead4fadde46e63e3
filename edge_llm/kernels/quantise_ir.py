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

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from edge_llm.kernels.layout import ACTIVATION_BLOCK, RECORD_WORDS, ROW_TILE
from edge_llm.kernels.lowering import Lowering, fma
from edge_llm.kernels.vector_ir import F32, I8, I32, I64, broadcast, call, constant, load, offset, store, vector

MAGIC = 12582912.0
"""1.5 * 2^23: float32 numbers near it are whole, and their low bits that number"""
MAGIC_BITS = 0x4B400000
RECORD_BYTES = 4 * RECORD_WORDS
SCALE, NEGATIVE, TERMS = 32, 36, 40
"""byte offsets in a record of the words 8, 9 and 10"""


def integer_start(lowering: Lowering) -> int:
    """What integer sums start with, so that their bits are the float32 MAGIC + sum (where fma is fused), or 0."""
    return MAGIC_BITS if lowering.fused else 0


def quantise_row(lowering: Lowering) -> Callable[..., None]:
    """Intrinsic (x, record, blocks, halves, minimum): quantise `blocks` blocks of float32 at `x`.

    Records are ROW_TILE records apart. `halves` 1: a term for each 16 inputs; `minimum` 1: float32 terms (see above).
    """
    lanes = lowering.lanes
    start = integer_start(lowering)

    def block(builder: Any, x: Any, record: Any, halves: Any, minimum: Any) -> None:
        values = [
            load(builder, offset(builder, x, 4 * first), vector(F32, lanes), 4)
            for first in range(0, ACTIVATION_BLOCK, lanes)
        ]
        scale, inverse = _scale(builder, _largest(builder, values))
        factor, magic = broadcast(builder, inverse, lanes), constant(F32, lanes, MAGIC)
        rounded = [
            builder.bitcast(fma(builder, lowering, value, factor, magic), vector(I32, lanes)) for value in values
        ]
        for i, bits in enumerate(rounded):  # the low byte of the bits is the code
            store(builder, builder.trunc(bits, vector(I8, lanes)), offset(builder, record, i * lanes), min(lanes, 16))
        codes = [builder.sub(bits, constant(I32, lanes, MAGIC_BITS)) for bits in rounded]
        middle = len(codes) // 2
        first, second = _sum_lanes(builder, codes[:middle]), _sum_lanes(builder, codes[middle:])
        store(builder, scale, offset(builder, record, SCALE), 4)
        store(builder, builder.fmul(scale, F32(-MAGIC)), offset(builder, record, NEGATIVE), 4)
        for i, total in enumerate((builder.select(halves, first, builder.add(first, second)), second)):
            minimum_term = builder.bitcast(builder.fmul(scale, builder.sitofp(total, F32)), I32)
            start_term = builder.sub(I32(start), builder.mul(total, I32(128)))
            store(
                builder,
                builder.select(minimum, minimum_term, start_term),
                offset(builder, record, TERMS + 4 * i),
                4,
            )

    @intrinsic
    def quantise(typing_context: Any, x: Any, record: Any, blocks: Any, halves: Any, minimum: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: list[Any]) -> Any:
            x, record, blocks, halves, minimum = args
            halves, minimum = (builder.icmp_signed("!=", flag, I64(0)) for flag in (halves, minimum))
            with cgutils.for_range(builder, blocks, intp=I64) as loop:
                from_x = builder.mul(loop.index, I64(4 * ACTIVATION_BLOCK))
                to_record = builder.mul(loop.index, I64(ROW_TILE * RECORD_BYTES))
                block(builder, offset(builder, x, from_x), offset(builder, record, to_record), halves, minimum)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    return quantise


def _largest(builder: Any, values: list[Any]) -> Any:
    """Bits of the largest magnitude, as i32. Compared as integers, so that NaN is larger than anything."""
    lanes = values[0].type.count
    words = vector(I32, lanes)
    sizes = [builder.and_(builder.bitcast(value, words), constant(I32, lanes, 0x7FFFFFFF)) for value in values]
    while len(sizes) > 1:
        sizes = [
            call(builder, f"llvm.smax.v{lanes}i32", words, [a, b]) for a, b in zip(sizes[::2], sizes[1::2], strict=True)
        ]
    return call(builder, f"llvm.vector.reduce.smax.v{lanes}i32", I32, sizes)


def _scale(builder: Any, largest: Any) -> tuple[Any, Any]:
    """Scale and its inverse: (NaN, 0) if the block is not finite, (0, 0) if the scale would be subnormal."""
    exact = builder.fmul(builder.bitcast(largest, F32), F32(1 / 127))
    short = builder.bitcast(builder.and_(builder.bitcast(exact, I32), I32(~3)), F32)
    finite = builder.icmp_signed("<", largest, I32(0x7F800000))
    usable = builder.and_(finite, builder.fcmp_ordered(">=", short, F32(2.0**-126)))
    scale = builder.select(usable, short, builder.select(finite, F32(0.0), F32(float("nan"))))
    return scale, builder.select(usable, builder.fdiv(F32(1.0), short), F32(0.0))


def _sum_lanes(builder: Any, values: list[Any]) -> Any:
    total = values[0]
    for value in values[1:]:
        total = builder.add(total, value)
    return call(builder, f"llvm.vector.reduce.add.v{total.type.count}i32", I32, [total])
