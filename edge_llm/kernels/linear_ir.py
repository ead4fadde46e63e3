"""The product of quantised rows with blocks of weights, as LLVM IR: the inner loops of BlockLinear.

The integer sum of a block, of q * c, starts at the bits of MAGIC, so its bits are the float32 MAGIC + sum, and one fma
with the record's words 8 and 9 gives scale * sum, rounded once: sums stay below 2^22 (32 * 128 * 255), so all of it is
exact. A block then adds m * scale * sum(c), if it has a minimum, and d * scale * sum(q * c) to the output's float32
sum. Blocks follow one another and nothing else is added, so an output's bits depend on its row and weights alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from edge_llm.kernels.block_format import BlockFormat
from edge_llm.kernels.layout import ACTIVATION_BLOCK, GROUP_ROWS, ROW_TILE
from edge_llm.kernels.lowering import (
    Lowering,
    broadcast_steps,
    byte_codes,
    dot_many,
    fma,
    half_to_float,
    split_nibbles,
    sum_bytes,
)
from edge_llm.kernels.quantise_ir import NEGATIVE, RECORD_BYTES, SCALE, TERMS, integer_start
from edge_llm.kernels.vector_ir import (
    F16,
    F32,
    I8,
    I32,
    I64,
    constant,
    integers_to_float,
    load,
    load_broadcast,
    offset,
    prefetch,
    store,
    vector,
)

_STEPS = ACTIVATION_BLOCK // 4

_AHEAD = 8192
"""bytes of codes by which weights are asked for before they are used; the hardware alone looks too few lines ahead where
memory is slow to answer (docs/experiments.md)"""
_LINE = 64


def pass_vectors(lowering: Lowering) -> int:
    """Vectors of outputs that one pass over a tile of rows computes: as many as keep a block's codes in registers."""
    return 2 if lowering.registers == 32 else 1


