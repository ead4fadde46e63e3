"""TiledRows: the keys and values of one layer, in the layout that the attention kernels read (kernels/layout.py)."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np

from edge_llm.errors import ParameterError
from edge_llm.kernels.layout import LAYER_FIELDS, TILE, UNBOUNDED, CacheLayer, KvType

_TOGETHER = 4  # int8: bytes of one lane that lie side by side, as a dot-product instruction takes them


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """Heads of one layer, and how many rows back it looks (None: to the beginning)."""

    kv_heads: int
    head_dim: int
    window: int | None = None


class TiledRows:
    """Rows of every slot of one layer, in anonymous memory whose untouched pages cost nothing. What nobody wrote is 0.

    Three numbers are kept apart: `capacity` is what a slot has room for, a *position* counts a conversation's tokens
    from 0, and `physical_row` is where a position's row lies. How many rows of a slot are valid is KVCache's affair.
    """

    def __init__(self, layer: LayerGeometry, *, slots: int, capacity: int, kv_type: KvType) -> None:
        """`capacity` rows a slot, a multiple of TILE. Raises `ParameterError` if the memory cannot be reserved."""
        heads, head_dim, tiles = layer.kv_heads, layer.head_dim, capacity // TILE
        self.layer, self.capacity, self.kv_type = layer, capacity, kv_type
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

    def physical_row(self, position: int) -> int:
        """Where the row of `position` lies in its slot: the ring is linear, so a position never moves."""
        return position

    def holds(self, start: int, length: int) -> bool:
        """Whether the rows from position `start` on are all still there once `length` rows were written."""
        return start >= length - self.capacity

    def copy(self, source: int, target: int, rows: int) -> None:
        """Copy the rows of positions [0, rows) of slot `source` over those of slot `target`."""
        tiles = -(-rows // TILE)
        for array in self.arrays.values():
            # rows are interleaved in a tile, so the last tile goes whole: past `rows` nothing is valid in either slot
            by_tile = array.reshape(*array.shape[:2], self.capacity // TILE, -1)
            by_tile[target, :, :tiles] = by_tile[source, :, :tiles]

    def give_back(self, slot: int) -> None:
        """Return the slot's whole pages to the system. It holds zeros again, so that nothing of one conversation, and
        no NaN, is there for the next: kernels may multiply rows that are not valid by a weight of 0."""
        for field, array in self.arrays.items():
            size = array[0].nbytes
            begin = self._starts[field] + slot * size
            end = begin + size
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
        record[CacheLayer.CAPACITY] = self.capacity
        record[CacheLayer.SINKS] = 0
        record[CacheLayer.WINDOW] = UNBOUNDED if self.layer.window is None else self.layer.window
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
