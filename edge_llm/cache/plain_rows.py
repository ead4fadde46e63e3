"""PlainRows: the keys and values of one layer as float32 rows in their order, which stock ops read as they lie."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edge_llm.cache.ring_geometry import RingGeometry
from edge_llm.cache.tiled_rows import LayerGeometry
from edge_llm.kernels.layout import LAYER_FIELDS, TILE, CacheLayer, KvType

_FEWEST_ROWS = 256

Allocate = Callable[[tuple[int, ...]], np.ndarray]
"""gives float32 zeros of a shape"""


def host_memory(shape: tuple[int, ...]) -> np.ndarray:
    """`Allocate` of NumPy's own."""
    return np.zeros(shape, np.float32)


class PlainRows:
    """Rows of every slot of one layer. What nobody wrote is 0.

    A run of the static layout attends to all the memory that a slot has, so a slot's memory grows with its conversation, by
    doubling, up to the ring's capacity. Otherwise as TiledRows; `arrays` holds an array a slot.
    """

    def __init__(
        self,
        layer: LayerGeometry,
        ring: RingGeometry,
        *,
        slots: int,
        kv_type: KvType,
        allocate: Allocate = host_memory,
        whole: bool = False,
    ) -> None:
        """`allocate` is for memory that a provider's device reads where it lies; with `whole`, a slot has none or all."""
        if kv_type is not KvType.F32:
            raise ValueError("plain rows are float32")
        self.layer, self.ring, self.kv_type = layer, ring, kv_type
        self._allocate = allocate
        self._fewest_rows = ring.capacity if whole else _FEWEST_ROWS
        self.arrays: dict[CacheLayer, list[np.ndarray]] = {
            field: [self._zeros(0) for _ in range(slots)] for field in (CacheLayer.KEYS, CacheLayer.VALUES)
        }
        """of each slot, [kv_heads, tiles, TILE, head_dim]"""

    @property
    def nbytes(self) -> int:
        """Bytes that are taken."""
        return sum(array.nbytes for arrays in self.arrays.values() for array in arrays)

    def reserve(self, slot: int, rows: int) -> None:
        """Make room for the positions [0, rows), or for a whole ring."""
        needed = min(-(-rows // TILE) * TILE, self.ring.capacity)
        held = self.arrays[CacheLayer.KEYS][slot].shape[1] * TILE
        if held >= needed:
            return
        self._resize(slot, self._room(needed) // TILE)

    def bytes_of(self, rows: int) -> int:
        """Bytes that a slot takes for the positions [0, rows)."""
        return self._room(rows) * self.layer.row_bytes(self.kv_type)

    def held_bytes(self, slot: int, _tiles: int) -> int:
        """Bytes that a slot takes."""
        return sum(arrays[slot].nbytes for arrays in self.arrays.values())

    def rows(self, slot: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of a slot as far as there is room: views [1, kv_heads, rows, head_dim]."""
        keys, values = (
            arrays[slot].reshape(1, self.layer.kv_heads, -1, self.layer.head_dim) for arrays in self.arrays.values()
        )
        return keys, values

    def copy(self, source: int, target: int, tiles: np.ndarray) -> None:
        """Copy tiles of slot `source` over those of slot `target`."""
        if tiles.any():
            self.reserve(target, TILE * (int(np.flatnonzero(tiles)[-1]) + 1))
        for arrays in self.arrays.values():
            kept = np.flatnonzero(tiles[: arrays[source].shape[1]])
            arrays[target][:, kept] = arrays[source][:, kept]

    def give_back(self, slot: int, tiles: np.ndarray) -> None:
        """Forget tiles: memory that no other tile needs goes back to the system, and zeros are in the rest."""
        kept = np.flatnonzero(~tiles)
        if not kept.size:
            self._resize(slot, 0)
            return
        size = self._room(TILE * (int(kept[-1]) + 1)) // TILE
        if size < self.arrays[CacheLayer.KEYS][slot].shape[1]:
            self._resize(slot, size)
        for arrays in self.arrays.values():
            arrays[slot][:, tiles[: arrays[slot].shape[1]]] = 0

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless ring and memory are sound."""
        ring = self.ring
        if ring.capacity % TILE or ring.sinks % TILE or not 0 <= ring.sinks < ring.capacity:
            raise AssertionError(f"{ring} is not made of tiles")
        for keys, values in zip(*self.arrays.values(), strict=True):
            if keys.shape != values.shape or keys.shape[1] * TILE > ring.capacity:
                raise AssertionError("a slot has more rows than its ring")

    def record(self) -> np.ndarray:
        """int64 [LAYER_FIELDS]: nothing that a kernel could read."""
        return np.zeros(LAYER_FIELDS, np.int64)

    def tile_shapes(self) -> dict[CacheLayer, tuple[tuple[int, ...], type[np.generic]]]:
        """Shape and type of one tile of each array."""
        return dict.fromkeys(self.arrays, ((TILE, self.layer.head_dim), np.float32))

    def tile_rows(self, array: np.ndarray, _field: CacheLayer) -> np.ndarray:
        """A view [4, TILE / 4, ...] of one or more tiles [..., TILE, head_dim]: row r of a tile is [r // 16, r % 16]."""
        rows = np.moveaxis(array, -2, 0)
        return rows.reshape(4, TILE // 4, *rows.shape[1:])

    def _room(self, rows: int) -> int:
        """Rows of memory in which so many have room."""
        size = self._fewest_rows if rows else 0
        while size < min(rows, self.ring.capacity):
            size *= 2
        return min(size, self.ring.capacity)

    def _zeros(self, tiles: int) -> np.ndarray:
        heads, dim = self.layer.kv_heads, self.layer.head_dim
        allocate = self._allocate if tiles else host_memory
        return allocate((1, heads, tiles * TILE, dim)).reshape(heads, tiles, TILE, dim)  # as `rows` gives it

    def _resize(self, slot: int, tiles: int) -> None:
        for arrays in self.arrays.values():
            kept = min(tiles, arrays[slot].shape[1])
            array = self._zeros(tiles)
            array[:, :kept] = arrays[slot][:, :kept]
            arrays[slot] = array
