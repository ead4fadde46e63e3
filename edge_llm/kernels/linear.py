"""BlockLinear and BlockEmbedding: products of rows with blocks of 4- and 8-bit weights, exactly as the source has them.

A call runs in three phases over one `LinearCall` record: `linear_plan` cuts the work, `linear_quantise` turns the rows
of x into int8 blocks, `linear_task` multiplies. Parts of rows and tasks may run in any order on any threads: every output is one
sum in one order (see `linear_ir`), so the cut changes no bit.
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
    ROW_TILE,
    EmbeddingCall,
    LinearCall,
    row_parts,
)
from edge_llm.kernels.linear_ir import (
    copy_floats,
    half_at,
    multiply_row,
    multiply_tile,
    pass_vectors,
    stack_floats,
)
from edge_llm.kernels.lowering import detect_lowering
from edge_llm.kernels.pointers import f32_at, f64_at, i64_at, u8_at
from edge_llm.kernels.quantise_ir import RECORD_BYTES, quantise_row

_LOWERING = detect_lowering()
_PASS = pass_vectors(_LOWERING) * _LOWERING.lanes
"""outputs of one pass over a tile of rows"""
_CUT = 2 * GROUP_ROWS
"""tasks begin at multiples of it: no pass is wider"""
_TASK_COST = 12_000
"""cost, in about cycles, below which handing a task to another thread gains nothing"""
_HELD_BYTES = 256 << 10
"""weights that go over all rows before the next are fetched: about what stays in a core's own cache"""

_row_parts = numba.njit(row_parts)
_OUTPUT_CUTS = LinearCall.PRIVATE
_ROW_CUTS = LinearCall.PRIVATE + 1

