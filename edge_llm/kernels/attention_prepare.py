"""The second phase of attention, by rows and their heads: norm and turn query and key, keep the query, write key and value."""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np

from edge_llm.kernels.attention_call import (
    FIRST_ROW,
    POSITION,
    QUERIES,
    QUERY_SCALES,
    SINK_QUERIES,
    SLOT,
    find_segment,
    real_field,
    segment_record,
)
from edge_llm.kernels.layout import CALL_FIELDS, LAYER_FIELDS, AttentionCall, CacheLayer, KvType
from edge_llm.kernels.pointers import f32_at, i32_at, i64_at
from edge_llm.kernels.ring import code_scales, write_row
from edge_llm.kernels.row_ir import magnitude, quantise_query, store_floats, sum_of_squares
from edge_llm.kernels.tile_product import QUERY_TERMS, code_limit, plane_count

LOG2_E = 1.0 / math.log(2.0)
QUERY_PLANES = plane_count(QUERY_TERMS)
_QUERY_LIMIT = code_limit(QUERY_TERMS)


@numba.njit(error_model="numpy")
def attention_prepare(call: int, item: int) -> None:
    """Norm and turn a row's queries and key of one kv head; queries go to the scratch, key and value to the ring.

    `item` is row * kv_heads + kv head.
    """
    fields = i64_at(call, CALL_FIELDS)
    layer = i64_at(fields[AttentionCall.LAYER], LAYER_FIELDS)
    heads, kv_heads, dim = fields[AttentionCall.HEADS], fields[AttentionCall.KV_HEADS], fields[AttentionCall.HEAD_DIM]
    row, kv_head, group = item // kv_heads, item % kv_heads, heads // kv_heads
    record = segment_record(fields, find_segment(fields, FIRST_ROW, row))
    position = record[POSITION] + row - record[FIRST_ROW]
    source = fields[AttentionCall.QKV] + 4 * dim * row * (heads + 2 * kv_heads)
    turned = fields[AttentionCall.OUT] + 4 * dim * (row * heads + kv_head * group)  # free until the tasks run
    step = 4 * fields[AttentionCall.ROTARY_DIM] * row
    rope = fields[AttentionCall.ROPE] + step if fields[AttentionCall.ROPE] != 0 else 0
    for head in range(kv_head * group, kv_head * group + group):
        vector = (kv_head * fields[AttentionCall.ROWS] + row) * group + head % group
        _turn(fields, source + 4 * dim * head, fields[AttentionCall.Q_NORM], rope, turned)
        _store_query(fields, layer, turned, fields[QUERIES], fields[QUERY_SCALES], vector)
        if fields[AttentionCall.SINK_ROPE] != 0:
            sink_rope = fields[AttentionCall.SINK_ROPE] + step
            _turn(fields, source + 4 * dim * head, fields[AttentionCall.Q_NORM], sink_rope, turned)
            sink_scales = fields[QUERY_SCALES] + 8 * heads * fields[AttentionCall.ROWS]
            _store_query(fields, layer, turned, fields[SINK_QUERIES], sink_scales, vector)
    key = source + 4 * dim * (heads + kv_head)
    _turn(fields, key, fields[AttentionCall.K_NORM], rope, turned)
    write_row(layer, record[SLOT], kv_head, position, turned, key + 4 * dim * kv_heads)


@numba.njit(error_model="numpy")
def _turn(fields: Any, source: int, gamma: int, rope: int, target: int) -> None:
    """target = float32 [head_dim] at `source`, RMS-normed if `gamma` is an address, turned if `rope` is one."""
    dim, rotary_dim = fields[AttentionCall.HEAD_DIM], fields[AttentionCall.ROTARY_DIM]
    x, out = f32_at(source, dim), f32_at(target, dim)
    for d in range(dim):
        out[d] = x[d]
    if gamma != 0:
        weights = f32_at(gamma, dim)
        mean = sum_of_squares(source, dim) / dim
        factor = np.float32(1.0 / math.sqrt(mean + real_field(fields, AttentionCall.EPS)))
        for d in range(dim):
            out[d] = x[d] * factor * weights[d]
    if rope != 0:
        half = rotary_dim // 2
        table = f32_at(rope, rotary_dim)
        for d in range(half):
            a, b = out[d], out[d + half]
            cosine, sine = table[d], table[d + half]
            out[d] = a * cosine - b * sine
            out[d + half] = b * cosine + a * sine


@numba.njit(inline="always")
def _query_factor(fields: Any) -> Any:
    """float32 that makes the scores what `softmax_ir` takes: units of log2, or those of its soft cap."""
    softcap = real_field(fields, AttentionCall.SOFTCAP)
    factor = real_field(fields, AttentionCall.SCALE) * LOG2_E
    return np.float32(factor * 2.0 / softcap) if softcap > 0.0 else np.float32(factor)


@numba.njit(error_model="numpy")
def _store_query(fields: Any, layer: Any, source: int, queries: int, scales: int, vector: int) -> None:
    """Keep float32 [head_dim] as query `vector`: codes, scale and correction, or floats. NaN if it is not finite."""
    dim = fields[AttentionCall.HEAD_DIM]
    size = magnitude(source, dim)
    factor = _query_factor(fields) if size < np.inf else np.float32(np.nan)
    if layer[CacheLayer.KV_TYPE] == KvType.F32:
        store_floats(source, dim, factor, queries + 4 * dim * vector, 4)
        return
    inverse, scale = code_scales(size, _QUERY_LIMIT)
    total = quantise_query(source, dim, inverse, queries + QUERY_PLANES * dim * vector)
    vectors = fields[AttentionCall.ROWS] * fields[AttentionCall.HEADS]
    f32_at(scales + 4 * vector, 1)[0] = scale * factor
    i32_at(scales + 4 * (vectors + vector), 1)[0] = -128 * total
