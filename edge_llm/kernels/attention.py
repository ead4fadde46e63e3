"""RingAttention: the rows of a ragged step attend to the ring, any mix of prompt chunks and decode rows.

A call runs in four phases over one `AttentionCall` record: `attention_plan` cuts the work, `attention_prepare` keeps
each row's query and writes its key and value, `attention_task` attends, `attention_merge` joins what tasks left in
parts. The rows, tasks or merges of a phase may run in any order on any threads.

Keys are cut into splits at absolute multiples of SPLIT. A query vector (row, head) gets from each split a maximum, a sum
and an output, and these are merged in the order of splits: by the task that walks over all splits of its rows, or by
`attention_merge` where each split was a task's own. The arithmetic is the same. No phase is compiled with fastmath: the
same function may stand in several compiled modules and must give the same bits in all.
"""

from __future__ import annotations

import numba
import numpy as np
from numba import types

from edge_llm.kernels.attention_call import (
    FIRST_MERGE,
    FIRST_PART,
    FIRST_ROW,
    MERGE_UNITS,
    PART_STATES,
    PARTS,
    ROWS,
    SPLITS,
    STATES,
    UNITS,
    WORK,
    find_segment,
    real_field,
    segment_record,
)
from edge_llm.kernels.attention_plan import attention_plan, task_bytes
from edge_llm.kernels.attention_prepare import LOG2_E, attention_prepare
from edge_llm.kernels.attention_units import (
    BOUNDS,
    CODES,
    HEAD,
    MERGES,
    OUT,
    OUT_STRIDE,
    OUTPUTS,
    QUERY,
    ROW,
    SPLIT_COUNT,
    STATE,
    STATE_STRIDE,
    TILE_ROWS,
    TILE_VALUE_SCALES,
    UNIT,
    UNIT_FIELDS,
    VECTORS,
    WEIGHT_SCALES,
    find_bounds,
    find_tiles,
    locate_unit,
    merge_vectors,
    output_address,
    start_output,
)
from edge_llm.kernels.layout import CALL_FIELDS, LAYER_FIELDS, SPLIT, TILE, AttentionCall, CacheLayer, KvType
from edge_llm.kernels.pointers import i64_at
from edge_llm.kernels.ring import clear
from edge_llm.kernels.softmax_ir import TILES, find_maximum, finish_output, merge_split, softmax_f32, softmax_int8
from edge_llm.kernels.tile_product import (
    MAX_VECTORS,
    WEIGHT_TERMS,
    plane_count,
    scores_f32,
    scores_int8,
    values_f32,
    values_int8,
)

__all__ = ["ENTRIES", "attention_merge", "attention_plan", "attention_prepare", "attention_task"]

_WEIGHT_BYTES = SPLIT * plane_count(WEIGHT_TERMS)  # codes of one vector's weights


