"""Products of a tile of the KV cache with a few query vectors, as LLVM IR: scores = K q, output += V w.

A query vector is one (row, head). A lane is a column of the tile: a key row for scores, a dimension for values. The
steps (dimensions, or value rows) follow one another and nothing is reassociated, so a result depends on its own vector
alone, and the number of vectors that share a load changes no bit.

int8: queries and weights are codes of one or two terms of seven bits (code = 128 * high + low), so that both products
are integer dot products of four steps a lane. A CPU with a dot product of bytes takes the terms as bytes; others take
whole codes as 16-bit words, even and odd steps apart. Both give the same integers. A vector's codes lie in one or two
planes, four steps in 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from edge_llm.kernels.layout import SPLIT, TILE
from edge_llm.kernels.lowering import byte_codes, detect_lowering, dot_bytes, dot_words, fma
from edge_llm.kernels.vector_ir import (
    F32,
    I8,
    I16,
    I32,
    I64,
    constant,
    load,
    load_broadcast,
    store,
    vector,
)

LOWERING = detect_lowering()
LANES = LOWERING.lanes
BYTE_DOT = LOWERING.bytewise

QUERY_TERMS = 2
"""terms of a quantised query: 1 (7 bits and sign) or 2 (14 bits and sign)"""
WEIGHT_TERMS = 2
"""terms of the softmax weights that multiply int8 values"""
MAX_VECTORS = 4
"""query vectors that share the loads of a tile"""
DIM_STEP = 8
"""every head_dim is a multiple of it"""


def code_limit(terms: int) -> int:
    """Largest code of that many terms."""
    return 127 if terms == 1 else 127 * 128


def plane_count(terms: int) -> int:
    """Planes that hold the codes of a vector."""
    return terms if BYTE_DOT else 2


def element(builder: Any, base: Any, index: Any, size: Any = 4) -> Any:
    """Address `base + index * size`; index and size may be Python integers."""
    index = I64(index) if isinstance(index, int) else index
    size = I64(size) if isinstance(size, int) else size
    return builder.add(base, builder.mul(index, size))


class _Int8Product:
    """Sums in int32; the tile holds bytes, [step / 4][column][4]."""

    steps_at_once = 4
    kind = I32

    def __init__(self, tile_is_unsigned: bool, terms: int) -> None:
        self._unsigned = tile_is_unsigned
        self.planes = plane_count(terms)
        self.accumulators = self.planes if BYTE_DOT else 1

    def load(self, builder: Any, address: Any, lanes: int) -> Any:
        value = load(builder, address, vector(I32, lanes), 4)
        if BYTE_DOT:
            codes = builder.bitcast(value, vector(I8, 4 * lanes))
            return byte_codes(builder, LOWERING, codes) if self._unsigned else codes
        pairs = builder.bitcast(value, vector(I16, 2 * lanes))
        eight = constant(I16, 2 * lanes, 8)
        if self._unsigned:
            halves = builder.and_(pairs, constant(I16, 2 * lanes, 255)), builder.lshr(pairs, eight)
        else:
            halves = builder.ashr(builder.shl(pairs, eight), eight), builder.ashr(pairs, eight)
        return [builder.bitcast(half, value.type) for half in halves]

    def add(self, builder: Any, sums: list[Any], tile: Any, x: list[Any]) -> list[Any]:
        if not BYTE_DOT:
            even = dot_words(builder, LOWERING, sums[0], tile[0], x[0])
            return [dot_words(builder, LOWERING, even, tile[1], x[1])]
        terms = [builder.bitcast(term, tile.type) for term in x]
        pairs = [(tile, term) if self._unsigned else (term, tile) for term in terms]
        return [dot_bytes(builder, LOWERING, total, [pair]) for total, pair in zip(sums, pairs, strict=True)]

    def total(self, builder: Any, sums: list[Any]) -> Any:
        lanes = sums[0].type.count
        high = builder.shl(sums[0], constant(I32, lanes, 7)) if len(sums) == 2 else constant(I32, lanes, 0)
        return builder.sitofp(builder.add(high, sums[-1]), vector(F32, lanes))


class _FloatProduct:
    """Sums in float32; the tile is float32 [step][column]."""

    steps_at_once = 1
    kind = F32
    planes = 1
    accumulators = 1

    def load(self, builder: Any, address: Any, lanes: int) -> Any:
        return load(builder, address, vector(F32, lanes), 4)

    def add(self, builder: Any, sums: list[Any], tile: Any, x: list[Any]) -> list[Any]:
        return [fma(builder, LOWERING, tile, x[0], sums[0])]


_KEYS = _Int8Product(True, QUERY_TERMS)
_VALUES = _Int8Product(False, WEIGHT_TERMS)
_FLOAT = _FloatProduct()


_Start = Callable[[int, Any, int], list[Any]]  # (vector, column, lanes) -> accumulators
_Finish = Callable[[int, Any, list[Any]], None]  # (vector, column, accumulators)


def _multiply(
    builder: Any, product: Any, tile: Any, columns: Any, steps: Any, xs: list[list[Any]], start: _Start, finish: _Finish
) -> None:
    """All columns of a tile times the vectors whose planes begin at `xs`."""
    row_bytes = builder.mul(columns, I64(4))

    def block(first: Any, blocks: int, lanes: int) -> None:
        places = [builder.add(first, I64(lanes * i)) for i in range(blocks)]
        kind = vector(product.kind, lanes)
        cells = [
            [[cgutils.alloca_once(builder, kind) for _ in range(product.accumulators)] for _ in places] for _ in xs
        ]
        for v, row in enumerate(cells):
            for cell, place in zip(row, places, strict=True):
                for slot, value in zip(cell, start(v, place, lanes), strict=True):
                    builder.store(value, slot)
        corner = element(builder, tile, first)
        with cgutils.for_range(builder, builder.udiv(steps, I64(product.steps_at_once)), intp=I64) as loop:
            line = element(builder, corner, loop.index, row_bytes)
            loaded = [product.load(builder, builder.add(line, I64(4 * lanes * i)), lanes) for i in range(blocks)]
            for planes, row in zip(xs, cells, strict=True):
                x = [
                    load_broadcast(builder, element(builder, plane, loop.index), product.kind, lanes)
                    for plane in planes
                ]
                for part, cell in zip(loaded, row, strict=True):
                    sums = product.add(builder, [builder.load(slot) for slot in cell], part, x)
                    for slot, value in zip(cell, sums, strict=True):
                        builder.store(value, slot)
        for v, row in enumerate(cells):
            for cell, place in zip(row, places, strict=True):
                finish(v, place, [builder.load(slot) for slot in cell])

    budget = 24 if LOWERING.registers >= 32 else 12
    at_once = next(n for n in (4, 2, 1) if n * len(xs) * product.accumulators <= budget or n == 1)
    _over_columns(builder, columns, at_once, block)


def _over_columns(builder: Any, columns: Any, at_once: int, block: Callable[[Any, int, int], None]) -> None:
    """Call `block(first column, vectors, lanes)` until all columns (a multiple of DIM_STEP) are covered."""
    passes = [(at_once, LANES)]
    if at_once > 1:
        passes.append((1, LANES))
    if LANES > DIM_STEP:
        passes.append((1, DIM_STEP))
    done: Any = I64(0)
    for blocks, lanes in passes:
        width = I64(blocks * lanes)
        with cgutils.for_range(builder, builder.udiv(builder.sub(columns, done), width), intp=I64) as loop:
            block(builder.add(done, builder.mul(loop.index, width)), blocks, lanes)
        done = builder.mul(builder.udiv(columns, width), width)


def _switch(builder: Any, vectors: Any, emit: Callable[[int], None]) -> None:
    """Run the code of `emit(n)` for n = `vectors`, one of 1 .. MAX_VECTORS."""
    end = builder.append_basic_block("end")
    choice = builder.switch(vectors, end)
    for n in range(1, MAX_VECTORS + 1):
        case = builder.append_basic_block(f"vectors{n}")
        choice.add_case(I64(n), case)
        builder.position_at_end(case)
        emit(n)
        builder.branch(end)
    builder.position_at_end(end)


@intrinsic
def scores_int8(
    _: Any, vectors: Any, tile: Any, codes: Any, dim: Any, out: Any, key_scales: Any, scales: Any, sums: Any
) -> Any:
    """out[v] = scales[v] * key_scales * (tile . codes[v]), float32 [TILE], SPLIT apart.

    `tile`: uint8 [dim / 4][TILE][4], codes + 128. `codes`: planes of `dim` bytes. `sums`: int32, -128 * sum(codes[v]).
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors, tile, codes, dim, out, key_scales, scales, sums = args

        def emit(n: int) -> None:
            planes = [
                [element(builder, codes, v * _KEYS.planes + p, dim) for p in range(_KEYS.planes)] for v in range(n)
            ]

            def start(v: int, column: Any, lanes: int) -> list[Any]:
                zero = constant(I32, lanes, 0)
                # codes that are less 128 already need no correction
                last = zero if LOWERING.signed else load_broadcast(builder, element(builder, sums, v), I32, lanes)
                return [zero] * (_KEYS.accumulators - 1) + [last]

            def finish(v: int, column: Any, accumulators: list[Any]) -> None:
                total = _KEYS.total(builder, accumulators)
                key_scale = load(builder, element(builder, key_scales, column), total.type, 4)
                scale = load_broadcast(builder, element(builder, scales, v), F32, total.type.count)
                target = builder.add(element(builder, out, column), I64(4 * SPLIT * v))
                store(builder, builder.fmul(builder.fmul(total, key_scale), scale), target, 4)

            _multiply(builder, _KEYS, tile, I64(TILE), dim, planes, start, finish)

        _switch(builder, vectors, emit)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), generate


