"""RingAttention: the rows of a ragged step attend to the ring, any mix of prompt chunks and decode rows.

A call runs in four phases over one `AttentionCall` record: `attention_plan` cuts the work, `attention_prepare` keeps each
row's query and writes its key and value, `attention_task` attends, `attention_merge` joins what tasks left in parts. The
rows, tasks or merges of a phase may run in any order on any threads.

Keys are cut into splits at absolute multiples of SPLIT. A query vector (row, head) gets from each split a maximum, a sum
and an output, and these are merged in the order of splits: by the task that walks over all splits of its rows, or by
`attention_merge` where each split was a task of its own. The arithmetic is the same. No phase is compiled with fastmath,
because a function may stand in several compiled modules and must give the same bits in all.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types

from edge_llm.kernels.attention_call import (
    FIRST_MERGE,
    FIRST_PART,
    FIRST_ROW,
    FIRST_UNIT,
    MERGE_UNITS,
    PART_STATES,
    PARTS,
    POSITION,
    QUERIES,
    QUERY_SCALES,
    ROWS,
    SINK_QUERIES,
    SLOT,
    SPLITS,
    STATES,
    UNITS,
    WORK,
    block_rows,
    find_segment,
    real_field,
    segment_record,
    visited_splits,
)
from edge_llm.kernels.attention_plan import attention_plan, task_bytes
from edge_llm.kernels.attention_prepare import LOG2_E, QUERY_PLANES, attention_prepare
from edge_llm.kernels.layout import CALL_FIELDS, LAYER_FIELDS, SPLIT, TILE, AttentionCall, CacheLayer, KvType
from edge_llm.kernels.pointers import f32_at, i64_at
from edge_llm.kernels.ring import clear, head_rows, physical_tile
from edge_llm.kernels.softmax_ir import LOWEST, TILES, find_maximum, finish_output, merge_split, softmax_f32, softmax_int8
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

_WEIGHT_PLANES = plane_count(WEIGHT_TERMS)

# a task's working memory: scores float32 [MAX_VECTORS][SPLIT], then
_CODES = 4 * SPLIT * MAX_VECTORS  # the planes of MAX_VECTORS vectors of weights
_OUTPUTS = _CODES + 2 * SPLIT * MAX_VECTORS  # float32 [MAX_VECTORS][head_dim], then small things:
_WEIGHT_SCALES = 0  # float32 [TILES][MAX_VECTORS]
_SPLIT_STATES = 64  # float32 [MAX_VECTORS][2]
_TILES = 96  # int64 [TILES] four times: ring row, address of the value scales, of the queries, of their scales
_BOUNDS = 224  # int64 [3]
_UNIT = 256  # int64 [_UNIT_FIELDS]

# the record of a unit
(
    _ROW,
    _FROM,
    _HEAD,
    _VECTORS,
    _QUERY,
    _RING,
    _SINK_SPLITS,
    _FIRST_SPLIT,
    _SPLIT_COUNT,
    _OUT,
    _OUT_STRIDE,
    _OUT_STEP,
    _STATE,
    _STATE_STRIDE,
    _STATE_STEP,
    _MERGES_ITSELF,
) = range(16)
_UNIT_FIELDS = 16


# --- attend --------------------------------------------------------------------------------------------------------


@numba.njit(error_model="numpy")
def attention_task(call: int, task: int) -> None:
    """Run the units `task`, `task + tasks`, ...: rows of the step attend to what the ring holds."""
    # Tile products and softmax are large code, so they stand in this one function: LLVM would optimise them once more
    # for each level of calls.
    fields = i64_at(call, CALL_FIELDS)
    layer = i64_at(fields[AttentionCall.LAYER], LAYER_FIELDS)
    dim = fields[AttentionCall.HEAD_DIM]
    work = fields[WORK] + task * task_bytes(dim)
    small = work + _OUTPUTS + 4 * dim * MAX_VECTORS
    tiles, unit, bounds = (
        i64_at(small + _TILES, 4 * TILES),
        i64_at(small + _UNIT, _UNIT_FIELDS),
        i64_at(small + _BOUNDS, 3),
    )
    all_vectors = fields[AttentionCall.ROWS] * fields[AttentionCall.HEADS]
    int8 = layer[CacheLayer.KV_TYPE] == KvType.INT8
    cap = np.float32(max(real_field(fields, AttentionCall.SOFTCAP), 0.0) * LOG2_E)
    for number in range(task, fields[UNITS], fields[AttentionCall.TASKS]):
        _locate_unit(call, small, work + _OUTPUTS, number)
        for i in range(unit[_SPLIT_COUNT]):
            for v in range(0, unit[_VECTORS], MAX_VECTORS):
                n = min(MAX_VECTORS, unit[_VECTORS] - v)
                out, state = unit[_OUT] + v * unit[_OUT_STEP], unit[_STATE] + v * unit[_STATE_STEP]
                seen = _find_tiles(call, small, i, v, n)
                for t in range(TILES):
                    if (seen >> t) & 1 != 0:
                        scores, place, queries = work + 4 * TILE * t, tiles[t], tiles[2 * TILES + t]
                        if int8:
                            keys, key_scales = (
                                layer[CacheLayer.KEYS] + place * dim,
                                layer[CacheLayer.KEY_SCALES] + 4 * place,
                            )
                            scales = tiles[3 * TILES + t]
                            scores_int8(n, keys, queries, dim, scores, key_scales, scales, scales + 4 * all_vectors)
                        else:
                            scores_f32(n, layer[CacheLayer.KEYS] + 4 * place * dim, queries, dim, scores)
                for k in range(n):
                    _find_bounds(call, small, i, v + k)
                    pair = state + k * unit[_STATE_STRIDE]
                    find_maximum(work + 4 * SPLIT * k, seen, bounds[0], bounds[1], bounds[2], cap, pair)
                for k in range(n):
                    scores, pair = work + 4 * SPLIT * k, state + k * unit[_STATE_STRIDE]
                    if int8:
                        codes, scales = work + _CODES + _WEIGHT_PLANES * SPLIT * k, small + _WEIGHT_SCALES + 4 * k
                        softmax_int8(scores, seen, pair, small + _TILES + 8 * TILES, codes, scales)
                    else:
                        softmax_f32(scores, seen, pair)
                    clear(out + k * unit[_OUT_STRIDE], dim)
                for t in range(TILES):
                    if (seen >> t) & 1 != 0:
                        place = tiles[t]
                        if int8:
                            values, scales = (
                                layer[CacheLayer.VALUES] + place * dim,
                                small + _WEIGHT_SCALES + 4 * MAX_VECTORS * t,
                            )
                            values_int8(n, values, work + _CODES + TILE * t, dim, out, unit[_OUT_STRIDE], scales)
                        else:
                            values = layer[CacheLayer.VALUES] + 4 * place * dim
                            values_f32(n, values, work + 4 * TILE * t, dim, out, unit[_OUT_STRIDE])
                if unit[_MERGES_ITSELF] != 0:
                    _merge_vectors(call, small, v, n)
        if unit[_MERGES_ITSELF] != 0:
            for v in range(unit[_VECTORS]):
                out = _output(call, unit[_ROW], unit[_HEAD], v)
                finish_output(out, fields[STATES] + 8 * (unit[_QUERY] + v), dim)


@numba.njit(error_model="numpy")
def _locate_unit(call: int, small: int, outputs: int, number: int) -> None:
    """Fill the unit's record: its rows, the splits it walks over, and where their outputs go."""
    fields = i64_at(call, CALL_FIELDS)
    layer = i64_at(fields[AttentionCall.LAYER], LAYER_FIELDS)
    unit = i64_at(small + _UNIT, _UNIT_FIELDS)
    kv_heads, dim = fields[AttentionCall.KV_HEADS], fields[AttentionCall.HEAD_DIM]
    group = fields[AttentionCall.HEADS] // kv_heads
    segment = segment_record(fields, find_segment(fields, FIRST_UNIT, number))
    block, splits, part = number - segment[FIRST_UNIT], segment[SPLITS], 0
    if splits > 0:
        part = block % splits
        block //= splits
    head, first = block % kv_heads, block // kv_heads * block_rows(fields)
    rows = min(block_rows(fields), segment[ROWS] - first)
    unit[_HEAD] = head
    unit[_ROW] = segment[FIRST_ROW] + first
    unit[_FROM] = segment[POSITION] + first
    unit[_VECTORS] = rows * group
    unit[_QUERY] = (head * fields[AttentionCall.ROWS] + unit[_ROW]) * group
    unit[_RING] = head_rows(layer, segment[SLOT], head)
    unit[_MERGES_ITSELF] = 1 if splits == 0 else 0
    if splits > 0:
        sinks, begin, _ = visited_splits(layer, segment[POSITION], segment[POSITION])
        index = segment[FIRST_PART] + (head * segment[ROWS] + first) * group * splits + part
        unit[_SINK_SPLITS] = 0
        unit[_FIRST_SPLIT] = part if part < sinks else begin + part - sinks
        unit[_SPLIT_COUNT] = 1
        unit[_OUT] = fields[PARTS] + 4 * dim * index
        unit[_STATE] = fields[PART_STATES] + 8 * index
        unit[_OUT_STRIDE] = unit[_OUT_STEP] = 4 * dim * splits
        unit[_STATE_STRIDE] = unit[_STATE_STEP] = 8 * splits
        return
    sinks, begin, last = visited_splits(layer, unit[_FROM], unit[_FROM] + rows - 1)
    unit[_SINK_SPLITS] = sinks
    unit[_FIRST_SPLIT] = begin
    unit[_SPLIT_COUNT] = sinks + last - begin + 1
    unit[_OUT] = outputs
    unit[_STATE] = small + _SPLIT_STATES
    unit[_OUT_STRIDE], unit[_OUT_STEP] = 4 * dim, 0
    unit[_STATE_STRIDE], unit[_STATE_STEP] = 8, 0
    for v in range(unit[_VECTORS]):
        _start(_output(call, unit[_ROW], head, v), fields[STATES] + 8 * (unit[_QUERY] + v), dim)


@numba.njit(inline="always")
def _split(unit: Any, index: int) -> int:
    """Number of the split that the unit comes to as its `index`th."""
    return index if index < unit[_SINK_SPLITS] else unit[_FIRST_SPLIT] + index - unit[_SINK_SPLITS]


@numba.njit(error_model="numpy")
def _find_tiles(call: int, small: int, index: int, vector: int, n: int) -> int:
    """Which tiles of a split any of the unit's vectors `vector`, ... attends to, as bits; their addresses go to _TILES."""
    fields = i64_at(call, CALL_FIELDS)
    layer = i64_at(fields[AttentionCall.LAYER], LAYER_FIELDS)
    unit, places = i64_at(small + _UNIT, _UNIT_FIELDS), i64_at(small + _TILES, 4 * TILES)
    group = fields[AttentionCall.HEADS] // fields[AttentionCall.KV_HEADS]
    vectors = fields[AttentionCall.ROWS] * fields[AttentionCall.HEADS]
    query_bytes = fields[AttentionCall.HEAD_DIM] * (QUERY_PLANES if layer[CacheLayer.KV_TYPE] == KvType.INT8 else 4)
    sink_tiles, query = layer[CacheLayer.SINKS] // TILE, unit[_QUERY] + vector
    oldest = unit[_FROM] + vector // group - layer[CacheLayer.WINDOW] + 1
    newest = unit[_FROM] + (vector + n - 1) // group
    seen = 0
    for t in range(TILES):
        tile = _split(unit, index) * TILES + t
        if tile * TILE <= newest and (tile < sink_tiles or (tile + 1) * TILE > oldest):
            seen |= 1 << t
            places[t] = unit[_RING] + TILE * physical_tile(tile, sink_tiles, layer[CacheLayer.CAPACITY] // TILE)
            places[TILES + t] = layer[CacheLayer.VALUE_SCALES] + 4 * places[t]
            sink = tile < sink_tiles and fields[AttentionCall.SINK_ROPE] != 0
            places[2 * TILES + t] = fields[SINK_QUERIES if sink else QUERIES] + query_bytes * query
            places[3 * TILES + t] = fields[QUERY_SCALES] + 4 * query + (8 * vectors if sink else 0)
    return seen


@numba.njit(error_model="numpy")
def _find_bounds(call: int, small: int, index: int, vector: int) -> None:
    """Which rows of a split one vector attends to, for `find_maximum`: low, high, sink tiles."""
    fields = i64_at(call, CALL_FIELDS)
    layer = i64_at(fields[AttentionCall.LAYER], LAYER_FIELDS)
    unit, bounds = i64_at(small + _UNIT, _UNIT_FIELDS), i64_at(small + _BOUNDS, 3)
    split = _split(unit, index)
    p = unit[_FROM] + vector // (fields[AttentionCall.HEADS] // fields[AttentionCall.KV_HEADS]) - split * SPLIT
    bounds[0] = min(max(p - layer[CacheLayer.WINDOW] + 1, 0), SPLIT)
    bounds[1] = min(max(p, -1), SPLIT)
    bounds[2] = layer[CacheLayer.SINKS] // TILE - split * TILES


@numba.njit(error_model="numpy")
def _output(call: int, row: int, head: int, vector: int) -> int:
    """Address of the output of a vector, counted from the row and the first query head of kv head `head`."""
    fields = i64_at(call, CALL_FIELDS)
    heads, group = fields[AttentionCall.HEADS], fields[AttentionCall.HEADS] // fields[AttentionCall.KV_HEADS]
    index = (row + vector // group) * heads + head * group + vector % group
    return fields[AttentionCall.OUT] + 4 * fields[AttentionCall.HEAD_DIM] * index


@numba.njit
def _start(out: int, state: int, dim: int) -> None:
    """Nothing merged yet."""
    clear(out, dim)
    pair = f32_at(state, 2)
    pair[0] = np.float32(LOWEST)
    pair[1] = np.float32(0.0)


# --- merge ---------------------------------------------------------------------------------------------------------


@numba.njit(error_model="numpy")
def _merge_vectors(call: int, small: int, vector: int, n: int) -> None:
    """Merge a split of the unit's vectors `vector`, ... into their outputs."""
    fields = i64_at(call, CALL_FIELDS)
    unit = i64_at(small + _UNIT, _UNIT_FIELDS)
    dim = fields[AttentionCall.HEAD_DIM]
    for k in range(n):
        out = _output(call, unit[_ROW], unit[_HEAD], vector + k)
        state = fields[STATES] + 8 * (unit[_QUERY] + vector + k)
        merge_split(out, state, unit[_OUT] + 4 * dim * k, unit[_STATE] + 8 * k, dim)


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
            out = _output(call, segment[FIRST_ROW] + row, head, g)
            state = fields[STATES] + 8 * ((head * fields[AttentionCall.ROWS] + segment[FIRST_ROW] + row) * group + g)
            part = segment[FIRST_PART] + ((head * segment[ROWS] + row) * group + g) * splits
            _start(out, state, dim)
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
