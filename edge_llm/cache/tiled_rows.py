"""TiledRows: the keys and values of one layer, in the layout that the attention kernels read (kernels/layout.py)."""

from __future__ import annotations

import mmap
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from edge_llm.cache.ring_geometry import RingGeometry, runs
from edge_llm.errors import ParameterError
from edge_llm.kernels.layout import LAYER_FIELDS, TILE, CacheLayer, KvType

_TOGETHER = 4  # int8: bytes of one lane that lie side by side, as a dot-product instruction takes them
_GUARD = 64  # bytes after each array that nobody writes


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """Heads of one layer, and how many rows back it looks (None: to the beginning)."""

    kv_heads: int
    head_dim: int
    window: int | None = None

    def row_bytes(self, kv_type: KvType) -> int:
        """Bytes of one row: int8 codes with a float32 scale a head, or float32, for key and value."""
        return 2 * self.kv_heads * (self.head_dim + 4 if kv_type is KvType.INT8 else 4 * self.head_dim)


class TiledRows:
    """Rows of every slot of one layer, in anonymous memory whose untouched pages cost nothing. What nobody wrote is 0.

    Where a position's row lies is its `ring`'s affair, and how many rows of a slot are valid is KVCache's. Tiles are
    named by a bool [capacity / TILE] of physical tiles.
    """

    def __init__(self, layer: LayerGeometry, ring: RingGeometry, *, slots: int, kv_type: KvType) -> None:
        """Raises `ParameterError` if the memory cannot be reserved."""
        self.layer, self.ring, self.kv_type = layer, ring, kv_type
        ends, self._starts = 0, {}
        shapes = {
            field: ((slots, layer.kv_heads, ring.capacity // TILE, *shape), kind)
            for field, (shape, kind) in tile_shapes(layer.head_dim, kv_type).items()
        }
        for field, (shape, kind) in shapes.items():
            self._starts[field] = ends
            ends += _pages(int(np.prod(shape)) * np.dtype(kind).itemsize + _GUARD)
        self.nbytes = ends
        self._memory = _reserve(ends)
        self._bytes = np.frombuffer(self._memory, np.uint8)
        self.arrays: dict[CacheLayer, np.ndarray] = {
            field: np.frombuffer(self._memory, kind, int(np.prod(shape)), self._starts[field]).reshape(shape)
            for field, (shape, kind) in shapes.items()
        }
        """[slots, kv_heads, tiles, then `tile_shapes`]"""

    def reserve(self, slot: int, rows: int) -> None:
        """Make room for the positions [0, rows): there always is."""

    def bytes_of(self, rows: int) -> int:
        """Bytes of the tiles that the positions [0, rows) take at most."""
        return min(-(-rows // TILE) * TILE, self.ring.capacity) * self.layer.row_bytes(self.kv_type)

    def held_bytes(self, _slot: int, tiles: int) -> int:
        """Bytes that a slot takes whose rows lie in so many tiles."""
        return TILE * tiles * self.layer.row_bytes(self.kv_type)

    def tile_shapes(self) -> dict[CacheLayer, tuple[tuple[int, ...], type[np.generic]]]:
        """`tile_shapes` of this layer."""
        return tile_shapes(self.layer.head_dim, self.kv_type)

    def tile_rows(self, array: np.ndarray, field: CacheLayer) -> np.ndarray:
        """`tile_rows` of tiles of this layer."""
        return tile_rows(array, field)

    def copy(self, source: int, target: int, tiles: np.ndarray) -> None:
        """Copy tiles of slot `source` over those of slot `target`."""
        spans = list(runs(tiles))
        for array in self.arrays.values():
            for begin, end in spans:
                array[target, :, begin:end] = array[source, :, begin:end]

    def give_back(self, slot: int, tiles: np.ndarray) -> None:
        """Return tiles to the system. They hold zeros again, so that nothing of one conversation, and no NaN, is there
        for the next: kernels may multiply rows that are not valid by a weight of 0."""
        for field, array in self.arrays.items():
            begin = self._starts[field] + slot * array[0].nbytes
            if tiles.all():  # the heads of a slot follow one another
                self._forget(begin, begin + array[0].nbytes)
                continue
            for head in range(self.layer.kv_heads):
                for first, last in runs(tiles):
                    base, size = begin + head * array[0, 0].nbytes, array[0, 0, 0].nbytes
                    self._forget(base + first * size, base + last * size)

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless ring and memory are sound, and nobody wrote past the end of an array."""
        ring = self.ring
        if ring.capacity % TILE or ring.sinks % TILE or not 0 <= ring.sinks < ring.capacity:
            raise AssertionError(f"{ring} is not made of tiles")
        for field, array in self.arrays.items():
            if array.shape[2] * TILE != ring.capacity:
                raise AssertionError(f"{field.name} has {array.shape[2]} tiles, its ring {ring.capacity} rows")
            end = self._starts[field] + array.nbytes
            if self._bytes[end : _pages(end + _GUARD)].any():
                raise AssertionError(f"somebody wrote past the end of {field.name}")

    def record(self) -> np.ndarray:
        """int64 [LAYER_FIELDS]: what kernels are told of this layer."""
        record = np.zeros(LAYER_FIELDS, np.int64)
        for field, array in self.arrays.items():
            record[field] = array.ctypes.data
        record[CacheLayer.CAPACITY] = self.ring.capacity
        record[CacheLayer.SINKS] = self.ring.sinks
        record[CacheLayer.WINDOW] = self.ring.window
        record[CacheLayer.KV_HEADS] = self.layer.kv_heads
        record[CacheLayer.HEAD_DIM] = self.layer.head_dim
        record[CacheLayer.KV_TYPE] = self.kv_type
        return record

    def _forget(self, begin: int, end: int) -> None:
        """Zeros in bytes [begin, end) of the memory, whose whole pages go back to the system."""
        first = _pages(begin)
        last = end // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last and sys.platform == "linux":  # elsewhere there is no such call, or it may leave what was there
            self._memory.madvise(mmap.MADV_DONTNEED, first, last - first)
            self._clear(begin, first)
            self._clear(last, end)
        else:
            self._clear(begin, end)

    def _clear(self, begin: int, end: int) -> None:
        part = self._bytes[begin:end]
        if part.any():  # a page that is only read takes no memory
            part[:] = 0


def tile_shapes(head_dim: int, kv_type: KvType) -> dict[CacheLayer, tuple[tuple[int, ...], type[np.generic]]]:
    """Shape and type of one tile of each array: KEYS, VALUES and, for int8, their scales."""
    if kv_type is KvType.INT8:
        return {
            CacheLayer.KEYS: ((head_dim // _TOGETHER, TILE, _TOGETHER), np.uint8),
            CacheLayer.VALUES: ((TILE // _TOGETHER, head_dim, _TOGETHER), np.int8),
            CacheLayer.KEY_SCALES: ((TILE,), np.float32),
            CacheLayer.VALUE_SCALES: ((TILE,), np.float32),
        }
    return {CacheLayer.KEYS: ((head_dim, TILE), np.float32), CacheLayer.VALUES: ((TILE, head_dim), np.float32)}


def tile_rows(array: np.ndarray, field: CacheLayer) -> np.ndarray:
    """A view [4, TILE / 4, ...] of one or more tiles [..., then `tile_shapes`]: row r of a tile is [r // 16, r % 16]."""
    if field is CacheLayer.VALUES and array.dtype == np.int8:
        return np.moveaxis(array, (-1, -3), (0, 1))
    axis = {CacheLayer.KEYS: -2 if array.dtype == np.uint8 else -1, CacheLayer.VALUES: -2}.get(field, -1)
    rows = np.moveaxis(array, axis, 0)
    return rows.reshape(_TOGETHER, TILE // _TOGETHER, *rows.shape[1:])


def _pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _reserve(nbytes: int) -> Any:
    """Private anonymous memory: shared pages would stay with the system when they are given back."""
    try:
        if hasattr(mmap, "MAP_PRIVATE"):
            return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return mmap.mmap(-1, nbytes)
    except (OSError, OverflowError, ValueError):
        raise ParameterError(
            f"{nbytes / 2**30:.1f} GiB for the keys and values of one layer cannot be reserved",
            hint="lower the context or the slots",
        ) from None
