"""A unit of attention's work: a block of rows of one segment, one kv head, and the splits that it walks over.

The unit's record, and the addresses of the tiles that are next, lie in the working memory of the task that runs it.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from edge_llm.kernels.attention_call import (
    FIRST_PART,
    FIRST_ROW,
    FIRST_UNIT,
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
    block_rows,
    find_segment,
    segment_record,
    visited_splits,
)
from edge_llm.kernels.attention_prepare import QUERY_PLANES
from edge_llm.kernels.layout import CALL_FIELDS, LAYER_FIELDS, SPLIT, TILE, AttentionCall, CacheLayer, KvType
from edge_llm.kernels.pointers import f32_at, i64_at
from edge_llm.kernels.ring import clear, head_rows, physical_tile
from edge_llm.kernels.softmax_ir import LOWEST, TILES, merge_split
from edge_llm.kernels.tile_product import MAX_VECTORS

# a task's working memory: scores float32 [MAX_VECTORS][SPLIT], then
CODES = 4 * SPLIT * MAX_VECTORS
"""planes of MAX_VECTORS vectors of weights"""
OUTPUTS = CODES + 2 * SPLIT * MAX_VECTORS
"""float32 [MAX_VECTORS][head_dim]; the records follow it:"""
WEIGHT_SCALES = 0
"""float32 [TILES][MAX_VECTORS]"""
SPLIT_STATES = 64
"""float32 [MAX_VECTORS][2]"""
TILE_ROWS = 96
"""int64 [TILES], each: the tile's first row in the ring; addresses of its value scales, of the queries, of their scales"""
TILE_VALUE_SCALES = TILE_ROWS + 8 * TILES
TILE_QUERIES = TILE_VALUE_SCALES + 8 * TILES
TILE_QUERY_SCALES = TILE_QUERIES + 8 * TILES
BOUNDS = TILE_QUERY_SCALES + 8 * TILES
"""int64 [3], see `find_bounds`"""
UNIT = 256
"""int64 [UNIT_FIELDS]"""

UNIT_FIELDS = 14
ROW, FROM, HEAD, VECTORS, QUERY, RING, SINK_SPLITS, FIRST_SPLIT, SPLIT_COUNT = range(9)
"""first row in the step, its position, kv head, query vectors, index of the first; rows before this head's in the ring;
splits of sinks that come first, then the number of the next, and how many there are in all"""
OUT, OUT_STRIDE, STATE, STATE_STRIDE, MERGES = range(9, 14)
"""where outputs and states of a split go, bytes between vectors; MERGES 1: to working memory, and are merged at once"""


@numba.njit(error_model="numpy")
def locate_unit(call: int, records: int, number: int) -> None:
    """Fill the record of unit `number`, and clear the outputs that it merges into."""
    fields = i64_at(call, CALL_FIELDS)
    layer = i64_at(fields[AttentionCall.LAYER], LAYER_FIELDS)
    unit = i64_at(records + UNIT, UNIT_FIELDS)
    kv_heads, dim = fields[AttentionCall.KV_HEADS], fields[AttentionCall.HEAD_DIM]
    group = fields[AttentionCall.HEADS] // kv_heads
    segment = segment_record(fields, find_segment(fields, FIRST_UNIT, number))
    block, splits, part = number - segment[FIRST_UNIT], segment[SPLITS], 0
    if splits > 0:
        part = block % splits
        block //= splits
    head, first = block % kv_heads, block // kv_heads * block_rows(fields)
    rows = min(block_rows(fields), segment[ROWS] - first)
    unit[HEAD] = head
    unit[ROW] = segment[FIRST_ROW] + first
    unit[FROM] = segment[POSITION] + first
    unit[VECTORS] = rows * group
    unit[QUERY] = (head * fields[AttentionCall.ROWS] + unit[ROW]) * group
    unit[RING] = head_rows(layer, segment[SLOT], head)
    if splits > 0:
        sinks, begin, _ = visited_splits(layer, segment[POSITION], segment[POSITION])
        index = segment[FIRST_PART] + (head * segment[ROWS] + first) * group * splits + part
        unit[SINK_SPLITS] = 0
        unit[FIRST_SPLIT] = part if part < sinks else begin + part - sinks
        unit[SPLIT_COUNT] = 1
        unit[OUT] = fields[PARTS] + 4 * dim * index
        unit[OUT_STRIDE] = 4 * dim * splits
        unit[STATE] = fields[PART_STATES] + 8 * index
        unit[STATE_STRIDE] = 8 * splits
        unit[MERGES] = 0
        return
    sinks, begin, last = visited_splits(layer, unit[FROM], unit[FROM] + rows - 1)
    unit[SINK_SPLITS] = sinks
    unit[FIRST_SPLIT] = begin
    unit[SPLIT_COUNT] = sinks + last - begin + 1
    unit[OUT] = records - 4 * dim * MAX_VECTORS
    unit[OUT_STRIDE] = 4 * dim
    unit[STATE] = records + SPLIT_STATES
    unit[STATE_STRIDE] = 8
    unit[MERGES] = 1
    for v in range(unit[VECTORS]):
        start_output(output_address(call, unit[ROW], head, v), fields[STATES] + 8 * (unit[QUERY] + v), dim)