@intrinsic
def scores_f32(_: Any, vectors: Any, tile: Any, queries: Any, dim: Any, out: Any) -> Any:
    """out[v] = tile . queries[v], float32 [TILE], SPLIT apart. `tile`: float32 [dim][TILE]; queries: float32 [dim]."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors, tile, queries, dim, out = args

        def start(v: int, column: Any, lanes: int) -> list[Any]:
            return [constant(F32, lanes, 0.0)]

        def finish(v: int, column: Any, accumulators: list[Any]) -> None:
            store(builder, accumulators[0], builder.add(element(builder, out, column), I64(4 * SPLIT * v)), 4)

        def emit(n: int) -> None:
            row_bytes = builder.mul(dim, I64(4))
            planes = [[element(builder, queries, v, row_bytes)] for v in range(n)]
            _multiply(builder, _FLOAT, tile, I64(TILE), dim, planes, start, finish)

        _switch(builder, vectors, emit)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


@intrinsic
def values_int8(_: Any, vectors: Any, tile: Any, codes: Any, dim: Any, out: Any, out_stride: Any, scales: Any) -> Any:
    """out[v] += scales[v] * (codes[v] . tile), float32 [dim], `out_stride` bytes apart.

    `tile`: int8 [TILE / 4][dim][4]. Planes of codes are SPLIT bytes apart, so vectors are `planes * SPLIT`.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors, tile, codes, dim, out, out_stride, scales = args

        def emit(n: int) -> None:
            planes = [
                [builder.add(codes, I64((v * _VALUES.planes + p) * SPLIT)) for p in range(_VALUES.planes)]
                for v in range(n)
            ]
            outs = [element(builder, out, v, out_stride) for v in range(n)]

            def start(v: int, column: Any, lanes: int) -> list[Any]:
                return [constant(I32, lanes, 0)] * _VALUES.accumulators

            def finish(v: int, column: Any, accumulators: list[Any]) -> None:
                total = _VALUES.total(builder, accumulators)
                scale = load_broadcast(builder, element(builder, scales, v), F32, total.type.count)
                target = element(builder, outs[v], column)
                store(builder, fma(builder, LOWERING, total, scale, load(builder, target, total.type, 4)), target, 4)

            _multiply(builder, _VALUES, tile, dim, I64(TILE), planes, start, finish)

        _switch(builder, vectors, emit)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), generate


@intrinsic
def values_f32(_: Any, vectors: Any, tile: Any, weights: Any, dim: Any, out: Any, out_stride: Any) -> Any:
    """out[v] += weights[v] . tile, as `values_int8`. `tile`: float32 [TILE][dim]; weights: float32 [TILE], SPLIT apart."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors, tile, weights, dim, out, out_stride = args

        def emit(n: int) -> None:
            planes = [[builder.add(weights, I64(4 * SPLIT * v))] for v in range(n)]
            outs = [element(builder, out, v, out_stride) for v in range(n)]

            def start(v: int, column: Any, lanes: int) -> list[Any]:
                return [load(builder, element(builder, outs[v], column), vector(F32, lanes), 4)]

            def finish(v: int, column: Any, accumulators: list[Any]) -> None:
                store(builder, accumulators[0], element(builder, outs[v], column), 4)

            _multiply(builder, _FLOAT, tile, dim, I64(TILE), planes, start, finish)

        _switch(builder, vectors, emit)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate
