"""The inner loops of BlockLinear as LLVM IR: quantise a row of activations, multiply a few of them by a group of weights.

A quantised block of one row is a record of RECORD_WORDS words:

    0..7   32 int8 codes c:  x = scale * c
    8      scale, float32; NaN if the block holds anything but finite numbers; 0 if it is smaller than any use
    9      -MAGIC * scale, exactly (the scale's last two bits are 0); only read where fma is fused
    10 11  one term for each weight block of 16 or 32 inputs: with a minimum, scale * sum(c) in float32; without,
           START - 128 * sum(c) in int32, where the integer sum of q * c begins

The integer sum of a block starts at the bits of MAGIC = 1.5 * 2^23, so its bits are the float MAGIC + sum, and one fma
with the words 8 and 9 gives scale * sum, rounded once: sums stay below 2^22 (32 * 128 * 255), so all of it is exact.
A block then adds m * scale * sum(c) and d * scale * sum(q * c), in this order, to the output's float32 sum: blocks follow
one another, and nothing else is ever added, so an output's bits depend on its own row and weights alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from edge_llm.kernels.block_format import BlockFormat
from edge_llm.kernels.layout import ACTIVATION_BLOCK, GROUP_ROWS, RECORD_WORDS, ROW_TILE
from edge_llm.kernels.lowering import Lowering, dot_many, fma, half_to_float, split_nibbles
from edge_llm.kernels.vector_ir import (
    F16,
    F32,
    I8,
    I32,
    I64,
    broadcast,
    call,
    constant,
    integers_to_float,
    load,
    load_broadcast,
    load_broadcast_bytes,
    offset,
    prefetch,
    store,
    vector,
)

MAGIC = 12582912.0  # 1.5 * 2^23: floats near it are whole numbers, and their low bits that number
_MAGIC_BITS = 0x4B400000
_RECORD_BYTES = 4 * RECORD_WORDS
_SCALE, _NEGATIVE, _TERMS = 32, 36, 40  # byte offsets in a record
_STEPS = ACTIVATION_BLOCK // 4


def pass_vectors(lowering: Lowering) -> int:
    """Vectors of outputs that one pass over a tile of rows computes: as many as keep a block's codes in registers."""
    return 2 if lowering.registers == 32 else 1


def quantise_row(lowering: Lowering) -> Callable[..., None]:
    """Intrinsic (x, record, blocks, halves, minimum): quantise `blocks` blocks of float32 at `x`.

    Records are ROW_TILE records apart. `halves` 1: a term for each 16 inputs; `minimum` 1: float32 terms (see above).
    """
    lanes = lowering.lanes
    start = _MAGIC_BITS if lowering.fused else 0

    def block(builder: Any, x: Any, record: Any, halves: Any, minimum: Any) -> None:
        values = [load(builder, offset(builder, x, 4 * first), vector(F32, lanes), 4) for first in range(0, ACTIVATION_BLOCK, lanes)]
        scale, inverse = _scale(builder, _largest(builder, values))
        factor, magic = broadcast(builder, inverse, lanes), constant(F32, lanes, MAGIC)
        rounded = [builder.bitcast(fma(builder, lowering, value, factor, magic), vector(I32, lanes)) for value in values]
        for i, bits in enumerate(rounded):  # the low byte of the bits is the code
            store(builder, builder.trunc(bits, vector(I8, lanes)), offset(builder, record, i * lanes), min(lanes, 16))
        codes = [builder.sub(bits, constant(I32, lanes, _MAGIC_BITS)) for bits in rounded]
        middle = len(codes) // 2
        first, second = _sum_lanes(builder, codes[:middle]), _sum_lanes(builder, codes[middle:])
        store(builder, scale, offset(builder, record, _SCALE), 4)
        store(builder, builder.fmul(scale, F32(-MAGIC)), offset(builder, record, _NEGATIVE), 4)
        for i, total in enumerate((builder.select(halves, first, builder.add(first, second)), second)):
            minimum_term = builder.bitcast(builder.fmul(scale, builder.sitofp(total, F32)), I32)
            integer_start = builder.sub(I32(start), builder.mul(total, I32(128)))
            store(builder, builder.select(minimum, minimum_term, integer_start), offset(builder, record, _TERMS + 4 * i), 4)

    @intrinsic
    def quantise(typing_context: Any, x: Any, record: Any, blocks: Any, halves: Any, minimum: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: list[Any]) -> Any:
            x, record, blocks, halves, minimum = args
            halves, minimum = (builder.icmp_signed("!=", flag, I64(0)) for flag in (halves, minimum))
            with cgutils.for_range(builder, blocks, intp=I64) as loop:
                from_x = builder.mul(loop.index, I64(4 * ACTIVATION_BLOCK))
                to_record = builder.mul(loop.index, I64(ROW_TILE * _RECORD_BYTES))
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
        sizes = [call(builder, f"llvm.smax.v{lanes}i32", words, [a, b]) for a, b in zip(sizes[::2], sizes[1::2], strict=True)]
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


