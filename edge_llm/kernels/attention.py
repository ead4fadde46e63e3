"""RingAttention: the rows of a ragged step attend to the ring, any mix of prompt chunks and decode rows.

A call runs in four phases over one `AttentionCall` record: `attention_plan` cuts the work, `attention_prepare` turns each
row's query and writes its key and value, `attention_task` attends, `attention_merge` joins what tasks left in parts. The
rows, tasks or merges of a phase may run in any order on any threads.

Keys are cut into splits at absolute multiples of SPLIT. A query vector (row, head) gets from each split a maximum, a sum and
an output, merged in the order of splits, and only those: whether one task walks over all splits and merges as it goes, or
each split is a task of its own and merges come afterwards, the arithmetic is the same. Nothing here is compiled with
fastmath, because the same function stands in several compiled modules and must give the same bits in all.

The unit of work is a block of rows of one segment and one kv head (and one split, where a segment is cut by splits).
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
from numba import types

from edge_llm.kernels.layout import (
    ATTENTION_MAX_TASKS,
    CALL_FIELDS,
    LAYER_FIELDS,
    SPLIT,
    TILE,
    AttentionCall,
    CacheLayer,
    KvType,
)
from edge_llm.kernels.pointers import f32_at, f64_at, i8_at, i16_at, i32_at, i64_at
from edge_llm.kernels.ring import code_scales, head_rows, is_number, magnitude, physical_tile, round_code, write_row
from edge_llm.kernels.softmax_ir import LOWEST, TILES, finish_output, merge_split, softmax_f32, softmax_int8, sum_of_squares
from edge_llm.kernels.tile_product import (
    BYTE_DOT,
    MAX_VECTORS,
    QUERY_TERMS,
    WEIGHT_TERMS,
    code_limit,
    plane_count,
    scores_f32,
    scores_int8,
    values_f32,
    values_int8,
)

_BLOCK_VECTORS = 48  # query vectors of a block: enough for a split's keys and values to be fetched once for many
_TASKS_A_THREAD = 8  # so that threads end together although blocks of a prompt cost unequally
_LEAST_WORK = 8192  # (query vector, key row) pairs, some microseconds: less is not worth a task
_LEAST_MERGE = 512  # parts, likewise

_LOG2_E = 1.0 / math.log(2.0)
_DONE = -1  # what a plan gives for a call that cannot be run

# private fields of the call record
_SEGMENTS = AttentionCall.PRIVATE  # records of the segments that have rows
_UNITS = _SEGMENTS + 1
_MERGE_ROWS = _SEGMENTS + 2  # (row, kv head) pairs to be merged
_QUERIES = _SEGMENTS + 3  # addresses in the scratch, of AttentionCall's `attention_offsets`
_QUERY_SCALES = _SEGMENTS + 4
_SINK_QUERIES = _SEGMENTS + 5
_STATES = _SEGMENTS + 6
_WORK = _SEGMENTS + 7
_PARTS = _SEGMENTS + 8
_PART_STATES = _SEGMENTS + 9
_TABLE = _SEGMENTS + 10

# a segment's record in the scratch
_RECORD = 8
_SLOT, _FIRST_ROW, _ROWS, _POSITION, _FIRST_UNIT, _SPLITS, _FIRST_PART, _FIRST_MERGE = range(_RECORD)
# _SPLITS: splits that are tasks of their own; 0: a task walks over all of them
