"""KVCache: keys and values of several conversations, each in a slot of its own.

Rows of a slot, by position:

    [0, length)                committed: they belong to the conversation
    [length, length + rows)    written by a running step, not committed yet; the next step may write them again
    [.., context)              room

A step writes rows past the committed length and attends to them; whoever runs the steps commits the rows
that count. One thread at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edge_llm.cache.tiled_rows import LayerGeometry, TiledRows
from edge_llm.kernels.layout import CACHE_MAGIC, CACHE_VERSION, LAYER_FIELDS, TILE, Cache, KvType


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """What a model keeps of each token."""

    layers: tuple[LayerGeometry, ...]

    def row_bytes(self, kv_type: KvType) -> int:
        """Bytes that one token takes in all layers: int8 codes with a float32 scale a head, or float32."""
        if kv_type is KvType.INT8:
            return sum(2 * layer.kv_heads * (layer.head_dim + 4) for layer in self.layers)
        return sum(8 * layer.kv_heads * layer.head_dim for layer in self.layers)


class KVCache:
    """Slots of rows and their committed lengths.

    `ValueError` for a slot that is not taken, or a length that a slot cannot have: a fault of the caller.
    """

    def __init__(
        self, geometry: CacheGeometry, *, slots: int, context: int, kv_type: KvType, generation: int = 1
    ) -> None:
        """Reserve `slots` of `context` positions each; memory is taken when rows are written.

        `generation` stands in the descriptor and tells two caches of a process apart. Raises `ParameterError` if the
        memory cannot be reserved.
        """
        self.geometry, self.slots, self.context, self.kv_type = geometry, slots, context, kv_type
        capacity = -(-context // TILE) * TILE
        self.layers = tuple(
            TiledRows(layer, slots=slots, capacity=capacity, kv_type=kv_type) for layer in geometry.layers
        )
        self._free = list(reversed(range(slots)))
        self._lengths = np.zeros(slots, np.int64)
        self._descriptor = np.zeros(Cache.FIRST_LAYER + LAYER_FIELDS * len(self.layers), np.int64)
        header = {
            Cache.MAGIC: CACHE_MAGIC,
            Cache.VERSION: CACHE_VERSION,
            Cache.GENERATION: generation,
            Cache.LAYERS: len(self.layers),
            Cache.SLOTS: slots,
            Cache.LENGTHS: self._lengths.ctypes.data,
            Cache.CONTEXT: context,
        }
        for field, value in header.items():
            self._descriptor[field] = value
        for i, layer in enumerate(self.layers):
            first = Cache.FIRST_LAYER + LAYER_FIELDS * i
            self._descriptor[first : first + LAYER_FIELDS] = layer.record()

    @property
    def descriptor_address(self) -> int:
        """Address of the int64 record that kernels read (layout.Cache); valid as long as this object lives."""
        return self._descriptor.ctypes.data

    @property
    def nbytes(self) -> int:
        """Bytes of address space that are reserved."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def used_bytes(self) -> int:
        """Bytes of the tiles that hold committed rows."""
        tiles = int((-(-self._lengths // TILE)).sum())
        return tiles * TILE * self.geometry.row_bytes(self.kv_type)

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def acquire(self) -> int | None:
        """An empty slot, whose memory holds zeros, or None when all are taken."""
        return self._free.pop() if self._free else None

    def release(self, slot: int) -> None:
        """Give a slot and its memory back."""
        self._check_taken(slot)
        self._lengths[slot] = 0
        for layer in self.layers:
            layer.give_back(slot)
        self._free.append(slot)

    def length(self, slot: int) -> int:
        """Committed rows of a slot."""
        self._check_taken(slot)
        return int(self._lengths[slot])

    def commit(self, slot: int, rows: int) -> None:
        """The next `rows` rows, which a step has written, belong to the conversation."""
        length = self.length(slot)
        if not 0 <= rows <= self.context - length:
            raise ValueError(f"cannot commit {rows} rows at {length} of {self.context}")
        self._lengths[slot] = length + rows

    def truncate(self, slot: int, length: int) -> bool:
        """Keep only the first `length` rows.

        False, and nothing has changed, if a layer no longer holds what they attend to.
        """
        if not self._can_cut(slot, length):
            return False
        self._lengths[slot] = length
        return True

    def fork(self, source: int, target: int, length: int) -> bool:
        """Make `target` a copy of the first `length` rows of `source`, whatever it held.

        False, and nothing has changed, if a layer of `source` no longer holds what those rows attend to.
        """
        self._check_taken(target)
        if source == target:
            raise ValueError(f"slot {source} cannot be a copy of itself")
        if not self._can_cut(source, length):
            return False
        for layer in self.layers:
            layer.copy(source, target, length)
        self._lengths[target] = length
        return True

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless every slot is free or taken, free ones are empty, and lengths are in range."""
        free = set(self._free)
        if len(free) != len(self._free) or not free <= set(range(self.slots)):
            raise AssertionError(f"the free list is broken: {self._free}")
        for slot, length in enumerate(self._lengths.tolist()):
            if not 0 <= length <= (0 if slot in free else self.context):
                raise AssertionError(f"slot {slot} ({'free' if slot in free else 'taken'}) has {length} rows")
        if self._descriptor[Cache.MAGIC] != CACHE_MAGIC or self._descriptor[Cache.LENGTHS] != self._lengths.ctypes.data:
            raise AssertionError("the descriptor was overwritten")

    def close(self) -> None:
        """Free the memory; kernels refuse the descriptor from now on. Idempotent."""
        self._descriptor[Cache.MAGIC] = 0
        self.layers = ()
        self._free = []

    def _check_taken(self, slot: int) -> None:
        if not 0 <= slot < self.slots or slot in self._free:
            raise ValueError(f"slot {slot} is not taken")

    def _can_cut(self, slot: int, length: int) -> bool:
        """Whether every layer still holds the rows that row `length - 1` and the next one attend to."""
        written = self.length(slot)
        if not 0 <= length <= written:
            raise ValueError(f"slot {slot} has {written} rows, not {length}")
        return all(
            layer.holds(0 if layer.layer.window is None else max(0, length - layer.layer.window), written)
            for layer in self.layers
        )