class _Block:
    """Emits the product of one block of 32 inputs of some vectors of outputs with some rows."""

    def __init__(self, builder: Any, lowering: Lowering, form: BlockFormat, places: list[tuple[Any, Any]], k: Any) -> None:
        """`places`: where each vector's codes and scales of its first block stand; `k`: index of the block of 32 inputs."""
        self.builder, self.lowering, self.form = builder, lowering, form
        self.parts = ACTIVATION_BLOCK // form.block
        codes_at = builder.mul(k, I64(form.block_code_bytes * self.parts))
        scales_at = builder.mul(k, I64(form.block_scale_bytes * self.parts))
        self.codes = [self._codes(offset(builder, codes, codes_at)) for codes, _ in places]
        self.scales = [self._scales(offset(builder, scales, scales_at)) for _, scales in places]

    def _codes(self, address: Any) -> list[Any]:
        """The codes of the block's eight steps of four inputs."""
        builder, kind = self.builder, vector(I8, 4 * self.lowering.lanes)
        loads = _STEPS * self.form.bits // 8
        lines = [load(builder, offset(builder, address, 64 * i), kind, self.lowering.lanes * 4) for i in range(loads)]
        if self.form.bits == 8:
            return lines
        return [half for line in lines for half in split_nibbles(builder, line)]

    def _scales(self, address: Any) -> list[tuple[Any, Any]]:
        """(d, m or None) of each weight block."""
        builder, kind = self.builder, vector(F16, self.lowering.lanes)

        def at(number: int) -> Any:
            value = load(builder, offset(builder, address, number), kind, self.lowering.lanes * 2)
            return half_to_float(builder, self.lowering, value)

        size = self.form.block_scale_bytes
        return [(at(size * i), at(size * i + 2 * GROUP_ROWS) if self.form.minimum else None) for i in range(self.parts)]

    def multiply(self, records: list[Any], sums: list[list[Any]], chains: int) -> list[list[Any]]:
        """`sums` [row][vector] with this block of the rows at `records` added. `chains`: integer sums run in parallel."""
        integers = self._integers(records, chains)
        return [self._finish(record, integers[row], sums[row]) for row, record in enumerate(records)]

    def _integers(self, records: list[Any], chains: int) -> list[list[list[Any]]]:
        """[row][vector][part]: START + the sum of code * activation."""
        builder, lanes = self.builder, self.lowering.lanes
        accs, steps = [], []
        length = _STEPS // self.parts // chains
        for record in records:
            x = [load_broadcast_bytes(builder, offset(builder, record, 4 * t), lanes) for t in range(_STEPS)]
            for codes in self.codes:
                for first in range(0, _STEPS, length):
                    part, chain = divmod(first // length, chains)
                    accs.append(self._start(record, part) if chain == 0 else constant(I32, lanes, 0))
                    steps.append([(codes[t], x[t]) for t in range(first, first + length)])
        flat = iter(dot_many(builder, self.lowering, accs, steps, nibbles=self.form.bits == 4))

        def total() -> Any:
            value = next(flat)
            for _ in range(chains - 1):
                value = builder.add(value, next(flat))
            return value

        return [[[total() for _ in range(self.parts)] for _ in self.codes] for _ in records]

    def _start(self, record: Any, part: int) -> Any:
        lanes = self.lowering.lanes
        if self.form.minimum:
            return constant(I32, lanes, _MAGIC_BITS if self.lowering.fused else 0)
        return load_broadcast(self.builder, offset(self.builder, record, _TERMS + 4 * part), I32, lanes)

    def _finish(self, record: Any, integers: list[list[Any]], sums: list[Any]) -> list[Any]:
        """The row's sums with m * scale * sum(c) and d * scale * sum(q * c) of each weight block added."""
        builder, lowering, lanes = self.builder, self.lowering, self.lowering.lanes

        def word(at: int) -> Any:
            return load_broadcast(builder, offset(builder, record, at), F32, lanes)

        scale, results = word(_SCALE), []
        for vector_integers, scales, total in zip(integers, self.scales, sums, strict=True):
            for part, (integer, (d, m)) in enumerate(zip(vector_integers, scales, strict=True)):
                if m is not None:
                    total = fma(builder, lowering, m, word(_TERMS + 4 * part), total)
                if lowering.fused:
                    product = fma(builder, lowering, builder.bitcast(integer, vector(F32, lanes)), scale, word(_NEGATIVE))
                else:
                    product = builder.fmul(integers_to_float(builder, integer), scale)
                total = fma(builder, lowering, product, d, total)
            results.append(total)
        return results


def multiply_tile(lowering: Lowering, form: BlockFormat) -> Callable[..., None]:
    """Intrinsic (codes_0, codes_1, scales_0, scales_1, x, sums, rows, blocks): add x @ weights.T of one pass to `sums`.

    The pass has `pass_vectors` vectors of outputs, whose codes and scales start at the given addresses. `x` is the first
    record of a tile, `sums` float32 [rows][vectors * lanes], 64-byte aligned. All rows go over a block while its codes
    stay in registers.
    """
    lanes, vectors = lowering.lanes, pass_vectors(lowering)
    together = 4  # rows whose chains of dot products overlap

    @intrinsic
    def multiply(
        typing_context: Any, codes_0: Any, codes_1: Any, scales_0: Any, scales_1: Any, x: Any, sums: Any, rows: Any, blocks: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: list[Any]) -> Any:
            codes_0, codes_1, scales_0, scales_1, x, sums, rows, blocks = args
            places = [(codes_0, scales_0), (codes_1, scales_1)][:vectors]
            in_fours = builder.and_(rows, I64(-together))
            with cgutils.for_range(builder, blocks, intp=I64) as loop:
                block = _Block(builder, lowering, form, places, loop.index)
                tile = offset(builder, x, builder.mul(loop.index, I64(ROW_TILE * _RECORD_BYTES)))
                for first, last, step in ((I64(0), in_fours, together), (in_fours, rows, 1)):
                    with cgutils.for_range_slice(builder, first, last, I64(step), I64, inc=True) as (row, _):
                        _tile_rows(builder, block, tile, sums, row, step)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), generate

    def _tile_rows(builder: Any, block: _Block, tile: Any, sums: Any, row: Any, count: int) -> None:
        numbers = [builder.add(row, I64(i)) for i in range(count)]
        records = [offset(builder, tile, builder.mul(number, I64(_RECORD_BYTES))) for number in numbers]
        places = [offset(builder, sums, builder.mul(number, I64(4 * lanes * vectors))) for number in numbers]
        before = [[load(builder, offset(builder, at, 4 * lanes * v), vector(F32, lanes), 4 * lanes) for v in range(vectors)] for at in places]
        for at, after in zip(places, block.multiply(records, before, 1), strict=True):
            for v, value in enumerate(after):
                store(builder, value, offset(builder, at, 4 * lanes * v), 4 * lanes)

    return multiply


