"""KVCache: keys and values of several conversations, each in a slot of its own.

Rows of a slot, by position:

    [0, length)                committed: they belong to the conversation
    [length, length + rows)    written by a running step, not committed yet; the next step may write them again
    [.., limit)                room

A step writes rows past the committed length and attends to them; whoever runs the steps commits the rows
that count. A conversation longer than the context slides: its layers forget what their rows no longer attend to
(ring_geometry.py). One thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from edge_llm.cache import snapshot as snapshots
from edge_llm.cache.plain_rows import PlainRows
from edge_llm.cache.ring_geometry import RingGeometry
from edge_llm.cache.snapshot import LayerRows, Snapshot
from edge_llm.cache.tiled_rows import LayerGeometry, TiledRows
from edge_llm.kernels.layout import CACHE_MAGIC, CACHE_VERSION, MAX_POSITION, TILE, Cache, KvType


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """What a model keeps of each token. All global layers, and all local ones, have the same heads."""

    layers: tuple[LayerGeometry, ...]

    def __post_init__(self) -> None:
        for layers in (self.global_layers, [layer for layer in self.layers if layer.window is not None]):
            if len({(layer.kv_heads, layer.head_dim) for layer in layers}) > 1:
                raise ValueError("layers of one kind have different heads")

    @property
    def global_layers(self) -> list[LayerGeometry]:
        return [layer for layer in self.layers if layer.window is None]

    def row_bytes(self, kv_type: KvType) -> int:
        """Bytes that each token of a conversation takes: in the global layers, for local ones soon take no more."""
        return sum(layer.row_bytes(kv_type) for layer in self.global_layers or self.layers)


class KVCache:
    """Slots of rows and their committed lengths.

    `ValueError` for a slot that is not taken, or a length that a slot cannot have: a fault of the caller.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        *,
        slots: int,
        context: int,
        kv_type: KvType,
        max_chunk: int,
        sinks: int = TILE,
        generation: int = 1,
        storage: Callable[..., LayerRows] = TiledRows,
    ) -> None:
        """Reserve `slots` slots; memory is taken when rows are written.

        `context` is how many tokens a row of a global layer may attend to, `max_chunk` the most rows of a step, `sinks`
        the first tokens that a conversation longer than the context keeps (a multiple of TILE). `generation` stands in
        the descriptor and tells two caches of a process apart. `storage` PlainRows is for the static layout: there are no
        kernels then, and no descriptor. Raises `ParameterError` if the memory cannot be reserved.
        """
        self.geometry, self.slots, self.context, self.kv_type = geometry, slots, context, kv_type
        self.slides = context > sinks
        """whether a conversation may be longer than the context"""
        self.limit = MAX_POSITION if self.slides else context
        """positions that a slot may reach"""
        rings = (
            RingGeometry.of(layer.window, context=context, sinks=sinks, max_chunk=max_chunk)
            for layer in geometry.layers
        )
        self.layers: tuple[LayerRows, ...] = tuple(
            storage(layer, ring, slots=slots, kv_type=kv_type)
            for layer, ring in zip(geometry.layers, rings, strict=True)
        )
        self._free = list(reversed(range(slots)))
        self._lengths = np.zeros(slots, np.int64)
        self._written = np.zeros(slots, np.int64)
        self._generation = generation
        self._magic = CACHE_MAGIC if storage is TiledRows else 0
        self._descriptor = self._describe()

    @property
    def descriptor_address(self) -> int:
        """Address of the int64 record that kernels read (layout.Cache); valid as long as this object lives."""
        return self._descriptor.ctypes.data

    @property
    def plain_layers(self) -> tuple[PlainRows, ...]:
        """The layers of a cache whose storage is PlainRows; none of any other."""
        return tuple(layer for layer in self.layers if isinstance(layer, PlainRows))

    @property
    def nbytes(self) -> int:
        """Bytes of address space that are reserved, or taken by plain rows."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def used_bytes(self) -> int:
        """Bytes of the memory that holds committed rows."""
        return sum(self.slot_bytes(slot) for slot in range(self.slots))

    def slot_bytes(self, slot: int) -> int:
        """The same of one slot."""
        kept = self._kept_tiles(int(self._lengths[slot]), int(self._written[slot]))
        tiles = {ring: int(mask.sum()) for ring, mask in kept.items()}
        return sum(layer.held_bytes(slot, tiles[layer.ring]) for layer in self.layers)

    def bytes_of(self, rows: int) -> int:
        """Bytes that a conversation of so many rows takes at most."""
        return sum(layer.bytes_of(rows) for layer in self.layers)

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def acquire(self) -> int | None:
        """An empty slot, whose memory holds zeros, or None when all are taken."""
        return self._free.pop() if self._free else None

    def release(self, slot: int) -> None:
        """Give a slot and its memory back."""
        self._check_taken(slot)
        self._lengths[slot] = self._written[slot] = 0
        for layer in self.layers:
            layer.give_back(slot, np.ones(layer.ring.capacity // TILE, np.bool_))
        self._free.append(slot)

    def length(self, slot: int) -> int:
        """Committed rows of a slot."""
        self._check_taken(slot)
        return int(self._lengths[slot])

    def commit(self, slot: int, rows: int) -> None:
        """The next `rows` rows, which a step has written, belong to the conversation."""
        length = self.length(slot)
        if not 0 <= rows <= self.limit - length:
            raise ValueError(f"cannot commit {rows} rows at {length} of {self.limit}")
        self._lengths[slot] = length + rows
        self._written[slot] = max(self._written[slot], length + rows)

    def reach(self, slot: int, end: int) -> None:
        """A step has written rows up to position `end`, committed or not; kernels say so in the descriptor."""
        self._check_taken(slot)
        self._written[slot] = max(self._written[slot], end)

    def truncate(self, slot: int, length: int) -> bool:
        """Keep only the first `length` rows, and give the memory of the others back.

        False, and nothing has changed, if a layer no longer holds what the next row would attend to.
        """
        written = self._written_after(slot, length)
        if written is None:
            return False
        self._cut(slot, length, written)
        return True

    def fork(self, source: int, target: int, length: int, *, same: int = 0) -> bool:
        """Make `target` a copy of the first `length` rows of `source`, whatever it held.

        The first `same` of its rows are those of `source` already: they are not copied if both slots were written equally
        far, so that their rings hold the same positions. False, and nothing has changed, if a layer of `source` no longer
        holds what the next row would attend to.
        """
        self._check_taken(target)
        if source == target:
            raise ValueError(f"slot {source} cannot be a copy of itself")
        written = self._written_after(source, length)
        if written is None:
            return False
        start = same if self._written[target] == self._written[source] else 0
        tiles = self._kept_tiles(length, written, start)
        for layer in self.layers:
            layer.copy(source, target, tiles[layer.ring])
        self._cut(target, length, written)
        return True

    def snapshot(self, slot: int, start: int, stop: int) -> Snapshot | None:
        """A copy of the committed rows [start, stop), `start` a multiple of TILE; None if a layer has lost one of them."""
        if start % TILE or not 0 <= start < stop <= self.length(slot):
            raise ValueError(f"slot {slot} has {self.length(slot)} rows: no snapshot of {start} to {stop}")
        written = int(self._written[slot])
        if not all(layer.ring.holds(start, stop, written) for layer in self.layers):
            return None
        return snapshots.take(self.layers, slot, start, stop)

    def snapshot_shapes(self, tiles: int) -> dict[str, tuple[tuple[int, ...], np.dtype[np.generic]]]:
        """Shape and type of each array of a snapshot of so many tiles."""
        return snapshots.shapes(self.layers, tiles)

    def restore(self, slot: int, snapshot: Snapshot) -> None:
        """Append the rows of a snapshot to a slot that has `snapshot.start` rows, and commit them.

        Raises `ValueError`, and nothing has changed, unless it is one of a cache with the same layers.
        """
        if self.length(slot) != snapshot.start or snapshot.stop > self.limit:
            raise ValueError(f"rows {snapshot.start} to {snapshot.stop} do not follow those of slot {slot}")
        snapshots.check(self.layers, snapshot)
        snapshots.put(self.layers, slot, snapshot)
        self.commit(slot, snapshot.stop - snapshot.start)

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless every slot is free or taken, free ones are empty, each can go on from its length,
        and layers and descriptor are sound."""
        free = set(self._free)
        if len(free) != len(self._free) or not free <= set(range(self.slots)):
            raise AssertionError(f"the free list is broken: {self._free}")
        for slot, length in enumerate(self._lengths.tolist()):
            if not 0 <= length <= (0 if slot in free else self.limit):
                raise AssertionError(f"slot {slot} ({'free' if slot in free else 'taken'}) has {length} rows")
            written = int(self._written[slot])
            if written < length or not all(layer.ring.serves(length, written) for layer in self.layers):
                raise AssertionError(f"slot {slot} has lost rows that its next one attends to")
        for layer in self.layers:
            layer.check_integrity()
        if not np.array_equal(self._descriptor, self._describe()):
            raise AssertionError("the descriptor was overwritten")

    def close(self) -> None:
        """Free the memory; kernels refuse the descriptor from now on. Idempotent."""
        self._descriptor[Cache.MAGIC] = 0
        self.layers = ()
        self._free = []

    def _describe(self) -> np.ndarray:
        """What kernels are told, as layout.Cache says."""
        header = np.zeros(Cache.FIRST_LAYER, np.int64)
        for field, value in {
            Cache.MAGIC: self._magic,
            Cache.VERSION: CACHE_VERSION,
            Cache.GENERATION: self._generation,
            Cache.LAYERS: len(self.layers),
            Cache.SLOTS: self.slots,
            Cache.LENGTHS: self._lengths.ctypes.data,
            Cache.LIMIT: self.limit,
            Cache.WRITTEN: self._written.ctypes.data,
        }.items():
            header[field] = value
        return np.concatenate([header, *(layer.record() for layer in self.layers)])

    def _check_taken(self, slot: int) -> None:
        if not 0 <= slot < self.slots or slot in self._free:
            raise ValueError(f"slot {slot} is not taken")

    def _written_after(self, slot: int, length: int) -> int | None:
        """WRITTEN of a slot, or of its copy, whose first `length` rows are to go on; None if a layer has lost too much."""
        rows, written = self.length(slot), int(self._written[slot])
        if not 0 <= length <= rows:
            raise ValueError(f"slot {slot} has {rows} rows, not {length}")
        rings = [layer.ring for layer in self.layers]
        if all(ring.forgets(length, written) for ring in rings):
            return length
        return written if all(ring.serves(length, written) for ring in rings) else None

    def _cut(self, slot: int, length: int, written: int) -> None:
        """What a slot holds from now on; tiles that hold no row of it go back to the system."""
        touched = max(written, int(self._written[slot]))
        self._lengths[slot], self._written[slot] = length, written
        if -(-length // TILE) < -(-touched // TILE):
            kept = self._kept_tiles(length, written)
            for layer in self.layers:
                layer.give_back(slot, ~kept[layer.ring])

    def _kept_tiles(self, length: int, written: int, start: int = 0) -> dict[RingGeometry, np.ndarray]:
        """What rings of each geometry hold of such a conversation; see RingGeometry.kept_tiles."""
        return {ring: ring.kept_tiles(length, written, start) for ring in {layer.ring for layer in self.layers}}
