"""Snapshot: a copy of some rows of a slot, in all layers; what a prefix cache keeps of a block of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from edge_llm.cache.plain_rows import PlainRows
from edge_llm.cache.tiled_rows import TiledRows
from edge_llm.kernels.layout import TILE, CacheLayer

LayerRows = TiledRows | PlainRows
"""where the rows of a layer lie"""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The rows of positions [start, stop); `start` is a multiple of TILE, what follows `stop` in its tile is 0.

    `arrays` are named "global.keys", "local.value_scales" and so on, one of each for all global and all local layers:
    [layers, kv_heads, tiles, then the shape of a tile (tiled_rows.tile_shapes)].
    """

    start: int
    stop: int
    arrays: Mapping[str, np.ndarray]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


def take(layers: Sequence[LayerRows], slot: int, start: int, stop: int) -> Snapshot:
    """Copy rows that all layers hold."""
    arrays = {}
    for name, field, members in _stacks(layers):
        stack = np.stack([layer.arrays[field][slot][:, _tiles(layer, start, stop)] for layer in members])
        if stop % TILE:
            members[0].tile_rows(stack[:, :, -1], field)[~_first_rows(stop % TILE)] = 0
        arrays[name] = stack
    return Snapshot(start, stop, arrays)


def shapes(layers: Sequence[LayerRows], tiles: int) -> dict[str, tuple[tuple[int, ...], np.dtype[np.generic]]]:
    """Shape and type of each array of a snapshot of so many tiles."""
    found = {}
    for name, field, members in _stacks(layers):
        first = members[0]
        shape, kind = first.tile_shapes()[field]
        found[name] = ((len(members), first.layer.kv_heads, tiles, *shape), np.dtype(kind))
    return found


def check(layers: Sequence[LayerRows], snapshot: Snapshot) -> None:
    """Raises `ValueError` unless `put` can write the snapshot into these layers, whoever made it."""
    start, stop = snapshot.start, snapshot.stop
    if start % TILE or not 0 <= start < stop:
        raise ValueError(f"a snapshot of the rows {start} to {stop} is none")
    expected = shapes(layers, -(-(stop - start) // TILE))
    found = {name: (array.shape, array.dtype) for name, array in snapshot.arrays.items()}
    if found != expected:
        raise ValueError("the snapshot is not one of this cache's layers")
    for name, array in snapshot.arrays.items():
        # a weight of 0 does not hide a value that is not finite: it would reach rows that do not attend to it. Stock
        # ops add a mask to scores, which does not hide those of such keys either
        spreads = isinstance(layers[0], PlainRows) or name.endswith(("value_scales", "values"))
        if spreads and array.dtype == np.float32 and not np.isfinite(array).all():
            raise ValueError(f"the snapshot's {name} are not finite")
    if any(stop - max(start, layer.ring.sinks) > layer.ring.ring_rows for layer in layers):
        raise ValueError("the snapshot has more rows than a ring")


def put(layers: Sequence[LayerRows], slot: int, snapshot: Snapshot) -> None:
    """Write the rows of a snapshot, and no others: the last tile may hold older rows of the ring behind them."""
    whole = snapshot.stop // TILE - snapshot.start // TILE
    for name, field, members in _stacks(layers):
        for layer, rows in zip(members, snapshot.arrays[name], strict=True):
            layer.reserve(slot, snapshot.stop)
            target, tiles = layer.arrays[field][slot], _tiles(layer, snapshot.start, snapshot.stop)
            target[:, tiles[:whole]] = rows[:, :whole]
            if snapshot.stop % TILE:
                some = _first_rows(snapshot.stop % TILE)
                layer.tile_rows(target[:, tiles[-1]], field)[some] = layer.tile_rows(rows[:, -1], field)[some]


def _stacks(layers: Sequence[LayerRows]) -> Iterator[tuple[str, CacheLayer, list[LayerRows]]]:
    """(name, field, layers) of each array of a snapshot."""
    for kind in ("global", "local"):
        members = [layer for layer in layers if (layer.layer.window is None) == (kind == "global")]
        if members:
            for field in members[0].arrays:
                yield f"{kind}.{field.name.lower()}", field, members


def _tiles(layer: LayerRows, start: int, stop: int) -> list[int]:
    """The physical tiles of positions that begin with a tile."""
    return [layer.ring.physical_row(first) // TILE for first in range(start, stop, TILE)]


def _first_rows(count: int) -> np.ndarray:
    """bool [4, TILE / 4], as `tile_rows` has rows: whether a row is one of the first `count`."""
    return np.less(np.arange(TILE), count).reshape(4, TILE // 4)