def multiply_row(lowering: Lowering, form: BlockFormat) -> Callable[..., None]:
    """Intrinsic (codes, scales, x, start, out, blocks): out[16] = start[16] + x @ weights.T of one group and one row.

    `x` is the row's first record, `start` 64-byte aligned. Made to run as fast as the weights arrive from memory.
    """
    lanes = lowering.lanes
    vectors = GROUP_ROWS // lanes
    chains = 2

    @intrinsic
    def multiply(typing_context: Any, codes: Any, scales: Any, x: Any, start: Any, out: Any, blocks: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: list[Any]) -> Any:
            codes, scales, x, start, out, blocks = args
            places = [(offset(builder, codes, 4 * lanes * v), offset(builder, scales, 2 * lanes * v)) for v in range(vectors)]
            sums = [cgutils.alloca_once(builder, vector(F32, lanes)) for _ in range(vectors)]
            for v, total in enumerate(sums):
                builder.store(load(builder, offset(builder, start, 4 * lanes * v), vector(F32, lanes), 4 * lanes), total)
            with cgutils.for_range(builder, blocks, intp=I64) as loop:
                block = _Block(builder, lowering, form, places, loop.index)
                record = offset(builder, x, builder.mul(loop.index, I64(ROW_TILE * _RECORD_BYTES)))
                after = block.multiply([record], [[builder.load(total) for total in sums]], chains)
                for total, value in zip(sums, after[0], strict=True):
                    builder.store(value, total)
            for v, total in enumerate(sums):
                store(builder, builder.load(total), offset(builder, out, 4 * lanes * v), 4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), generate

    return multiply


def copy_floats(lowering: Lowering, count: int) -> Callable[..., None]:
    """Intrinsic (source, target): copy `count` float32, a multiple of the lanes."""

    @intrinsic
    def copy(typing_context: Any, source: Any, target: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: list[Any]) -> Any:
            for at in range(0, 4 * count, 4 * lowering.lanes):
                value = load(builder, offset(builder, args[0], at), vector(F32, lowering.lanes), 4)
                store(builder, value, offset(builder, args[1], at), 4)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    return copy


def stack_floats(count: int) -> Callable[[], int]:
    """Intrinsic () -> address of `count` float32 on the stack of the calling function, 64-byte aligned, not initialised."""

    @intrinsic
    def allocate(typing_context: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: list[Any]) -> Any:
            place = cgutils.alloca_once(builder, ir.ArrayType(F32, count))
            place.align = 64
            return builder.ptrtoint(place, I64)

        return types.int64(), generate

    return allocate


def half_at(lowering: Lowering) -> Callable[[int], float]:
    """Intrinsic (address) -> the fp16 number there as float32."""

    @intrinsic
    def read(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: list[Any]) -> Any:
            value = half_to_float(builder, lowering, load(builder, args[0], vector(F16, 1), 2))
            return builder.extract_element(value, I32(0))

        return types.float32(types.int64), generate

    return read
