"""TiledRows: the keys and values of one layer, in the layout that the attention kernels read (kernels/layout.py)."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np

from edge_llm.cache.ring_geometry import RingGeometry, runs
from edge_llm.errors import ParameterError
from edge_llm.kernels.layout import LAYER_FIELDS, TILE, CacheLayer, KvType

_TOGETHER = 4  # int8: bytes of one lane that lie side by side, as a dot-product instruction takes them


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

    Where a position's row lies is its `ring`'s affair, and how many rows of a slot are valid is KVCache's.
    """

    def __init__(self, layer: LayerGeometry, ring: RingGeometry, *, slots: int, kv_type: KvType) -> None:
        """Raises `ParameterError` if the memory cannot be reserved."""
        capacity = ring.capacity
        heads, head_dim, tiles = layer.kv_heads, layer.head_dim, capacity // TILE
        self.layer, self.ring, self.kv_type = layer, ring, kv_type
        shapes: dict[CacheLayer, tuple[tuple[int, ...], type[np.generic]]]
        if kv_type is KvType.INT8:
            shapes = {
                CacheLayer.KEYS: ((slots, heads, tiles, head_dim // _TOGETHER, TILE, _TOGETHER), np.uint8),
                CacheLayer.VALUES: ((slots, heads, capacity // _TOGETHER, head_dim, _TOGETHER), np.int8),
                CacheLayer.KEY_SCALES: ((slots, heads, capacity), np.float32),
                CacheLayer.VALUE_SCALES: ((slots, heads, capacity), np.float32),
            }
        else:
            shapes = {
                CacheLayer.KEYS: ((slots, heads, tiles, head_dim, TILE), np.float32),
                CacheLayer.VALUES: ((slots, heads, capacity, head_dim), np.float32),
            }
        sizes = {field: int(np.prod(shape)) * np.dtype(kind).itemsize for field, (shape, kind) in shapes.items()}
        starts, end = {}, 0
        for field, size in sizes.items():
            starts[field] = end
            end += -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self.nbytes = end
        self._memory = _reserve(end)
        self._bytes = np.frombuffer(self._memory, np.uint8)
        self._starts = starts
        self.arrays: dict[CacheLayer, np.ndarray] = {
            field: np.frombuffer(self._memory, kind, int(np.prod(shape)), starts[field]).reshape(shape)
            for field, (shape, kind) in shapes.items()
        }
        """KEYS, VALUES and, for int8, KEY_SCALES and VALUE_SCALES, shaped as layout.py says"""

    def copy(self, source: int, target: int, tiles: np.ndarray) -> None:
        """Copy physical tiles (bool [capacity / TILE]) of slot `source` over those of slot `target`."""
        for array in self.arrays.values():
            by_tile = array.reshape(*array.shape[:2], len(tiles), -1)
            for begin, end in runs(tiles):
                by_tile[target, :, begin:end] = by_tile[source, :, begin:end]

    def give_back(self, slot: int, tiles: np.ndarray) -> None:
        """Return physical tiles (bool [capacity / TILE]) to the system. They hold zeros again, so that nothing of one
        conversation, and no NaN, is there for the next: kernels may multiply rows that are not valid by a weight of 0."""
        for field, array in self.arrays.items():
            heads, size = self.layer.kv_heads, array[0].nbytes
            begin = self._starts[field] + slot * size
            if tiles.all():
                self._forget(begin, begin + size)
                continue
            tile_bytes = size // heads // len(tiles)
            for head in range(heads):
                for first, last in runs(tiles):
                    base = begin + head * len(tiles) * tile_bytes
                    self._forget(base + first * tile_bytes, base + last * tile_bytes)

    def _forget(self, begin: int, end: int) -> None:
        """Zeros in bytes [begin, end) of the memory, whose whole pages go back to the system."""
        first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        last = end // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last and hasattr(self._memory, "madvise"):  # Windows has no such call
            self._memory.madvise(mmap.MADV_DONTNEED, first, last - first)
            self._clear(begin, first)
            self._clear(last, end)
        else:
            self._clear(begin, end)

    def _clear(self, begin: int, end: int) -> None:
        part = self._bytes[begin:end]
        if part.any():  # a page that is only read takes no memory
            part[:] = 0

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
