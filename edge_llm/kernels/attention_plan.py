"""The first phase of attention: check a ragged step and cut it into tasks."""

from __future__ import annotations

from typing import Any

import numba

from edge_llm.kernels.attention_call import (
    FIRST_MERGE,
    FIRST_PART,
    FIRST_ROW,
    FIRST_UNIT,
    LISTED,
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
    segment_record,
    visited_splits,
)
from edge_llm.kernels.layout import (
    ATTENTION_MAX_TASKS,
    CALL_FIELDS,
    LAYER_FIELDS,
    TILE,
    AttentionCall,
    CacheLayer,
    KvType,
    attention_offsets,
    attention_task_bytes,
)
from edge_llm.kernels.pointers import i32_at, i64_at
from edge_llm.kernels.tile_product import DIM_STEP

_TASKS_A_THREAD = 8  # so that threads end together although blocks of a prompt cost unequally
_LEAST_WORK = 512  # (query vector, key row) pairs, some microseconds: less is not worth another thread
_LEAST_PARTS = 1024  # parts to be merged, likewise

_offsets = numba.njit(attention_offsets)
task_bytes = numba.njit(attention_task_bytes)


@numba.njit(error_model="numpy")
def attention_plan(call: int) -> int:
    """Cut the step of the `AttentionCall` at address `call` into TASKS and MERGES.

    Gives the number of tasks (1 if more are not worth their cost), or -1 if rows, segments, sizes, ring and scratch do
    not fit together: then nothing may be run.
    """
    fields = i64_at(call, CALL_FIELDS)
    layer = i64_at(fields[AttentionCall.LAYER], LAYER_FIELDS)
    fields[AttentionCall.TASKS] = 0
    fields[AttentionCall.MERGES] = 0
    if not _sizes_are_sound(fields, layer):
        return -1
    _place_scratch(fields)
    work = _list_segments(fields, layer)
    if work < 0:
        return -1
    threads = max(1, fields[AttentionCall.THREADS]) if work >= _LEAST_WORK else 1
    _cut_units(fields, layer, threads)
    tasks = min(fields[UNITS], ATTENTION_MAX_TASKS, _TASKS_A_THREAD * threads if threads > 1 else 1)
    fields[AttentionCall.TASKS] = tasks
    return tasks


@numba.njit(error_model="numpy")
def _sizes_are_sound(fields: Any, layer: Any) -> bool:
    rows, heads, kv_heads = fields[AttentionCall.ROWS], fields[AttentionCall.HEADS], fields[AttentionCall.KV_HEADS]
    dim, rotary_dim = fields[AttentionCall.HEAD_DIM], fields[AttentionCall.ROTARY_DIM]
    capacity, sinks = layer[CacheLayer.CAPACITY], layer[CacheLayer.SINKS]
    if rows < 0 or heads < 1 or kv_heads < 1 or heads % kv_heads != 0 or dim < DIM_STEP or dim % DIM_STEP != 0:
        return False
    if kv_heads != layer[CacheLayer.KV_HEADS] or dim != layer[CacheLayer.HEAD_DIM] or layer[CacheLayer.WINDOW] < 1:
        return False
    if rotary_dim < 0 or rotary_dim > dim or rotary_dim % 2 != 0:
        return False
    if sinks < 0 or sinks >= capacity or sinks % TILE != 0 or capacity % TILE != 0:
        return False
    if layer[CacheLayer.KV_TYPE] != KvType.INT8 and layer[CacheLayer.KV_TYPE] != KvType.F32:
        return False
    needed = _offsets(rows, heads, dim)[4] + ATTENTION_MAX_TASKS * task_bytes(dim)
    return needed <= fields[AttentionCall.SCRATCH_BYTES]


@numba.njit(error_model="numpy")
def _place_scratch(fields: Any) -> None:
    scratch = fields[AttentionCall.SCRATCH]
    dim = fields[AttentionCall.HEAD_DIM]
    queries, scales, sinks, states, work = _offsets(fields[AttentionCall.ROWS], fields[AttentionCall.HEADS], dim)
    fields[QUERIES] = scratch + queries
    fields[QUERY_SCALES] = scratch + scales
    fields[SINK_QUERIES] = scratch + sinks
    fields[STATES] = scratch + states
    fields[WORK] = scratch + work
    fields[PARTS] = fields[WORK] + ATTENTION_MAX_TASKS * task_bytes(dim)


@numba.njit(error_model="numpy")
def _list_segments(fields: Any, layer: Any) -> int:
    """Fill the records of the segments that have rows; the step's (query vector, key row) pairs, or -1 for bad ones."""
    count = fields[AttentionCall.SEGMENT_COUNT]
    segments = i32_at(fields[AttentionCall.SEGMENTS], 4 * count)
    ring_rows, sinks = layer[CacheLayer.CAPACITY] - layer[CacheLayer.SINKS], layer[CacheLayer.SINKS]
    listed, row, work = 0, 0, 0
    for i in range(count):
        slot, first, rows, position = segments[4 * i], segments[4 * i + 1], segments[4 * i + 2], segments[4 * i + 3]
        if slot < 0 or first != row or rows < 0 or position < 0 or row + rows > fields[AttentionCall.ROWS]:
            return -1
        oldest = max(sinks, position - layer[CacheLayer.WINDOW] + 1)
        if position + rows - oldest > ring_rows:
            return -1  # the ring cannot hold what these rows attend to
        if rows > 0:
            record = segment_record(fields, listed)
            record[SLOT] = slot
            record[FIRST_ROW] = first
            record[ROWS] = rows
            record[POSITION] = position
            work += rows * (position + rows - max(0, oldest - sinks)) * fields[AttentionCall.HEADS]
            listed += 1
        row += rows
    fields[LISTED] = listed
    return work if row == fields[AttentionCall.ROWS] else -1


@numba.njit(error_model="numpy")
def _cut_units(fields: Any, layer: Any, threads: int) -> None:
    """Number the units: by splits too where blocks alone would leave threads idle and there is room for the parts."""
    kv_heads, dim = fields[AttentionCall.KV_HEADS], fields[AttentionCall.HEAD_DIM]
    room = (fields[AttentionCall.SCRATCH] + fields[AttentionCall.SCRATCH_BYTES] - fields[PARTS]) // (4 * dim + 8)
    at_once = block_rows(fields)
    blocks = 0
    for s in range(fields[LISTED]):
        blocks += -(-segment_record(fields, s)[ROWS] // at_once)
    by_splits = threads > 1 and blocks * kv_heads < 4 * threads
    units, parts, merges = 0, 0, 0
    for s in range(fields[LISTED]):
        record = segment_record(fields, s)
        rows = record[ROWS]
        record[FIRST_UNIT] = units
        record[FIRST_PART] = parts
        record[FIRST_MERGE] = merges
        sinks, first, last = visited_splits(layer, record[POSITION], record[POSITION] + rows - 1)
        splits = sinks + last - first + 1
        own_parts = rows * fields[AttentionCall.HEADS] * splits
        if not by_splits or splits == 1 or parts + own_parts > room:
            record[SPLITS] = 0
            units += -(-rows // at_once) * kv_heads
        else:
            record[SPLITS] = splits
            units += -(-rows // at_once) * kv_heads * splits
            parts += own_parts
            merges += rows * kv_heads
    fields[UNITS] = units
    fields[PART_STATES] = fields[PARTS] + 4 * dim * parts
    fields[MERGE_UNITS] = merges
    fields[AttentionCall.MERGES] = min(merges, _TASKS_A_THREAD * threads if parts >= _LEAST_PARTS else 1)
