"""The softmax of one split of the KV cache and the merge of splits, as LLVM IR in a fixed order.

Scores are in units of log2, for 2^x needs no multiplication. A split's state is (maximum, sum) and its unscaled output;
splits are merged one after another in the order of positions (the running rule of online softmax, arXiv:1805.02867). A
split without a row to attend to has (LOWEST, 0) and zeros, and merging it changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from edge_llm.kernels.layout import SPLIT, TILE
from edge_llm.kernels.lowering import fma
from edge_llm.kernels.tile_product import (
    BYTE_DOT,
    DIM_STEP,
    LANES,
    LOWERING,
    MAX_VECTORS,
    WEIGHT_TERMS,
    code_limit,
    element,
)
from edge_llm.kernels.vector_ir import F32, I32, I64, broadcast, constant, load, slice_lanes, store, vector

MASKED = -3.3e38
"""score of a row that is not attended to"""
LOWEST = -1.6e38
"""least maximum of a split: below any score that fits float32 by far, and so far above MASKED that masked weights are 0"""
TINY = 1.0e-30
"""weights of a tile that are all below it count as 0, for their scale would overflow"""
TILES = SPLIT // TILE

_EXP2 = (0.6931470036506653, 0.24022242426872253, 0.05550733581185341, 0.009671512991189957, 0.001326472731307149)
# Minimax fit of (2^x - 1) / x on [-1/2, 1/2] by Lawson's iteration: relative error of 2^x 9.2e-8.
_ROUND = 12582912.0
# 1.5 * 2^23: added to a float32 below 2^22 it leaves the nearest integer, to even, in the low 22 bits. For NaN it leaves
# some bits, where fptosi would give poison.


def _exp2(builder: Any, x: Any) -> Any:
    """2^x for x < 128; exactly 1 at 0, exactly 0 below -126, NaN for NaN."""
    lanes = x.type.count
    biased = constant(F32, lanes, _ROUND + 127)  # the exponent's bias comes along
    shifted = builder.fadd(x, biased)
    fraction = builder.fsub(x, builder.fsub(shifted, biased))
    value = constant(F32, lanes, _EXP2[-1])
    for coefficient in (*_EXP2[-2::-1], 1.0):
        value = fma(builder, LOWERING, value, fraction, constant(F32, lanes, coefficient))
    exponent = builder.bitcast(shifted, vector(I32, lanes))
    power = builder.bitcast(builder.shl(exponent, constant(I32, lanes, 23)), x.type)
    inside = builder.fcmp_unordered(">=", x, constant(F32, lanes, -126.0))  # true for NaN
    return builder.select(inside, builder.fmul(value, power), constant(F32, lanes, 0.0))


def _max(builder: Any, a: Any, b: Any) -> Any:
    """The greater; `a` where b is NaN."""
    return builder.select(builder.fcmp_ordered(">", b, a), b, a)


def _reduce(builder: Any, value: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """All lanes combined, halves first; a scalar."""
    count = value.type.count
    while count > 1:
        count //= 2
        value = combine(slice_lanes(builder, value, 0, count), slice_lanes(builder, value, count, count))
    return builder.extract_element(value, I32(0))


def _addresses(builder: Any, address: Any) -> list[Any]:
    """Where the vectors of the TILE float32 at `address` stand."""
    return [builder.add(address, I64(4 * first)) for first in range(0, TILE, LANES)]


def _load_tile(builder: Any, address: Any) -> list[Any]:
    return [load(builder, place, vector(F32, LANES), 4) for place in _addresses(builder, address)]


def _store_tile(builder: Any, values: list[Any], address: Any) -> None:
    for value, place in zip(values, _addresses(builder, address), strict=True):
        store(builder, value, place, 4)


def _tree(values: list[Any], combine: Callable[[Any, Any], Any]) -> Any:
    """The vectors combined, halves first."""
    while len(values) > 1:
        half = len(values) // 2
        values = [combine(a, b) for a, b in zip(values[:half], values[half:], strict=True)]
    return values[0]


def _each_tile(builder: Any, tiles: Any, body: Callable[[Any], None]) -> None:
    """body(i) for the tiles of the split whose bit is set."""
    with cgutils.for_range(builder, I64(TILES), intp=I64) as loop:
        bit = builder.and_(builder.lshr(tiles, loop.index), I64(1))
        with builder.if_then(builder.icmp_unsigned("!=", bit, I64(0))):
            body(loop.index)


def _cap(builder: Any, scores: Any, cap: Any) -> Any:
    """cap * tanh, of scores that are 2 log2(e) times the argument: tanh(x) = 1 - 2 / (e^2x + 1)."""
    lanes = scores.type.count
    for low, limit in ((True, -60.0), (False, 60.0)):  # beyond it tanh is 1; NaN passes both
        bound = constant(F32, lanes, limit)
        scores = builder.select(builder.fcmp_ordered("<" if low else ">", scores, bound), bound, scores)
    one, two = constant(F32, lanes, 1.0), constant(F32, lanes, 2.0)
    tanh = builder.fsub(one, builder.fdiv(two, builder.fadd(_exp2(builder, scores), one)))
    return builder.fmul(tanh, broadcast(builder, cap, lanes))


def _mask(builder: Any, scores: list[Any], first_row: Any, low: Any, high: Any) -> list[Any]:
    """MASKED wherever the row (`first_row`, ...) is not in low .. high."""
    first, least, most = [broadcast(builder, builder.trunc(value, I32), LANES) for value in (first_row, low, high)]
    masked = []
    for i, score in enumerate(scores):
        rows = builder.add(first, vector(I32, LANES)([*range(i * LANES, (i + 1) * LANES)]))
        inside = builder.and_(builder.icmp_signed(">=", rows, least), builder.icmp_signed("<=", rows, most))
        masked.append(builder.select(inside, score, constant(F32, LANES, MASKED)))
    return masked


def _maximum(builder: Any, scores: Any, tiles: Any, low: Any, high: Any, sink_tiles: Any, cap: Any) -> Any:
    """Cap and mask the scores in place; their maximum, at least LOWEST (NaN counts as nothing)."""
    best = cgutils.alloca_once_value(builder, constant(F32, LANES, LOWEST))
    capped = builder.fcmp_ordered(">", cap, F32(0.0))

    def tile(i: Any) -> None:
        first = builder.mul(i, I64(TILE))
        place = element(builder, scores, first)
        with builder.if_then(capped):
            _store_tile(builder, [_cap(builder, score, cap) for score in _load_tile(builder, place)], place)
        from_row = builder.select(builder.icmp_signed("<", i, sink_tiles), I64(0), low)
        last = builder.add(first, I64(TILE - 1))
        whole = builder.and_(builder.icmp_signed("<=", from_row, first), builder.icmp_signed(">=", high, last))
        with builder.if_then(builder.not_(whole)):
            _store_tile(builder, _mask(builder, _load_tile(builder, place), first, from_row, high), place)
        most = _tree(_load_tile(builder, place), lambda a, b: _max(builder, a, b))
        builder.store(_max(builder, builder.load(best), most), best)

    _each_tile(builder, tiles, tile)
    return _reduce(builder, builder.load(best), lambda a, b: _max(builder, a, b))


def _quantise_tile(builder: Any, weights: list[Any], codes: Any, scale: Any) -> None:
    """Codes of a tile's weights; `scale` gets what a code is worth. All 0 if the greatest weight is below TINY."""
    limit = code_limit(WEIGHT_TERMS)
    greatest = _tree(weights, lambda a, b: _max(builder, a, b))
    greatest = _reduce(builder, greatest, lambda a, b: _max(builder, a, b))
    worth = builder.fcmp_ordered(">", greatest, F32(TINY))
    inverse = builder.select(worth, builder.fdiv(F32(limit), greatest), F32(0.0))
    store(builder, builder.select(worth, builder.fmul(greatest, F32(1.0 / limit)), F32(0.0)), scale, 4)
    factor, magic = broadcast(builder, inverse, LANES), constant(F32, LANES, _ROUND)
    rounded = [builder.bitcast(fma(builder, LOWERING, weight, factor, magic), vector(I32, LANES)) for weight in weights]
    quarter = TILE // 4 // LANES
    for i in range(quarter):
        # the codes of the rows that lie side by side in the tile of values, one of each quarter
        for plane, words in enumerate(_pack(builder, rounded[i::quarter])):
            store(builder, words, builder.add(codes, I64(plane * SPLIT + 4 * LANES * i)), 4)


