"""The ring: where a position's row lies, and how a key and a value are written there.

Storage is described at `layout.CacheLayer`. Position, physical row and capacity are different numbers: a tile of
positions is mapped as a whole to a physical tile, and a position keeps its place in the tile.

A key or value that is not finite would make garbage of other rows' sums. Its row is stored as a key of NaN and a value
of zeros: who attends to it gets NaN, and who does not gets nothing, for a mask hides scores, never values.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from edge_llm.kernels.layout import TILE, CacheLayer, KvType
from edge_llm.kernels.pointers import f32_at
from edge_llm.kernels.row_ir import magnitude, store_floats, store_key_codes, store_value_codes

_LIMIT = 127  # codes of keys and values
_LEAST = np.float32(1e-30)  # vectors that are all below it count as zeros: their inverse scale would overflow


@numba.njit(inline="always")
def physical_tile(tile: int, sink_tiles: int, tiles: int) -> int:
    """Physical tile that holds position tile `tile` in a ring of `tiles`, whose first `sink_tiles` never move."""
    if tile < sink_tiles:
        return tile
    return sink_tiles + (tile - sink_tiles) % (tiles - sink_tiles)


@numba.njit(inline="always")
def head_rows(layer: Any, slot: int, head: int) -> int:
    """Number of rows that lie before those of (slot, kv head)."""
    return (slot * layer[CacheLayer.KV_HEADS] + head) * layer[CacheLayer.CAPACITY]


@numba.njit(inline="always")
def code_scales(size: float, limit: int) -> Any:
    """(codes a unit, units a code) for a vector of that `magnitude` and codes up to `limit`."""
    if size < _LEAST:
        return np.float32(0.0), np.float32(0.0)
    return np.float32(limit) / size, size / np.float32(limit)


@numba.njit(error_model="numpy")
def write_row(layer: Any, slot: int, head: int, position: int, key: int, value: int) -> None:
    """Write float32 [head_dim] at the addresses `key` (after rotary) and `value` as the row of `position`."""
    dim, sinks = layer[CacheLayer.HEAD_DIM], layer[CacheLayer.SINKS]
    tile = physical_tile(position // TILE, sinks // TILE, layer[CacheLayer.CAPACITY] // TILE)
    place, row = head_rows(layer, slot, head) + TILE * tile, position % TILE
    key_size, value_size = magnitude(key, dim), magnitude(value, dim)
    sound = key_size < np.inf and value_size < np.inf
    keys, values = layer[CacheLayer.KEYS], layer[CacheLayer.VALUES]
    if layer[CacheLayer.KV_TYPE] == KvType.INT8:
        key_inverse, key_scale = code_scales(key_size, _LIMIT)
        value_inverse, value_scale = code_scales(value_size, _LIMIT)
        store_key_codes(key, dim, key_inverse, keys + place * dim + 4 * row)
        quarter = TILE // 4
        store_value_codes(value, dim, value_inverse, values + place * dim + 4 * dim * (row % quarter) + row // quarter)
        f32_at(layer[CacheLayer.KEY_SCALES] + 4 * (place + row), 1)[0] = key_scale if sound else np.float32(np.nan)
        f32_at(layer[CacheLayer.VALUE_SCALES] + 4 * (place + row), 1)[0] = value_scale if sound else np.float32(0.0)
        return
    one = np.float32(1.0)
    store_floats(key, dim, one if sound else np.float32(np.nan), keys + 4 * (place * dim + row), 4 * TILE)
    store_floats(value, dim, one, values + 4 * (place + row) * dim, 4)
    if not sound:
        clear(values + 4 * (place + row) * dim, dim)


@numba.njit
def clear(address: int, count: int) -> None:
    """float32 [count] of zeros."""
    values = f32_at(address, count)
    for i in range(count):
        values[i] = np.float32(0.0)
