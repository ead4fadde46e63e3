"""BlockLinear and BlockEmbedding: products of rows with int4 / int8 weight blocks, exact to the source's codes and scales.

A call runs in three phases over one `LinearCall` record: `linear_plan` cuts the work, `linear_quantise` turns each row of
x into int8 blocks, `linear_task` multiplies. The rows of a phase, and its tasks, may run in any order on any threads:
every output is one sum in one order (see `linear_ir`), so the cut changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from numba import types

from edge_llm.kernels.block_format import BlockFormat
from edge_llm.kernels.layout import (
    ACTIVATION_BLOCK,
    CALL_FIELDS,
    GROUP_ROWS,
    RECORD_WORDS,
    ROW_TILE,
    EmbeddingCall,
    LinearCall,
)
from edge_llm.kernels.linear_ir import (
    copy_floats,
    half_at,
    multiply_row,
    multiply_tile,
    pass_vectors,
    quantise_row,
    stack_floats,
)
from edge_llm.kernels.lowering import detect_lowering
from edge_llm.kernels.pointers import f32_at, f64_at, i64_at, u8_at

_LOWERING = detect_lowering()
_PASS = pass_vectors(_LOWERING) * _LOWERING.lanes
"""outputs of one pass over a tile of rows"""
_CUT = 2 * GROUP_ROWS
"""tasks begin at multiples of it: no pass is wider"""
_RECORD_BYTES = 4 * RECORD_WORDS
_TASK_COST = 12_000
"""cost, in about cycles, below which handing a task to another thread gains nothing"""

_HELD_BYTES = 256 << 10
"""weights that go over all rows before the next are fetched: about what stays in a core's own cache"""

_OUTPUT_CUTS = LinearCall.PRIVATE
_ROW_CUTS = LinearCall.PRIVATE + 1

_quantise = quantise_row(_LOWERING)
_half = half_at(_LOWERING)
_copy_group = copy_floats(_LOWERING, GROUP_ROWS)
_copy_pass = copy_floats(_LOWERING, _PASS)
_group_on_stack = stack_floats(GROUP_ROWS)
_pass_on_stack = stack_floats(_PASS)
_tile_on_stack = stack_floats(ROW_TILE * _PASS)

_compiled = numba.njit(error_model="numpy")


