"""Reads and writes a KVCache the way kernels do: through the addresses in its descriptor alone."""

from __future__ import annotations

import ctypes

import numpy as np

from edge_llm.cache.kv_cache import CacheGeometry, KVCache
from edge_llm.cache.tiled_rows import LayerGeometry
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
) -> KVCache:
    return KVCache(geometry, slots=slots, context=context, kv_type=kv_type, max_chunk=MAX_CHUNK, sinks=sinks)


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
        head, tiles = (cache.slots, heads), self.capacity // TILE
        if record[CacheLayer.KV_TYPE] == KvType.INT8:
            shapes = {
                CacheLayer.KEYS: ((*head, tiles, dim // 4, TILE, 4), np.uint8),
                CacheLayer.VALUES: ((*head, tiles, TILE // 4, dim, 4), np.int8),
                CacheLayer.KEY_SCALES: ((*head, self.capacity), np.float32),
                CacheLayer.VALUE_SCALES: ((*head, self.capacity), np.float32),
            }
        else:
            shapes = {
                CacheLayer.KEYS: ((*head, tiles, dim, TILE), np.float32),
                CacheLayer.VALUES: ((*head, self.capacity, dim), np.float32),
            }
        self.arrays = {
            field: memory(record[field], kind, int(np.prod(shape))).reshape(shape)
            for field, (shape, kind) in shapes.items()
        }

    def write(self, slot: int, position: int, token: int) -> None:
        """Different bytes for every token, layer, head and dimension."""
        for field, array in self.arrays.items():
            index = self._place(field, slot, position)
            array[index] = self._content(array[index], field, token)

    def holds(self, slot: int, position: int, token: int) -> bool:
        """Whether the row of a position is that of `token`."""
        for field, array in self.arrays.items():
            row = array[self._place(field, slot, position)]
            if not np.array_equal(row, self._content(row, field, token)):
                return False
        return True

    def _place(self, field: CacheLayer, slot: int, position: int) -> tuple[object, ...]:
        """The index of a row: what it selects has one entry a head, and one a dimension unless it is a scale."""
        row = physical_row(position, self.sinks, self.capacity)
        tile, inside = divmod(row, TILE)
        if field is CacheLayer.KEYS:
            return (slot, slice(None), tile, slice(None), inside)
        if field is CacheLayer.VALUES and self.arrays[field].dtype == np.int8:
            return (slot, slice(None), tile, inside % (TILE // 4), slice(None), inside // (TILE // 4))
        return (slot, slice(None), row)

    def _content(self, row: np.ndarray, field: CacheLayer, token: int) -> np.ndarray:
        seed = np.arange(row.size) * 7 + token * 31 + int(field) * 3 + self.number
        return (seed % 120).astype(row.dtype).reshape(row.shape)


def layers(cache: KVCache) -> list[Layer]:
    return [Layer(cache, number) for number in range(len(cache.geometry.layers))]


def write(cache: KVCache, slot: int, position: int, tokens: list[int]) -> None:
    """What a step does: the rows of `tokens` from `position` on, in every layer."""
    written = memory(descriptor(cache)[Cache.WRITTEN], np.int64, cache.slots)
    written[slot] = max(written[slot], position + len(tokens))
    for layer in layers(cache):
        for i, token in enumerate(tokens):
            layer.write(slot, position + i, token)


def append(cache: KVCache, slot: int, tokens: list[int]) -> None:
    """Steps of at most MAX_CHUNK rows, committed."""
    for first in range(0, len(tokens), MAX_CHUNK):
        part = tokens[first : first + MAX_CHUNK]
        write(cache, slot, cache.length(slot), part)
        cache.commit(slot, len(part))


def holds(cache: KVCache, slot: int, tokens: list[int], positions: range | None = None) -> bool:
    """Whether every layer has the rows of `tokens` at the positions (None: those that the next row attends to)."""
    for layer in layers(cache):
        oldest = max(layer.sinks, len(tokens) - layer.window + 1)
        for position in range(len(tokens)) if positions is None else positions:
            seen = positions is not None or position < layer.sinks or position >= oldest
            if seen and not layer.holds(slot, position, tokens[position]):
                return False
    return True
