"""The ring: where a position's row lies, and how keys and values are written there.

Storage is described at `layout.CacheLayer`. Position, physical row, capacity and length are different numbers: a position
tile is mapped as a whole to a physical tile, so the row of position p is the tile's first row + p mod TILE.

A row that holds inf or NaN would make garbage of every later sum. It is written as a key of NaN and a value of zeros: whoever
attends to it gets NaN, and whoever is masked from it gets nothing, since masks never multiply what they hide by 0.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from edge_llm.kernels.layout import TILE, CacheLayer, KvType
from edge_llm.kernels.pointers import f32_at, i8_at, i32_at, u8_at

_INFINITY_BITS = 0x7F800000
_MAGNITUDE_BITS = 0x7FFFFFFF
_LEAST = np.float32(1e-30)  # rows that are all below it are stored as zeros: their inverse scale would overflow
ROUND = np.float32(
    12582912.0
)  # 1.5 * 2^23: added to a float32 below 2^22 it leaves the nearest integer in the low bits
ROUND_BITS = np.int32(0x4B400000)


@numba.njit(inline="always")
def physical_tile(tile: int, sink_tiles: int, tiles: int) -> int:
    """Physical tile that holds position tile `tile` in a ring of `tiles`, the first `sink_tiles` of which never move."""
    if tile < sink_tiles:
        return tile
    return sink_tiles + (tile - sink_tiles) % (tiles - sink_tiles)


@numba.njit(inline="always")
def head_rows(layer: Any, slot: int, head: int) -> int:
    """Number of rows that lie before those of (slot, kv head)."""
    return (slot * layer[CacheLayer.KV_HEADS] + head) * layer[CacheLayer.CAPACITY]


@numba.njit(inline="always")
def round_code(value: float) -> int:
    """A float32 below 2^22 rounded to the nearest integer, to even; no call, and no poison for NaN."""
    return np.int32(np.float32(value + ROUND).view(np.int32) - ROUND_BITS)


@numba.njit(inline="always")
def _float_of(bits: int) -> float:
    return np.int32(bits).view(np.float32)


@numba.njit
def magnitude(address: int, dim: int) -> float:
    """Greatest |x| of float32 [dim]; inf or NaN if any element is one (compared as bits, so that NaN counts)."""
    bits = i32_at(address, dim)
    most = np.int32(0)
    for d in range(dim):
        most = max(most, np.int32(bits[d] & _MAGNITUDE_BITS))
    return _float_of(most)


@numba.njit(inline="always")
def is_number(size: float) -> bool:
    """Whether a `magnitude` is finite."""
    return np.float32(size).view(np.int32) < np.int32(_INFINITY_BITS)


@numba.njit(inline="always")
def code_scales(size: float, limit: int) -> Any:
    """(codes a unit, units a code) for rows of that `magnitude` and codes up to `limit`."""
    if size < _LEAST:
        return np.float32(0.0), np.float32(0.0)
    return np.float32(limit) / size, size / np.float32(limit)


@numba.njit
def write_row(layer: Any, slot: int, head: int, position: int, key: int, value: int) -> None:
    """Write float32 [head_dim] at the addresses `key` (after rotary) and `value` as the row of `position`."""
    dim, capacity, sinks = layer[CacheLayer.HEAD_DIM], layer[CacheLayer.CAPACITY], layer[CacheLayer.SINKS]
    before = head_rows(layer, slot, head)
    tile_row = TILE * physical_tile(position // TILE, sinks // TILE, capacity // TILE)
    row = position % TILE
    key_size, value_size = magnitude(key, dim), magnitude(value, dim)
    sound = is_number(key_size) and is_number(value_size)
    if layer[CacheLayer.KV_TYPE] == KvType.INT8:
        place = before + tile_row
        key_scales = f32_at(layer[CacheLayer.KEY_SCALES] + 4 * place, TILE)
        value_scales = f32_at(layer[CacheLayer.VALUE_SCALES] + 4 * place, TILE)
        key_scales[row] = _write_key_int8(layer[CacheLayer.KEYS] + place * dim, row, dim, key, key_size, sound)
        value_scales[row] = _write_value_int8(
            layer[CacheLayer.VALUES] + place * dim, row, dim, value, value_size, sound
        )
    else:
        place = 4 * (before + tile_row) * dim
        _write_f32(layer[CacheLayer.KEYS] + place, row, TILE, key, dim, sound, np.float32(np.nan))
        _write_f32(layer[CacheLayer.VALUES] + place, row * dim, 1, value, dim, sound, np.float32(0.0))


@numba.njit
def _write_key_int8(tile: int, row: int, dim: int, source: int, size: float, sound: bool) -> float:
    """Codes + 128 into uint8 [dim / 4][TILE][4]; what a code is worth."""
    inverse, scale = code_scales(size, 127)
    x = f32_at(source, dim)
    out = u8_at(tile + 4 * row, (dim - 1) * TILE + 4)
    for d in range(dim):
        out[(d // 4) * (4 * TILE) + d % 4] = np.uint8(round_code(x[d] * inverse) + 128)
    return scale if sound else np.float32(np.nan)


@numba.njit
def _write_value_int8(tile: int, row: int, dim: int, source: int, size: float, sound: bool) -> float:
    """Codes into int8 [TILE / 4][dim][4], rows r, r + 16, ... side by side; what a code is worth."""
    inverse, scale = code_scales(size, 127)
    x = f32_at(source, dim)
    out = i8_at(tile + row % (TILE // 4) * (4 * dim) + row // (TILE // 4), 4 * dim - 3)
    for d in range(dim):
        out[4 * d] = np.int8(round_code(x[d] * inverse))
    return scale if sound else np.float32(0.0)


@numba.njit
def _write_f32(tile: int, first: int, step: int, source: int, dim: int, sound: bool, instead: float) -> None:
    x = f32_at(source, dim)
    out = f32_at(tile + 4 * first, step * (dim - 1) + 1)
    for d in range(dim):
        out[d * step] = x[d] if sound else instead
