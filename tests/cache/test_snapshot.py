"""Snapshots: what they hold, and which of them a cache refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from edge_llm.cache.kv_cache import CacheGeometry, KVCache
from edge_llm.cache.snapshot import Snapshot
from edge_llm.cache.tiled_rows import LayerGeometry, tile_rows, tile_shapes
from edge_llm.kernels.layout import MAX_POSITION, TILE, CacheLayer, KvType
from tests.cache.rig import append, make, serves, taken, write

TOKENS = list(range(300))


def filled(kv_type: KvType = KvType.INT8, rows: int = 170) -> tuple[KVCache, int]:
    cache = make(kv_type)
    slot = taken(cache)
    append(cache, slot, TOKENS[:rows])
    return cache, slot


def contents(cache: KVCache) -> list[np.ndarray]:
    return [array.copy() for layer in cache.layers for array in layer.arrays.values()]


@pytest.mark.parametrize("kv_type", KvType)
def test_layers_are_stacked_by_kind(kv_type: KvType) -> None:
    cache, slot = filled(kv_type)
    snapshot = cache.snapshot(slot, TILE, 2 * TILE + 1)
    assert snapshot is not None
    shapes = {name: array.shape for name, array in snapshot.arrays.items()}
    if kv_type is KvType.F32:
        assert shapes == {
            "global.keys": (2, 2, 2, 8, TILE),
            "global.values": (2, 2, 2, TILE, 8),
            "local.keys": (1, 1, 2, 16, TILE),
            "local.values": (1, 1, 2, TILE, 16),
        }
    else:
        assert shapes == {
            "global.keys": (2, 2, 2, 2, TILE, 4),
            "global.values": (2, 2, 2, 16, 8, 4),
            "global.key_scales": (2, 2, 2, TILE),
            "global.value_scales": (2, 2, 2, TILE),
            "local.keys": (1, 1, 2, 4, TILE, 4),
            "local.values": (1, 1, 2, 16, 16, 4),
            "local.key_scales": (1, 1, 2, TILE),
            "local.value_scales": (1, 1, 2, TILE),
        }
    row_bytes = sum(layer.layer.row_bytes(kv_type) for layer in cache.layers)
    assert snapshot.nbytes == 2 * TILE * row_bytes


@pytest.mark.parametrize("kv_type", KvType)
def test_blocks_put_a_conversation_together_again(kv_type: KvType) -> None:
    """Blocks copied when they are full, in another cache and long after."""
    cache, slot = filled(kv_type, rows=0)
    blocks = []
    for first in range(0, len(TOKENS), TILE):
        append(cache, slot, TOKENS[first : first + TILE])
        blocks.append(cache.snapshot(slot, first, cache.length(slot)))
    other, target = filled(kv_type)
    assert other.truncate(target, 0)
    for block in blocks:
        assert block is not None
        other.restore(target, block)
        assert serves(other, target, TOKENS[: block.stop])
    other.check_integrity()
    assert other.used_bytes == cache.used_bytes


def test_rows_that_do_not_count_are_not_copied() -> None:
    """Two slots with the same 70 rows give the same bytes, whatever was rejected after them."""
    cache, slot = filled(rows=70)
    other, target = filled(rows=70)
    write(other, target, 70, [999] * 50)
    one, two = cache.snapshot(slot, TILE, 70), other.snapshot(target, TILE, 70)
    assert one is not None
    assert two is not None
    for (name, array), field in zip(one.arrays.items(), [*CacheLayer][:4] * 2, strict=True):
        assert array.tobytes() == two.arrays[name].tobytes()
        rows = tile_rows(array, field)
        assert rows[0, :6].all()
        assert not rows[0, 6:].any()
        assert not rows[1:].any()


def test_rows_that_a_ring_has_lost_are_not_copied() -> None:
    """The local layer holds 192 rows."""
    cache, slot = filled(rows=195)
    assert cache.snapshot(slot, 0, 10) is None
    assert cache.snapshot(slot, 0, TILE) is None
    snapshot = cache.snapshot(slot, TILE, 195)
    assert snapshot is not None
    assert snapshot.stop == 195


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (1, 10), (64, 10), (0, 171), (-64, 10), (128, 128)])
def test_rows_that_a_slot_does_not_have_are_no_snapshot(start: int, stop: int) -> None:
    cache, slot = filled()
    with pytest.raises(ValueError, match="no snapshot"):
        cache.snapshot(slot, start, stop)


def _with(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Snapshot], Snapshot]:
    return lambda good: replace(good, arrays={**good.arrays, name: change(good.arrays[name])})


def _filled_with(value: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda array: np.where(np.arange(array.size).reshape(array.shape) == 5, np.float32(value), array)


BAD = {
    "not at its place": lambda good: replace(good, start=0, stop=good.stop - good.start),
    "a start inside a tile": lambda good: replace(good, start=good.start + 1),
    "no rows": lambda good: replace(good, stop=good.start),
    "fewer tiles than rows": lambda good: replace(good, stop=good.stop + TILE),
    "more tiles than rows": lambda good: replace(good, stop=good.stop - TILE),
    "no end": lambda good: replace(good, stop=MAX_POSITION + 1),
    "an array less": lambda good: replace(good, arrays=dict(list(good.arrays.items())[1:])),
    "an array more": lambda good: replace(good, arrays={**good.arrays, "x": np.zeros(1)}),
    "another shape": _with("local.values", lambda array: array[..., :-1]),
    "another type": _with("local.values", lambda array: array.astype(np.int16)),
    "other layers": _with("global.keys", lambda array: array[:1]),
    "a scale of NaN": _with("global.value_scales", _filled_with(np.nan)),
    "a scale without end": _with("local.value_scales", _filled_with(np.inf)),
}


@pytest.mark.parametrize("change", BAD.values(), ids=BAD)
def test_what_does_not_fit_is_refused_and_changes_nothing(change: Callable[[Snapshot], Snapshot]) -> None:
    cache, slot = filled()
    good = cache.snapshot(slot, TILE, 170)
    assert good is not None
    other, target = filled(rows=TILE)
    before = contents(other)
    with pytest.raises(ValueError, match=r"snapshot|follow"):
        other.restore(target, change(good))
    assert other.length(target) == TILE
    assert all(np.array_equal(*pair) for pair in zip(before, contents(other), strict=True))
    other.restore(target, good)
    assert serves(other, target, TOKENS[:170])


def test_values_that_are_not_finite_are_refused_as_float32_too() -> None:
    cache, slot = filled(KvType.F32, rows=100)
    good = cache.snapshot(slot, TILE, 100)
    assert good is not None
    assert cache.truncate(slot, TILE)
    with pytest.raises(ValueError, match="not finite"):
        cache.restore(slot, _with("global.values", _filled_with(np.nan))(good))
    cache.restore(slot, good)
    assert cache.length(slot) == 100


def test_more_rows_than_a_ring_has_are_refused() -> None:
    wide = KVCache(
        CacheGeometry((LayerGeometry(1, 8, window=10),)), slots=1, context=99, kv_type=KvType.F32, max_chunk=300
    )
    narrow = KVCache(
        CacheGeometry((LayerGeometry(1, 8, window=10),)), slots=1, context=99, kv_type=KvType.F32, max_chunk=9
    )
    source, target = taken(wide), taken(narrow)
    wide.commit(source, 65)
    snapshot = wide.snapshot(source, 0, 65)
    assert snapshot is not None
    with pytest.raises(ValueError, match="more rows than a ring"):
        narrow.restore(target, snapshot)


@pytest.mark.parametrize("kv_type", KvType)
def test_rows_of_a_tile_are_a_view(kv_type: KvType) -> None:
    for field, (shape, kind) in tile_shapes(8, kv_type).items():
        tiles = np.zeros((3, 2, *shape), kind)
        tile_rows(tiles, field)[1, 6] = 1
        row = tile_rows(tiles, field)[1, 6]
        assert row.all()
        assert tiles.sum() == row.size
