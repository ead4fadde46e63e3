"""Reads and writes a KVCache the way kernels do: through the addresses in its descriptor alone. Plain rows have none: their
arrays are read and written, as the static layout's session does."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from edge_llm.cache.kv_cache import CacheGeometry, KVCache
from edge_llm.cache.plain_rows import PlainRows
from edge_llm.cache.tiled_rows import LayerGeometry, TiledRows
from edge_llm.kernels.layout import LAYER_FIELDS, TILE, Cache, CacheLayer, KvType
from tests.reference.attention import physical_row

GEOMETRY = CacheGeometry((LayerGeometry(2, 8), LayerGeometry(1, 16, window=70), LayerGeometry(2, 8)))
CONTEXT = 3 * TILE + 5
MAX_CHUNK = 60


def make(
    kv_type: KvType = KvType.INT8,
    *,
    slots: int = 3,
    context: int = CONTEXT,
    sinks: int = TILE,
    geometry: CacheGeometry = GEOMETRY,
    storage: type[TiledRows] | type[PlainRows] = TiledRows,
) -> KVCache:
    return KVCache(
        geometry, slots=slots, context=context, kv_type=kv_type, max_chunk=MAX_CHUNK, sinks=sinks, storage=storage
    )


def taken(cache: KVCache) -> int:
    """A slot."""
    slot = cache.acquire()
    assert slot is not None
    return slot


def memory(address: int, kind: type, count: int) -> np.ndarray:
    size = count * np.dtype(kind).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(int(address)), kind)


def descriptor(cache: KVCache) -> np.ndarray:
    return memory(cache.descriptor_address, np.int64, Cache.FIRST_LAYER + LAYER_FIELDS * len(cache.geometry.layers))


def layer_record(cache: KVCache, layer: int) -> np.ndarray:
    first = Cache.FIRST_LAYER + LAYER_FIELDS * layer
    return descriptor(cache)[first : first + LAYER_FIELDS]


class Layer:
    """One layer's memory, in the shapes that layout.py gives."""

    def __init__(self, cache: KVCache, number: int) -> None:
        record = layer_record(cache, number)
        self.number = number
        self.capacity, self.sinks, self.window, heads, dim = (
            int(record[field])
            for field in (
                CacheLayer.CAPACITY,
                CacheLayer.SINKS,
                CacheLayer.WINDOW,
                CacheLayer.KV_HEADS,
                CacheLayer.HEAD_DIM,
            )
        )
        rings = (cache.slots, heads, self.capacity // TILE)
        if record[CacheLayer.KV_TYPE] == KvType.INT8:
            shapes = {
                CacheLayer.KEYS: ((*rings, dim // 4, TILE, 4), np.uint8, (0, 2, 4, 1, 3, 5)),
                CacheLayer.VALUES: ((*rings, TILE // 4, dim, 4), np.int8, (0, 2, 5, 3, 1, 4)),
                CacheLayer.KEY_SCALES: ((*rings, TILE), np.float32, (0, 2, 3, 1)),
                CacheLayer.VALUE_SCALES: ((*rings, TILE), np.float32, (0, 2, 3, 1)),
            }
        else:
            shapes = {
                CacheLayer.KEYS: ((*rings, dim, TILE), np.float32, (0, 2, 4, 1, 3)),
                CacheLayer.VALUES: ((*rings, TILE, dim), np.float32, (0, 2, 3, 1, 4)),
            }
        self.arrays, self._by_row = {}, {}
        for field, (shape, kind, rows_first) in shapes.items():
            array = memory(record[field], kind, int(np.prod(shape))).reshape(shape)
            self.arrays[field], self._by_row[field] = array, array.transpose(rows_first)

    def rows(self, positions: Sequence[int] | np.ndarray) -> np.ndarray:
        """Physical rows of positions."""
        return np.vectorize(physical_row, otypes=[np.int64])(positions, self.sinks, self.capacity)

    def write(self, slot: int, rows: np.ndarray, tokens: Sequence[int]) -> None:
        """Into physical rows: different bytes for every token, layer, head and dimension."""
        for field, array in self._by_row.items():
            index = self._index(field, slot, rows)
            array[index] = self._content(field, array[index], tokens)

    def holds(self, slot: int, rows: np.ndarray, tokens: Sequence[int]) -> bool:
        """Whether these tokens lie in the physical rows."""
        found = {field: array[self._index(field, slot, rows)] for field, array in self._by_row.items()}
        return all(np.array_equal(rows, self._content(field, rows, tokens)) for field, rows in found.items())

    def _index(self, field: CacheLayer, slot: int, rows: np.ndarray) -> tuple[int | np.ndarray, ...]:
        tile, inside = np.divmod(rows, TILE)
        if self._by_row[field].dtype == np.int8:
            return (slot, tile, inside // (TILE // 4), inside % (TILE // 4))
        return (slot, tile, inside)

    def _content(self, field: CacheLayer, rows: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
        """What stands for the tokens in arrays [tokens, ...] of this shape."""
        size = int(np.prod(rows.shape[1:]))
        seed = np.array(tokens, np.int64)[:, None] * 31 + np.arange(size) * 7 + int(field) * 3 + self.number
        return (seed % 120 + 1).astype(rows.dtype).reshape(rows.shape)


class PlainLayer(Layer):
    """One layer of plain rows. What a slot has no memory for counts as zeros."""

    def __init__(self, cache: KVCache, number: int) -> None:
        layer = cache.layers[number]
        assert isinstance(layer, PlainRows)
        self.number, self._layer = number, layer
        self.capacity, self.sinks, self.window = layer.ring.capacity, layer.ring.sinks, layer.ring.window

    @property
    def arrays(self) -> dict[CacheLayer, list[np.ndarray]]:  # type: ignore[override]
        missing = [self.capacity // TILE - array.shape[1] for array in self._layer.arrays[CacheLayer.KEYS]]
        return {
            field: [
                np.pad(array, ((0, 0), (0, more), (0, 0), (0, 0))) for array, more in zip(arrays, missing, strict=True)
            ]
            for field, arrays in self._layer.arrays.items()
        }

    def write(self, slot: int, rows: np.ndarray, tokens: Sequence[int]) -> None:
        self._layer.reserve(slot, int(rows.max()) + 1)
        for field, array in self._fields(slot):
            array[rows] = self._content(field, array[rows], tokens)

    def holds(self, slot: int, rows: np.ndarray, tokens: Sequence[int]) -> bool:
        found = self._fields(slot)
        return all(np.array_equal(array[rows], self._content(field, array[rows], tokens)) for field, array in found)

    def _fields(self, slot: int) -> list[tuple[CacheLayer, np.ndarray]]:
        """[rows, heads, dim], views."""
        return list(zip(self._layer.arrays, (np.moveaxis(a[0], 0, 1) for a in self._layer.rows(slot)), strict=True))


def layers(cache: KVCache) -> list[Layer]:
    kinds = (PlainLayer if isinstance(layer, PlainRows) else Layer for layer in cache.layers)
    return [kind(cache, number) for number, kind in enumerate(kinds)]


def write(cache: KVCache, slot: int, position: int, tokens: Sequence[int]) -> None:
    """What a step does: the rows of `tokens` from `position` on, in every layer."""
    if isinstance(cache.layers[0], PlainRows):
        cache.reach(slot, position + len(tokens))
    else:
        written = memory(descriptor(cache)[Cache.WRITTEN], np.int64, cache.slots)
        written[slot] = max(written[slot], position + len(tokens))
    for layer in layers(cache):
        layer.write(slot, layer.rows(range(position, position + len(tokens))), tokens)


def append(cache: KVCache, slot: int, tokens: Sequence[int]) -> None:
    """Steps of at most MAX_CHUNK rows, committed."""
    for first in range(0, len(tokens), MAX_CHUNK):
        part = tokens[first : first + MAX_CHUNK]
        write(cache, slot, cache.length(slot), part)
        cache.commit(slot, len(part))


def serves(cache: KVCache, slot: int, tokens: Sequence[int]) -> bool:
    """Whether every layer has the rows that the row after `tokens` attends to."""
    for layer in layers(cache):
        oldest = max(layer.sinks, len(tokens) - layer.window + 1)
        positions = [k for k in range(len(tokens)) if k < layer.sinks or k >= oldest]
        if not layer.holds(slot, layer.rows(positions), [tokens[k] for k in positions]):
            return False
    return True