@numba.njit(error_model="numpy")
def attention_task(call: int, task: int) -> None:
    """Run the units `task`, `task + tasks`, ...: rows of the step attend to what the ring holds."""
    # Tile products and softmax are large code, so they stand in this one function: LLVM would optimise them once more
    # for each level of calls.
    fields = i64_at(call, CALL_FIELDS)
    layer = i64_at(fields[AttentionCall.LAYER], LAYER_FIELDS)
    dim = fields[AttentionCall.HEAD_DIM]
    work = fields[WORK] + task * task_bytes(dim)
    records = work + OUTPUTS + 4 * dim * MAX_VECTORS
    unit, tiles, bounds = (
        i64_at(records + UNIT, UNIT_FIELDS),
        i64_at(records + TILE_ROWS, 4 * TILES),
        i64_at(records + BOUNDS, 3),
    )
    vectors = fields[AttentionCall.ROWS] * fields[AttentionCall.HEADS]
    int8 = layer[CacheLayer.KV_TYPE] == KvType.INT8
    cap = np.float32(max(real_field(fields, AttentionCall.SOFTCAP), 0.0) * LOG2_E)
    for number in range(task, fields[UNITS], fields[AttentionCall.TASKS]):
        locate_unit(call, records, number)
        for i in range(unit[SPLIT_COUNT]):
            for v in range(0, unit[VECTORS], MAX_VECTORS):
                n = min(MAX_VECTORS, unit[VECTORS] - v)
                first = 0 if unit[MERGES] else v
                out, state = unit[OUT] + first * unit[OUT_STRIDE], unit[STATE] + first * unit[STATE_STRIDE]
                seen = find_tiles(call, records, i, v, n)
                for t in range(TILES):
                    if (seen >> t) & 1:
                        scores, row = work + 4 * TILE * t, tiles[t]
                        queries, scales = tiles[2 * TILES + t], tiles[3 * TILES + t]
                        if int8:
                            keys, key_scales = (
                                layer[CacheLayer.KEYS] + row * dim,
                                layer[CacheLayer.KEY_SCALES] + 4 * row,
                            )
                            scores_int8(n, keys, queries, dim, scores, key_scales, scales, scales + 4 * vectors)
                        else:
                            scores_f32(n, layer[CacheLayer.KEYS] + 4 * row * dim, queries, dim, scores)
                for k in range(n):
                    find_bounds(call, records, i, v + k)
                    pair = state + k * unit[STATE_STRIDE]
                    find_maximum(work + 4 * SPLIT * k, seen, bounds[0], bounds[1], bounds[2], cap, pair)
                for k in range(n):
                    scores, pair = work + 4 * SPLIT * k, state + k * unit[STATE_STRIDE]
                    if int8:
                        codes, scales = work + CODES + _WEIGHT_BYTES * k, records + WEIGHT_SCALES + 4 * k
                        softmax_int8(scores, seen, pair, records + TILE_VALUE_SCALES, codes, scales)
                    else:
                        softmax_f32(scores, seen, pair)
                    clear(out + k * unit[OUT_STRIDE], dim)
                for t in range(TILES):
                    if (seen >> t) & 1:
                        if int8:
                            values, codes = layer[CacheLayer.VALUES] + tiles[t] * dim, work + CODES + TILE * t
                            scales = records + WEIGHT_SCALES + 4 * MAX_VECTORS * t
                            values_int8(n, values, codes, dim, out, unit[OUT_STRIDE], scales)
                        else:
                            values = layer[CacheLayer.VALUES] + 4 * tiles[t] * dim
                            values_f32(n, values, work + 4 * TILE * t, dim, out, unit[OUT_STRIDE])
                if unit[MERGES]:
                    merge_vectors(call, records, v, n)
        if unit[MERGES]:
            for v in range(unit[VECTORS]):
                out = output_address(call, unit[ROW], unit[HEAD], v)
                finish_output(out, fields[STATES] + 8 * (unit[QUERY] + v), dim)


@numba.njit(error_model="numpy")
def attention_merge(call: int, merge: int) -> None:
    """Join the parts of the (row, kv head) pairs `merge`, `merge + merges`, ... in the order of splits."""
    fields = i64_at(call, CALL_FIELDS)
    dim, kv_heads = fields[AttentionCall.HEAD_DIM], fields[AttentionCall.KV_HEADS]
    group = fields[AttentionCall.HEADS] // kv_heads
    for number in range(merge, fields[MERGE_UNITS], fields[AttentionCall.MERGES]):
        segment = segment_record(fields, find_segment(fields, FIRST_MERGE, number))
        pair, splits = number - segment[FIRST_MERGE], segment[SPLITS]
        row, head = pair // kv_heads, pair % kv_heads
        for g in range(group):
            out = output_address(call, segment[FIRST_ROW] + row, head, g)
            state = fields[STATES] + 8 * ((head * fields[AttentionCall.ROWS] + segment[FIRST_ROW] + row) * group + g)
            part = segment[FIRST_PART] + ((head * segment[ROWS] + row) * group + g) * splits
            start_output(out, state, dim)
            for i in range(part, part + splits):
                merge_split(out, state, fields[PARTS] + 4 * dim * i, fields[PART_STATES] + 8 * i, dim)
            finish_output(out, state, dim)


_INDEXED = types.void(types.int64, types.int64)
ENTRIES = {
    "attention_plan": (types.int64(types.int64), attention_plan.py_func),
    "attention_prepare": (_INDEXED, attention_prepare.py_func),
    "attention_task": (_INDEXED, attention_task.py_func),
    "attention_merge": (_INDEXED, attention_merge.py_func),
}
