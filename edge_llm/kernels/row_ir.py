"""What attention does with one row before it attends, as LLVM IR: measure a vector, quantise it, store it in the ring.

Codes are rounded to the nearest integer, to even, by adding 1.5 * 2^23: the sum's low bits are then the code in two's
complement, and a NaN gives some bits where fptosi would give poison.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from edge_llm.kernels.layout import TILE
from edge_llm.kernels.lowering import fma
from edge_llm.kernels.tile_product import BYTE_DOT, DIM_STEP, LOWERING, QUERY_TERMS, element
from edge_llm.kernels.vector_ir import F32, I8, I16, I32, I64, broadcast, constant, load, slice_lanes, store, vector

_F64 = ir.DoubleType()
_ROUND = 12582912.0  # 1.5 * 2^23
_ROUND_BITS = 0x4B400000
_FLOATS = vector(F32, DIM_STEP)
_WORDS = vector(I32, DIM_STEP)


def _each(builder: Any, x: Any, dim: Any, body: Callable[[Any, Any], None]) -> None:
    """body(vector, index of its first element) for the vectors of DIM_STEP float32 of [dim] at `x`."""
    with cgutils.for_range(builder, builder.udiv(dim, I64(DIM_STEP)), intp=I64) as loop:
        first = builder.mul(loop.index, I64(DIM_STEP))
        body(load(builder, element(builder, x, first), _FLOATS, 4), first)


def _reduce(builder: Any, value: Any, combine: Callable[[Any, Any], Any]) -> Any:
    count = value.type.count
    while count > 1:
        count //= 2
        value = combine(slice_lanes(builder, value, 0, count), slice_lanes(builder, value, count, count))
    return builder.extract_element(value, I32(0))


def _code_bits(builder: Any, value: Any, inverse: Any) -> Any:
    """i32 lanes whose low bits are the codes of value * inverse."""
    factor = broadcast(builder, inverse, DIM_STEP)
    return builder.bitcast(fma(builder, LOWERING, value, factor, constant(F32, DIM_STEP, _ROUND)), _WORDS)


@intrinsic
def sum_of_squares(_: Any, x: Any, dim: Any) -> Any:
    """float64: the sum of x^2 over float32 [dim], always in the same order. No square of a float32 overflows."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, dim = args
        wide = vector(_F64, DIM_STEP)
        total = cgutils.alloca_once_value(builder, constant(_F64, DIM_STEP, 0.0))

        def add(value: Any, first: Any) -> None:
            value = builder.fpext(value, wide)
            builder.store(builder.fadd(builder.load(total), builder.fmul(value, value)), total)

        _each(builder, x, dim, add)
        return _reduce(builder, builder.load(total), builder.fadd)

    return types.float64(types.int64, types.int64), generate


@intrinsic
def magnitude(_: Any, x: Any, dim: Any) -> Any:
    """float32: the greatest |x| of float32 [dim], inf or NaN if one is (compared as bits: NaN is the greatest)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, dim = args
        most = cgutils.alloca_once_value(builder, constant(I32, DIM_STEP, 0))

        def greater(a: Any, b: Any) -> Any:
            return builder.select(builder.icmp_signed(">", a, b), a, b)

        def take(value: Any, first: Any) -> None:
            size = builder.and_(builder.bitcast(value, _WORDS), constant(I32, DIM_STEP, 0x7FFFFFFF))
            builder.store(greater(size, builder.load(most)), most)

        _each(builder, x, dim, take)
        return builder.bitcast(_reduce(builder, builder.load(most), greater), F32)

    return types.float32(types.int64, types.int64), generate


@intrinsic
def quantise_query(_: Any, x: Any, dim: Any, inverse: Any, planes: Any) -> Any:
    """Codes of x * inverse, float32 [dim], into planes of `dim` bytes (see `tile_product`); int64: their sum."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, dim, inverse, planes = args
        total = cgutils.alloca_once_value(builder, constant(I32, DIM_STEP, 0))

        def quantise(value: Any, first: Any) -> None:
            bits = _code_bits(builder, value, inverse)
            code = builder.sub(bits, constant(I32, DIM_STEP, _ROUND_BITS))
            builder.store(builder.add(builder.load(total), code), total)
            target = builder.add(planes, first)
            for plane, part in enumerate(_terms(builder, code)):
                store(builder, part, builder.add(target, builder.mul(dim, I64(plane))), 4)

        _each(builder, x, dim, quantise)
        return builder.sext(_reduce(builder, builder.load(total), builder.add), I64)

    return types.int64(types.int64, types.int64, types.float32, types.int64), generate


def _terms(builder: Any, code: Any) -> list[Any]:
    """What the planes hold of DIM_STEP codes: terms as bytes, or the codes of even and odd steps as words."""
    if not BYTE_DOT:
        halves = [vector(I32, DIM_STEP // 2)([*range(parity, DIM_STEP, 2)]) for parity in range(2)]
        return [builder.trunc(builder.shuffle_vector(code, code, half), vector(I16, DIM_STEP // 2)) for half in halves]
    if QUERY_TERMS == 1:
        return [builder.trunc(code, vector(I8, DIM_STEP))]
    high = builder.ashr(builder.add(code, constant(I32, DIM_STEP, 64)), constant(I32, DIM_STEP, 7))
    low = builder.sub(code, builder.shl(high, constant(I32, DIM_STEP, 7)))
    return [builder.trunc(term, vector(I8, DIM_STEP)) for term in (high, low)]


@intrinsic
def store_key_codes(_: Any, x: Any, dim: Any, inverse: Any, target: Any) -> Any:
    """Codes of x * inverse + 128 as one row of uint8 [dim / 4][TILE][4]; `target`: the row's first byte."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, dim, inverse, target = args

        def quantise(value: Any, first: Any) -> None:
            code = builder.add(_code_bits(builder, value, inverse), constant(I32, DIM_STEP, 128))
            groups = builder.bitcast(builder.trunc(code, vector(I8, DIM_STEP)), vector(I32, DIM_STEP // 4))
            for i in range(DIM_STEP // 4):
                place = element(builder, target, builder.add(first, I64(4 * i)), TILE)
                store(builder, builder.extract_element(groups, I32(i)), place, 4)

        _each(builder, x, dim, quantise)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.int64), generate


@intrinsic
def store_value_codes(_: Any, x: Any, dim: Any, inverse: Any, target: Any) -> Any:
    """Codes of x * inverse as one row of int8 [TILE / 4][dim][4]; `target`: the row's first byte."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, dim, inverse, target = args

        def quantise(value: Any, first: Any) -> None:
            codes = builder.trunc(_code_bits(builder, value, inverse), vector(I8, DIM_STEP))
            for i in range(DIM_STEP):  # byte by byte: the neighbours are other rows, perhaps of another thread
                store(
                    builder,
                    builder.extract_element(codes, I32(i)),
                    element(builder, target, builder.add(first, I64(i))),
                    1,
                )

        _each(builder, x, dim, quantise)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.int64), generate


@intrinsic
def store_floats(_: Any, x: Any, dim: Any, factor: Any, target: Any, step: Any) -> Any:
    """x * factor, float32 [dim], to `target`, `step` bytes apart."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, dim, factor, target, step = args

        def move(value: Any, first: Any) -> None:
            value = builder.fmul(value, broadcast(builder, factor, DIM_STEP))
            for i in range(DIM_STEP):
                place = element(builder, target, builder.add(first, I64(i)), step)
                store(builder, builder.extract_element(value, I32(i)), place, 4)

        _each(builder, x, dim, move)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.int64, types.int64), generate