@numba.njit(inline="always")
def _split(unit: Any, index: int) -> int:
    """Number of the split that the unit comes to as its `index`th."""
    return index if index < unit[SINK_SPLITS] else unit[FIRST_SPLIT] + index - unit[SINK_SPLITS]


@numba.njit(error_model="numpy")
def find_tiles(call: int, records: int, index: int, vector: int, n: int) -> int:
    """The tiles of a split that any of the vectors `vector` .. `vector + n - 1` attends to, as bits; fills their records."""
    fields = i64_at(call, CALL_FIELDS)
    layer = i64_at(fields[AttentionCall.LAYER], LAYER_FIELDS)
    unit = i64_at(records + UNIT, UNIT_FIELDS)
    tiles = i64_at(records + TILE_ROWS, 4 * TILES)
    group = fields[AttentionCall.HEADS] // fields[AttentionCall.KV_HEADS]
    vectors = fields[AttentionCall.ROWS] * fields[AttentionCall.HEADS]
    query_bytes = fields[AttentionCall.HEAD_DIM] * (QUERY_PLANES if layer[CacheLayer.KV_TYPE] == KvType.INT8 else 4)
    sink_tiles, query = layer[CacheLayer.SINKS] // TILE, unit[QUERY] + vector
    oldest = unit[FROM] + vector // group - layer[CacheLayer.WINDOW] + 1
    newest = unit[FROM] + (vector + n - 1) // group
    seen = 0
    for t in range(TILES):
        tile = _split(unit, index) * TILES + t
        if tile * TILE <= newest and (tile < sink_tiles or (tile + 1) * TILE > oldest):
            seen |= 1 << t
            row = unit[RING] + TILE * physical_tile(tile, sink_tiles, layer[CacheLayer.CAPACITY] // TILE)
            turned = tile < sink_tiles and fields[AttentionCall.SINK_ROPE] != 0
            tiles[t] = row
            tiles[TILES + t] = layer[CacheLayer.VALUE_SCALES] + 4 * row
            tiles[2 * TILES + t] = fields[SINK_QUERIES if turned else QUERIES] + query_bytes * query
            tiles[3 * TILES + t] = fields[QUERY_SCALES] + 4 * query + (8 * vectors if turned else 0)
    return seen


@numba.njit(error_model="numpy")
def find_bounds(call: int, records: int, index: int, vector: int) -> None:
    """What one vector attends to in a split, as `find_maximum` takes it: low, high, sink tiles."""
    fields = i64_at(call, CALL_FIELDS)
    layer = i64_at(fields[AttentionCall.LAYER], LAYER_FIELDS)
    unit, bounds = i64_at(records + UNIT, UNIT_FIELDS), i64_at(records + BOUNDS, 3)
    split = _split(unit, index)
    row = unit[FROM] + vector // (fields[AttentionCall.HEADS] // fields[AttentionCall.KV_HEADS]) - split * SPLIT
    bounds[0] = min(max(row - layer[CacheLayer.WINDOW] + 1, 0), SPLIT)
    bounds[1] = min(max(row, -1), SPLIT)
    bounds[2] = layer[CacheLayer.SINKS] // TILE - split * TILES


@numba.njit(error_model="numpy")
def merge_vectors(call: int, records: int, vector: int, n: int) -> None:
    """Merge a split's outputs of the unit's vectors `vector`, ... into theirs."""
    fields = i64_at(call, CALL_FIELDS)
    unit = i64_at(records + UNIT, UNIT_FIELDS)
    dim = fields[AttentionCall.HEAD_DIM]
    for k in range(n):
        out = output_address(call, unit[ROW], unit[HEAD], vector + k)
        state = fields[STATES] + 8 * (unit[QUERY] + vector + k)
        merge_split(out, state, unit[OUT] + 4 * dim * k, unit[STATE] + 8 * k, dim)


@numba.njit(error_model="numpy")
def output_address(call: int, row: int, head: int, vector: int) -> int:
    """Where the output of a vector goes, counted from a row and the first query head of kv head `head`."""
    fields = i64_at(call, CALL_FIELDS)
    heads, group = fields[AttentionCall.HEADS], fields[AttentionCall.HEADS] // fields[AttentionCall.KV_HEADS]
    index = (row + vector // group) * heads + head * group + vector % group
    return fields[AttentionCall.OUT] + 4 * fields[AttentionCall.HEAD_DIM] * index


@numba.njit
def start_output(out: int, state: int, dim: int) -> None:
    """An output that nothing was merged into yet."""
    clear(out, dim)
    pair = f32_at(state, 2)
    pair[0] = np.float32(LOWEST)
    pair[1] = np.float32(0.0)