def _pack(builder: Any, codes: list[Any]) -> list[Any]:
    """The planes of four vectors of codes, which are the low 16 bits of 32-bit lanes."""

    def both(low: Any, high: Any, bits: int, mask: int) -> Any:
        lanes = low.type.count
        low = builder.and_(low, constant(I32, lanes, mask))
        return builder.or_(low, builder.shl(high, constant(I32, lanes, bits)))

    even, odd = both(codes[0], codes[2], 16, 0xFFFF), both(codes[1], codes[3], 16, 0xFFFF)
    if not BYTE_DOT:
        return [even, odd]
    seven = constant(I32, LANES, 0x007F007F)
    if WEIGHT_TERMS == 1:
        return [both(even, odd, 8, 0x00FF00FF)]
    even_high, odd_high = [builder.and_(builder.lshr(pair, constant(I32, LANES, 7)), seven) for pair in (even, odd)]
    return [both(even_high, odd_high, 8, 0x007F007F), both(even, builder.and_(odd, seven), 8, 0x007F007F)]


def _softmax(builder: Any, args: list[Any], int8: tuple[Any, Any, Any] | None) -> None:
    scores, tiles, state = args
    shift = broadcast(builder, load(builder, state, F32, 4), LANES)
    total = cgutils.alloca_once_value(builder, constant(F32, LANES, 0.0))

    def tile(i: Any) -> None:
        first = builder.mul(i, I64(TILE))
        place = element(builder, scores, first)
        weights = [_exp2(builder, builder.fsub(score, shift)) for score in _load_tile(builder, place)]
        builder.store(builder.fadd(builder.load(total), _tree(weights, builder.fadd)), total)
        if int8 is None:
            _store_tile(builder, weights, place)
            return
        value_scales, codes, scales = int8
        row_scales = _load_tile(builder, load(builder, element(builder, value_scales, i, 8), I64, 8))
        weights = [builder.fmul(weight, scale) for weight, scale in zip(weights, row_scales, strict=True)]
        _quantise_tile(builder, weights, builder.add(codes, first), element(builder, scales, i, 4 * MAX_VECTORS))

    _each_tile(builder, tiles, tile)
    store(builder, _reduce(builder, builder.load(total), builder.fadd), element(builder, state, 1), 4)