@_compiled
def linear_plan(call: int) -> int:
    """Cut the call into tasks: their number, also left in TASKS."""
    fields = i64_at(call, CALL_FIELDS)
    rows, threads = fields[LinearCall.ROWS], max(1, fields[LinearCall.THREADS])
    cuts = -(-fields[LinearCall.OUTPUTS] // _CUT)
    tiles = -(-rows // ROW_TILE)
    # A block of a group costs about 34 cycles to fetch from memory, and 6 a row to multiply.
    cost = cuts * 2 * (fields[LinearCall.INPUTS] // ACTIVATION_BLOCK) * (34 + 6 * rows)
    wanted = threads * max(1, min(4, cost // (threads * _TASK_COST))) if cost >= 2 * _TASK_COST else 1
    fields[_OUTPUT_CUTS] = min(cuts, wanted)
    fields[_ROW_CUTS] = min(tiles, max(1, wanted // max(1, cuts)))
    fields[LinearCall.TASKS] = fields[_OUTPUT_CUTS] * fields[_ROW_CUTS]
    return fields[LinearCall.TASKS]


@_compiled
def linear_quantise(call: int, row: int) -> None:
    """Quantise row `row` of X into its records."""
    fields = i64_at(call, CALL_FIELDS)
    inputs = fields[LinearCall.INPUTS]
    blocks = inputs // ACTIVATION_BLOCK
    x = fields[LinearCall.X] + 4 * row * inputs
    halves = 1 if fields[LinearCall.BLOCK] == 16 else 0
    _quantise(x, _record(fields, row), blocks, halves, fields[LinearCall.HAS_MINIMUM])


@numba.njit(inline="always")
def _record(fields: Any, row: int) -> int:
    """Address of the first record of a row."""
    blocks = fields[LinearCall.INPUTS] // ACTIVATION_BLOCK
    return fields[LinearCall.X_BLOCKS] + (row // ROW_TILE * blocks * ROW_TILE + row % ROW_TILE) * _RECORD_BYTES


@_compiled
def linear_task(call: int, task: int) -> None:
    """Compute task `task` of the plan; all rows must have been quantised."""
    fields = i64_at(call, CALL_FIELDS)
    bits, block, minimum = fields[LinearCall.BITS], fields[LinearCall.BLOCK], fields[LinearCall.HAS_MINIMUM]
    outputs, rows = fields[LinearCall.OUTPUTS], fields[LinearCall.ROWS]
    output_cuts, row_cuts = fields[_OUTPUT_CUTS], fields[_ROW_CUTS]
    cuts, tiles = -(-outputs // _CUT), -(-rows // ROW_TILE)
    a, b = task // row_cuts, task % row_cuts
    first, last = cuts * a // output_cuts * _CUT, min(outputs, cuts * (a + 1) // output_cuts * _CUT)
    first_row, last_row = tiles * b // row_cuts * ROW_TILE, min(rows, tiles * (b + 1) // row_cuts * ROW_TILE)
    if bits == 4:
        if block == 32:
            _product_4_32(fields, first, last, first_row, last_row)
        else:
            _product_4_16(fields, first, last, first_row, last_row)
    elif block == 16:
        _product_8_16(fields, first, last, first_row, last_row)
    elif minimum != 0:
        _product_8_32_minimum(fields, first, last, first_row, last_row)
    else:
        _product_8_32(fields, first, last, first_row, last_row)


def _product(form: BlockFormat) -> Callable[..., None]:
    """The product for one format: outputs `first` .. `last` - 1 (from a multiple of _CUT on) of some rows (from a tile on)."""
    of_row, of_tile = multiply_row(_LOWERING, form), multiply_tile(_LOWERING, form)
    parts = ACTIVATION_BLOCK // form.block
    code_bytes, scale_bytes = parts * form.block_code_bytes, parts * form.block_scale_bytes

    @_compiled
    def one_row(fields: Any, first: int, last: int) -> None:
        blocks = fields[LinearCall.INPUTS] // ACTIVATION_BLOCK
        start, spare = _group_on_stack(), _group_on_stack()
        for n in range(first, last, GROUP_ROWS):
            group = n // GROUP_ROWS
            count = min(GROUP_ROWS, last - n)
            _fill_start(start, fields, n, count, GROUP_ROWS)
            out = fields[LinearCall.OUT] + 4 * n
            codes = fields[LinearCall.CODES] + group * blocks * code_bytes
            scales = fields[LinearCall.SCALES] + group * blocks * scale_bytes
            of_row(codes, scales, fields[LinearCall.X_BLOCKS], start, out if count == GROUP_ROWS else spare, blocks)
            if count < GROUP_ROWS:
                _copy_some(spare, out, count)

    @_compiled
    def one_pass(fields: Any, n: int, row: int, rows: int) -> None:
        outputs = fields[LinearCall.OUTPUTS]
        blocks = fields[LinearCall.INPUTS] // ACTIVATION_BLOCK
        count = min(_PASS, outputs - n)
        # A pass of two groups takes the last one twice where there is no other.
        group, other = n // GROUP_ROWS, min(n // GROUP_ROWS + 1, (outputs - 1) // GROUP_ROWS)
        codes = fields[LinearCall.CODES] + 4 * (n % GROUP_ROWS)
        scales = fields[LinearCall.SCALES] + 2 * (n % GROUP_ROWS)
        start, sums = _pass_on_stack(), _tile_on_stack()
        _fill_start(start, fields, n, count, _PASS)
        for i in range(rows):
            _copy_pass(start, sums + 4 * _PASS * i)
        of_tile(
            codes + group * blocks * code_bytes,
            codes + other * blocks * code_bytes,
            scales + group * blocks * scale_bytes,
            scales + other * blocks * scale_bytes,
            _record(fields, row),
            sums,
            rows,
            blocks,
        )
        for i in range(rows):
            out = fields[LinearCall.OUT] + 4 * ((row + i) * outputs + n)
            if count == _PASS:
                _copy_pass(sums + 4 * _PASS * i, out)
            else:
                _copy_some(sums + 4 * _PASS * i, out, count)

    @_compiled
    def some_rows(fields: Any, first: int, last: int, first_row: int, last_row: int) -> None:
        blocks = fields[LinearCall.INPUTS] // ACTIVATION_BLOCK
        held = max(1, _HELD_BYTES // (blocks * (code_bytes + scale_bytes))) * GROUP_ROWS
        held = -(-held // _PASS) * _PASS
        for begin in range(first, last, held):
            for row in range(first_row, last_row, ROW_TILE):
                for n in range(begin, min(last, begin + held), _PASS):
                    one_pass(fields, n, row, min(ROW_TILE, last_row - row))

    @_compiled
    def product(fields: Any, first: int, last: int, first_row: int, last_row: int) -> None:
        if fields[LinearCall.ROWS] == 1:
            one_row(fields, first, last)
        else:
            some_rows(fields, first, last, first_row, last_row)

    return product


@_compiled
def _fill_start(start: int, fields: Any, n: int, count: int, width: int) -> None:
    """What the sums of outputs n .. n + width - 1 begin with: the bias of the `count` that exist, else zero."""
    values = f32_at(start, width)
    values[:] = 0.0
    if fields[LinearCall.BIAS] != 0:
        _copy_some(fields[LinearCall.BIAS] + 4 * n, start, count)


@_compiled
def _copy_some(source: int, target: int, count: int) -> None:
    values, out = f32_at(source, count), f32_at(target, count)
    for i in range(count):
        out[i] = values[i]


_product_4_32 = _product(BlockFormat(4, 32, True))
_product_4_16 = _product(BlockFormat(4, 16, True))
_product_8_32 = _product(BlockFormat(8, 32, False))
_product_8_32_minimum = _product(BlockFormat(8, 32, True))
_product_8_16 = _product(BlockFormat(8, 16, False))


@_compiled
def embedding_row(call: int, row: int) -> None:
    """Row `row` of OUT: SCALE times the weights' row IDS[row], dequantised."""
    fields = i64_at(call, CALL_FIELDS)
    inputs, bits, block = fields[EmbeddingCall.INPUTS], fields[EmbeddingCall.BITS], fields[EmbeddingCall.BLOCK]
    minimum = fields[EmbeddingCall.HAS_MINIMUM]
    index = i64_at(fields[EmbeddingCall.IDS], fields[EmbeddingCall.ROWS])[row]
    factor = numba.float32(f64_at(call, CALL_FIELDS)[EmbeddingCall.SCALE])
    blocks, group, lane = inputs // block, index // GROUP_ROWS, index % GROUP_ROWS
    code_bytes, scale_bytes = GROUP_ROWS * block * bits // 8, GROUP_ROWS * (4 if minimum != 0 else 2)
    codes = u8_at(fields[EmbeddingCall.CODES] + group * blocks * code_bytes, blocks * code_bytes)
    scales = fields[EmbeddingCall.SCALES] + group * blocks * scale_bytes + 2 * lane
    out = f32_at(fields[EmbeddingCall.OUT] + 4 * row * inputs, inputs)
    for b in range(blocks):
        d = _half(scales + b * scale_bytes)
        m = _half(scales + b * scale_bytes + 2 * GROUP_ROWS) if minimum != 0 else numba.float32(-128) * d
        for t in range(code_bytes // (4 * GROUP_ROWS)):
            for i in range(4):
                code = codes[b * code_bytes + (t * GROUP_ROWS + lane) * 4 + i]
                if bits == 4:
                    out[b * block + 8 * t + i] = (d * numba.float32(code & 15) + m) * factor
                    out[b * block + 8 * t + 4 + i] = (d * numba.float32(code >> 4) + m) * factor
                else:
                    out[b * block + 4 * t + i] = (d * numba.float32(code) + m) * factor


_TASK = types.void(types.int64, types.int64)
ENTRIES: dict[str, tuple[Any, Callable[..., Any]]] = {
    "linear_quantise": (_TASK, linear_quantise.py_func),
    "linear_task": (_TASK, linear_task.py_func),
    "embedding_row": (_TASK, embedding_row.py_func),
}
