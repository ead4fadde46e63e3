"""What the phases of attention share: private fields of an `AttentionCall`, records of its segments, small look-ups.

Splits are numbered by position: split i holds the rows of positions i * SPLIT, ... A unit of work is a block of rows of
one segment and one kv head, over all its splits or (where a segment is cut by splits) over one of them.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from edge_llm.kernels.layout import SEGMENT_RECORD_BYTES, SPLIT, AttentionCall, CacheLayer
from edge_llm.kernels.pointers import i64_at

# private fields of the call record
LISTED = AttentionCall.PRIVATE
"""how many segments have rows, and so a record"""
QUERIES = LISTED + 1
"""addresses of the parts of the scratch, see `attention_offsets`"""
QUERY_SCALES = LISTED + 2
"""float32 [vectors], then their corrections, int32 [vectors], for `scores_int8`; then both for the sink queries"""
SINK_QUERIES = LISTED + 3
STATES = LISTED + 4
WORK = LISTED + 5
PARTS = LISTED + 6
"""float32 [parts][head_dim]: outputs of single splits; then at PART_STATES their states, float32 [parts][2]"""
PART_STATES = LISTED + 7
UNITS = LISTED + 8
MERGE_UNITS = LISTED + 9
"""(row, kv head) pairs whose parts are to be merged"""

# the record of a segment
SLOT, FIRST_ROW, ROWS, POSITION, FIRST_UNIT, SPLITS, FIRST_PART, FIRST_MERGE = range(8)
SEGMENT_FIELDS = SEGMENT_RECORD_BYTES // 8
# SPLITS: how many splits are units of their own; 0: a unit walks over all of them

_BLOCK_VECTORS = 48  # query vectors of a block: enough for a split's keys and values to be fetched once for many


@numba.njit(inline="always")
def segment_record(fields: Any, index: int) -> Any:
    """int64 [SEGMENT_FIELDS] of a listed segment."""
    return i64_at(fields[AttentionCall.SEGMENT_RECORDS] + SEGMENT_RECORD_BYTES * index, SEGMENT_FIELDS)


@numba.njit(error_model="numpy")
def find_segment(call_fields: Any, field: int, number: int) -> int:
    """Index of the last listed segment whose `field` is at most `number`."""
    low, high = 0, call_fields[LISTED]
    while high - low > 1:
        middle = (low + high) // 2
        if segment_record(call_fields, middle)[field] <= number:
            low = middle
        else:
            high = middle
    return low


@numba.njit(inline="always")
def block_rows(fields: Any) -> int:
    """Rows of a unit's block."""
    return max(1, _BLOCK_VECTORS * fields[AttentionCall.KV_HEADS] // fields[AttentionCall.HEADS])


@numba.njit(inline="always")
def visited_splits(layer: Any, first: int, last: int) -> Any:
    """What rows of positions `first` .. `last` attend to: splits below (sinks), from, and up to these numbers."""
    begin = max(0, first - layer[CacheLayer.WINDOW] + 1) // SPLIT
    return min(-(-layer[CacheLayer.SINKS] // SPLIT), begin), begin, last // SPLIT


@numba.njit(inline="always")
def real_field(fields: Any, field: int) -> float:
    """A field that holds the bits of a float64."""
    return np.int64(fields[field]).view(np.float64)