class _Block:
    """Emits the product of one block of 32 inputs of some vectors of outputs with some rows."""

    def __init__(
        self, builder: Any, lowering: Lowering, form: BlockFormat, places: list[tuple[Any, Any]], k: Any
    ) -> None:
        """`places`: where codes and scales of the first block of each vector stand; `k`: index of the block."""
        self.builder, self.lowering, self.form = builder, lowering, form
        self.parts = ACTIVATION_BLOCK // form.block
        code_bytes, scale_bytes = form.block_code_bytes * self.parts, form.block_scale_bytes * self.parts
        codes_at, scales_at = builder.mul(k, I64(code_bytes)), builder.mul(k, I64(scale_bytes))
        blocks_ahead = _AHEAD // code_bytes
        for codes, scales in places[:: GROUP_ROWS // lowering.lanes]:  # once a group
            self._prefetch(offset(builder, codes, codes_at), code_bytes, blocks_ahead)
            self._prefetch(offset(builder, scales, scales_at), scale_bytes, blocks_ahead)
        self._code_places = [offset(builder, codes, codes_at) for codes, _ in places]
        # Codes that are taken apart need twice the registers: they are loaded where they are used.
        self.codes = None if form.bits == 8 and not lowering.bytewise else self._all_codes()
        self.scales = [self._scales(offset(builder, scales, scales_at)) for _, scales in places]

    def _prefetch(self, address: Any, size: int, blocks: int) -> None:
        """Ask for the lines that stand `blocks` blocks of `size` bytes behind the one at `address`."""
        for line in range(0, size, _LINE):
            prefetch(self.builder, offset(self.builder, address, blocks * size + line))

    def _all_codes(self) -> list[list[Any]]:
        """[vector][step]"""
        return [self._codes(place) for place in self._code_places]

    def _codes(self, address: Any) -> list[Any]:
        """The codes of the block's eight steps of four inputs."""
        builder, kind = self.builder, vector(I8, 4 * self.lowering.lanes)
        loads = _STEPS * self.form.bits // 8
        lines = [load(builder, offset(builder, address, 64 * i), kind, self.lowering.lanes * 4) for i in range(loads)]
        if self.form.bits == 8:
            return [byte_codes(builder, self.lowering, line) for line in lines]
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
        """`sums` [row][vector] with this block of the rows at `records` added, by `chains` integer sums each."""
        integers = self._integers(records, chains)
        return [self._finish(record, integers[row], sums[row]) for row, record in enumerate(records)]

    def _integers(self, records: list[Any], chains: int) -> list[list[list[Any]]]:
        """[row][vector][part]: the start and the sum of code * activation."""
        builder, lanes = self.builder, self.lowering.lanes
        accs, steps = [], []
        held = self.codes or self._all_codes()
        length = _STEPS // self.parts // chains
        for record in records:
            x = broadcast_steps(builder, self.lowering, record, _STEPS)
            for codes in held:
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

        return [[[total() for _ in range(self.parts)] for _ in held] for _ in records]

    def _start(self, record: Any, part: int) -> Any:
        builder, lanes = self.builder, self.lowering.lanes
        start = constant(I32, lanes, integer_start(self.lowering))
        if self.form.bits == 8 and self.lowering.signed:  # the codes are short of 128
            if not self.form.minimum:
                return start
            block = self.form.block
            total = sum_bytes(builder, self.lowering, offset(builder, record, part * block), block)
            return builder.add(start, builder.shl(total, constant(I32, lanes, 7)))
        if self.form.minimum:
            return start
        return load_broadcast(builder, offset(builder, record, TERMS + 4 * part), I32, lanes)

    def _finish(self, record: Any, integers: list[list[Any]], sums: list[Any]) -> list[Any]:
        """The row's sums with m * scale * sum(c) and d * scale * sum(q * c) of each weight block added."""
        builder, lowering, lanes = self.builder, self.lowering, self.lowering.lanes

        def word(at: int) -> Any:
            return load_broadcast(builder, offset(builder, record, at), F32, lanes)

        scale, results = word(SCALE), []
        for vector_integers, scales, total in zip(integers, self.scales, sums, strict=True):
            for part, (integer, (d, m)) in enumerate(zip(vector_integers, scales, strict=True)):
                if m is not None:
                    total = fma(builder, lowering, m, word(TERMS + 4 * part), total)
                if lowering.fused:
                    product = fma(
                        builder, lowering, builder.bitcast(integer, vector(F32, lanes)), scale, word(NEGATIVE)
                    )
                else:
                    product = builder.fmul(integers_to_float(builder, integer), scale)
                total = fma(builder, lowering, product, d, total)
            results.append(total)
        return results


def multiply_tile(lowering: Lowering, forms: Sequence[BlockFormat]) -> Callable[..., None]:
    """Intrinsic (form, codes_0, codes_1, scales_0, scales_1, x, sums, rows, blocks): add x @ weights.T to `sums`.

    Weights are stored as `forms[form]`. A pass has `pass_vectors` vectors of outputs: two groups, whose codes and scales
    start at the given addresses, or a part of the first. `x` is the first record of a tile, `sums` float32
    [rows][vectors * lanes], 64-byte aligned. All rows go over a block while its codes stay in registers.
    """
    lanes, vectors = lowering.lanes, pass_vectors(lowering)
    together = 4  # rows whose chains of dot products overlap

    def emit(builder: Any, form: BlockFormat, args: list[Any]) -> None:
        codes_0, codes_1, scales_0, scales_1, x, sums, rows, blocks = args
        places = _places(builder, lanes, codes_0, scales_0, vectors)
        if lanes == GROUP_ROWS:
            places = [(codes_0, scales_0), (codes_1, scales_1)][:vectors]
        in_fours = builder.and_(rows, I64(-together))
        with cgutils.for_range(builder, blocks, intp=I64) as loop:
            block = _Block(builder, lowering, form, places, loop.index)
            tile = offset(builder, x, builder.mul(loop.index, I64(ROW_TILE * RECORD_BYTES)))
            for first, last, step in ((I64(0), in_fours, together), (in_fours, rows, 1)):
                with cgutils.for_range_slice(builder, first, last, I64(step), I64, inc=True) as (row, _):
                    emit_rows(builder, block, tile, sums, row, step)

    def emit_rows(builder: Any, block: _Block, tile: Any, sums: Any, row: Any, count: int) -> None:
        numbers = [builder.add(row, I64(i)) for i in range(count)]
        records = [offset(builder, tile, builder.mul(number, I64(RECORD_BYTES))) for number in numbers]
        places = [offset(builder, sums, builder.mul(number, I64(4 * lanes * vectors))) for number in numbers]
        before = [_load_floats(builder, lanes, place, vectors) for place in places]
        for place, after in zip(places, block.multiply(records, before, 1), strict=True):
            _store_floats(builder, lanes, after, place)

    @intrinsic
    def multiply(
        typing_context: Any,
        form: Any,
        codes_0: Any,
        codes_1: Any,
        scales_0: Any,
        scales_1: Any,
        x: Any,
        sums: Any,
        rows: Any,
        blocks: Any,
    ) -> Any:
        return types.void(*[types.int64] * 9), _for_form(forms, emit)

    return multiply


def multiply_row(lowering: Lowering, forms: Sequence[BlockFormat]) -> Callable[..., None]:
    """Intrinsic (form, codes, scales, x, sums, blocks): add x @ weights.T of one group and one row to `sums`.

    `x` is the row's first record, `sums` float32 [16], 64-byte aligned. Made to keep up with the memory.
    """
    lanes = lowering.lanes
    vectors = GROUP_ROWS // lanes
    chains = 2 if lowering.dot else 1  # one row alone has no others to hide the latency of its dot products

    def emit(builder: Any, form: BlockFormat, args: list[Any]) -> None:
        codes, scales, x, sums, blocks = args
        places = _places(builder, lanes, codes, scales, vectors)
        held = [cgutils.alloca_once_value(builder, value) for value in _load_floats(builder, lanes, sums, vectors)]
        with cgutils.for_range(builder, blocks, intp=I64) as loop:
            block = _Block(builder, lowering, form, places, loop.index)
            record = offset(builder, x, builder.mul(loop.index, I64(ROW_TILE * RECORD_BYTES)))
            after = block.multiply([record], [[builder.load(total) for total in held]], chains)
            for total, value in zip(held, after[0], strict=True):
                builder.store(value, total)
        _store_floats(builder, lanes, [builder.load(total) for total in held], sums)

    @intrinsic
    def multiply(typing_context: Any, form: Any, codes: Any, scales: Any, x: Any, sums: Any, blocks: Any) -> Any:
        return types.void(*[types.int64] * 6), _for_form(forms, emit)

    return multiply


def _for_form(forms: Sequence[BlockFormat], emit: Callable[..., None]) -> Callable[..., Any]:
    """Code generator of an intrinsic whose first argument chooses among `emit` for each form."""

    def generate(context: Any, builder: Any, signature: Any, args: list[Any]) -> Any:
        for number, form in enumerate(forms):
            with builder.if_then(builder.icmp_signed("==", args[0], I64(number))):
                emit(builder, form, args[1:])
        return context.get_dummy_value()

    return generate


def _places(builder: Any, lanes: int, codes: Any, scales: Any, vectors: int) -> list[tuple[Any, Any]]:
    """Where codes and scales of the first `vectors` vectors of a group stand."""
    return [(offset(builder, codes, 4 * lanes * v), offset(builder, scales, 2 * lanes * v)) for v in range(vectors)]


def _load_floats(builder: Any, lanes: int, address: Any, vectors: int) -> list[Any]:
    return [
        load(builder, offset(builder, address, 4 * lanes * v), vector(F32, lanes), 4 * lanes) for v in range(vectors)
    ]


def _store_floats(builder: Any, lanes: int, values: list[Any], address: Any) -> None:
    for v, value in enumerate(values):
        store(builder, value, offset(builder, address, 4 * lanes * v), 4 * lanes)


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
    """Intrinsic () -> address of `count` float32 on the caller's stack, 64-byte aligned, not initialised."""

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