_FORMS = (
    BlockFormat(4, 32, True),
    BlockFormat(4, 16, True),
    BlockFormat(8, 32, False),
    BlockFormat(8, 32, True),
    BlockFormat(8, 16, False),
)
_CODE_BYTES = tuple(form.block_code_bytes * ACTIVATION_BLOCK // form.block for form in _FORMS)
_SCALE_BYTES = tuple(form.block_scale_bytes * ACTIVATION_BLOCK // form.block for form in _FORMS)
"""bytes of 32 inputs of a group, by format"""

_quantise = quantise_row(_LOWERING)
_multiply_row = multiply_row(_LOWERING, _FORMS)
_multiply_tile = multiply_tile(_LOWERING, _FORMS)
_half = half_at(_LOWERING)
_copy_group = copy_floats(_LOWERING, GROUP_ROWS)
_copy_pass = copy_floats(_LOWERING, _PASS)
_group_on_stack = stack_floats(GROUP_ROWS)
_tile_on_stack = stack_floats(ROW_TILE * _PASS)

_compiled = numba.njit(error_model="numpy")
_inlined = numba.njit(inline="always")  # one function to optimise in place of many


@_compiled
def linear_plan(call: int) -> int:
    """Cut the call into PARTS of rows, and into tasks: their number, also left in TASKS."""
    fields = i64_at(call, CALL_FIELDS)
    fields[LinearCall.PARTS] = _row_parts(fields[LinearCall.ROWS], fields[LinearCall.INPUTS])
    rows, threads = fields[LinearCall.ROWS], max(1, fields[LinearCall.THREADS])
    cuts = -(-fields[LinearCall.OUTPUTS] // _CUT)
    tiles = -(-rows // ROW_TILE)
    # A block of a group costs about 34 cycles to fetch from memory, and 6 a row to multiply.
    cost = cuts * 2 * (fields[LinearCall.INPUTS] // ACTIVATION_BLOCK) * (34 + 6 * rows)
    wanted = max(1, cost // _TASK_COST) if threads > 1 else 1
    if wanted > threads:  # as many for each, and up to four, so that one thread held up does not keep all waiting
        wanted = threads * min(4, wanted // threads)
    fields[_OUTPUT_CUTS] = min(cuts, wanted)
    fields[_ROW_CUTS] = min(tiles, max(1, wanted // max(1, cuts)))
    fields[LinearCall.TASKS] = fields[_OUTPUT_CUTS] * fields[_ROW_CUTS]
    return fields[LinearCall.TASKS]


@_compiled
def linear_quantise(call: int, item: int) -> None:
    """Quantise a part of a row of X, both by the number `item`, into its records."""
    fields = i64_at(call, CALL_FIELDS)
    inputs, parts = fields[LinearCall.INPUTS], fields[LinearCall.PARTS]
    row, part = item // parts, item % parts
    blocks = inputs // ACTIVATION_BLOCK
    first, last = blocks * part // parts, blocks * (part + 1) // parts
    x = fields[LinearCall.X] + 4 * (row * inputs + ACTIVATION_BLOCK * first)
    halves = 1 if fields[LinearCall.BLOCK] == 16 else 0
    record = _record(fields, row) + first * ROW_TILE * RECORD_BYTES
    _quantise(x, record, last - first, halves, fields[LinearCall.HAS_MINIMUM])


@_inlined
def _form(bits: int, block: int, minimum: int) -> int:
    """Index in _FORMS; the session has checked that it is one of them."""
    if bits == 4:
        return 0 if block == 32 else 1
    if minimum != 0:
        return 3
    return 2 if block == 32 else 4


@_inlined
def _record(fields: Any, row: int) -> int:
    """Address of the first record of a row."""
    blocks = fields[LinearCall.INPUTS] // ACTIVATION_BLOCK
    return fields[LinearCall.X_BLOCKS] + (row // ROW_TILE * blocks * ROW_TILE + row % ROW_TILE) * RECORD_BYTES


@_inlined
def _one_row(fields: Any, form: int, first: int, last: int) -> None:
    """Outputs `first` (a multiple of _CUT) .. `last` - 1 of the only row."""
    blocks = fields[LinearCall.INPUTS] // ACTIVATION_BLOCK
    code_bytes, scale_bytes = blocks * _CODE_BYTES[form], blocks * _SCALE_BYTES[form]
    sums = _group_on_stack()
    for n in range(first, last, GROUP_ROWS):
        count = min(GROUP_ROWS, last - n)
        _start(sums, fields, n, count, GROUP_ROWS)
        codes = fields[LinearCall.CODES] + n // GROUP_ROWS * code_bytes
        scales = fields[LinearCall.SCALES] + n // GROUP_ROWS * scale_bytes
        _multiply_row(form, codes, scales, fields[LinearCall.X_BLOCKS], sums, blocks)
        out = fields[LinearCall.OUT] + 4 * n
        if count == GROUP_ROWS:
            _copy_group(sums, out)
        else:
            _copy_some(sums, out, count)


@_inlined
def _some_rows(fields: Any, form: int, first: int, last: int, first_row: int, last_row: int) -> None:
    """As `_one_row` for the rows `first_row` (a multiple of ROW_TILE) .. `last_row` - 1."""
    group_bytes = fields[LinearCall.INPUTS] // ACTIVATION_BLOCK * (_CODE_BYTES[form] + _SCALE_BYTES[form])
    held = max(1, _HELD_BYTES // (2 * group_bytes)) * _CUT
    for begin in range(first, last, held):
        for row in range(first_row, last_row, ROW_TILE):
            for n in range(begin, min(last, begin + held), _PASS):
                _one_pass(fields, form, n, row, min(ROW_TILE, last_row - row))


@_inlined
def _one_pass(fields: Any, form: int, n: int, row: int, rows: int) -> None:
    """Outputs n .. n + _PASS - 1 (as far as they exist) of `rows` rows of one tile."""
    outputs = fields[LinearCall.OUTPUTS]
    blocks = fields[LinearCall.INPUTS] // ACTIVATION_BLOCK
    code_bytes, scale_bytes = blocks * _CODE_BYTES[form], blocks * _SCALE_BYTES[form]
    count = min(_PASS, outputs - n)
    # A pass of two groups takes the last one twice where there is no other.
    group, other = n // GROUP_ROWS, min(n // GROUP_ROWS + 1, (outputs - 1) // GROUP_ROWS)
    codes = fields[LinearCall.CODES] + 4 * (n % GROUP_ROWS)
    scales = fields[LinearCall.SCALES] + 2 * (n % GROUP_ROWS)
    sums = _tile_on_stack()
    _start(sums, fields, n, count, _PASS)
    for i in range(1, rows):
        _copy_pass(sums, sums + 4 * _PASS * i)
    _multiply_tile(
        form,
        codes + group * code_bytes,
        codes + other * code_bytes,
        scales + group * scale_bytes,
        scales + other * scale_bytes,
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


@_inlined
def _start(sums: int, fields: Any, n: int, count: int, width: int) -> None:
    """What the sums of outputs n .. n + width - 1 begin with: the bias of the `count` that exist, else zero."""
    f32_at(sums, width)[:] = 0.0
    if fields[LinearCall.BIAS] != 0:
        _copy_some(fields[LinearCall.BIAS] + 4 * n, sums, count)


@_inlined
def _copy_some(source: int, target: int, count: int) -> None:
    values, out = f32_at(source, count), f32_at(target, count)
    for i in range(count):
        out[i] = values[i]


@_compiled
def linear_task(call: int, task: int) -> None:
    """Compute task `task` of the plan; all rows must have been quantised."""
    fields = i64_at(call, CALL_FIELDS)
    form = _form(fields[LinearCall.BITS], fields[LinearCall.BLOCK], fields[LinearCall.HAS_MINIMUM])
    outputs, rows = fields[LinearCall.OUTPUTS], fields[LinearCall.ROWS]
    output_cuts, row_cuts = fields[_OUTPUT_CUTS], fields[_ROW_CUTS]
    cuts, tiles = -(-outputs // _CUT), -(-rows // ROW_TILE)
    a, b = task // row_cuts, task % row_cuts
    first, last = cuts * a // output_cuts * _CUT, min(outputs, cuts * (a + 1) // output_cuts * _CUT)
    first_row, last_row = tiles * b // row_cuts * ROW_TILE, min(rows, tiles * (b + 1) // row_cuts * ROW_TILE)
    if rows == 1:
        _one_row(fields, form, first, last)
    else:
        _some_rows(fields, form, first, last, first_row, last_row)


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
    "linear_plan": (types.int64(types.int64), linear_plan.py_func),
    "linear_quantise": (_TASK, linear_quantise.py_func),
    "linear_task": (_TASK, linear_task.py_func),
    "embedding_row": (_TASK, embedding_row.py_func),
}