@intrinsic
def find_maximum(_: Any, scores: Any, tiles: Any, low: Any, high: Any, sink_tiles: Any, cap: Any, state: Any) -> Any:
    """Cap and mask the scores of one vector and split, in place; their maximum goes to `state`.

    Bit i of `tiles`: tile i takes part. A row counts if low <= row <= high, or if its tile is below `sink_tiles` and
    row <= high (rows count from the split's first position). `cap`: a float32, see `_cap`; 0: off.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        store(builder, _maximum(builder, *args[:-1]), args[-1], 4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5, types.float32, types.int64), generate


@intrinsic
def softmax_f32(_: Any, scores: Any, tiles: Any, state: Any) -> Any:
    """The scores become weights 2^(score - maximum), in place; `state` is (maximum, then their sum)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _softmax(builder, args, None)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


@intrinsic
def softmax_int8(_: Any, scores: Any, tiles: Any, state: Any, value_scales: Any, codes: Any, scales: Any) -> Any:
    """As `softmax_f32`, but the weights, times the rows' value scales, become `codes` for `values_int8`.

    `value_scales`: int64 [tiles], addresses of float32 [TILE]. `scales`: the vector's column of float32
    [tiles][MAX_VECTORS].
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _softmax(builder, args[:3], args[3:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


@intrinsic
def merge_split(_: Any, out: Any, state: Any, part: Any, part_state: Any, dim: Any) -> Any:
    """Merge a split's (float32 [dim] `part`, `part_state`) into the running (`out`, `state`)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        out, state, part, part_state, dim = args
        old, new = [[load(builder, element(builder, at, i), F32, 4) for i in range(2)] for at in (state, part_state)]
        maximum = _max(builder, old[0], new[0])
        keep, gain = [_exp2(builder, broadcast(builder, builder.fsub(x[0], maximum), DIM_STEP)) for x in (old, new)]
        scaled = builder.fmul(broadcast(builder, old[1], DIM_STEP), keep)
        total = fma(builder, LOWERING, broadcast(builder, new[1], DIM_STEP), gain, scaled)
        store(builder, maximum, state, 4)
        store(builder, builder.extract_element(total, I32(0)), element(builder, state, 1), 4)
        with cgutils.for_range(builder, builder.udiv(dim, I64(DIM_STEP)), intp=I64) as loop:
            before, after = [element(builder, at, loop.index, 4 * DIM_STEP) for at in (out, part)]
            values = [load(builder, at, vector(F32, DIM_STEP), 4) for at in (before, after)]
            store(builder, fma(builder, LOWERING, values[1], gain, builder.fmul(values[0], keep)), before, 4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


@intrinsic
def finish_output(_: Any, out: Any, state: Any, dim: Any) -> Any:
    """Divide the merged output by its sum of weights. No result is -0, which a masked row could turn into 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        out, state, dim = args
        inverse = builder.fdiv(F32(1.0), load(builder, element(builder, state, 1), F32, 4))
        factor = broadcast(builder, inverse, DIM_STEP)
        with cgutils.for_range(builder, builder.udiv(dim, I64(DIM_STEP)), intp=I64) as loop:
            place = element(builder, out, loop.index, 4 * DIM_STEP)
            value = builder.fmul(load(builder, place, factor.type, 4), factor)
            store(builder, builder.fadd(value, constant(F32, DIM_STEP, 0.0)), place, 4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate
