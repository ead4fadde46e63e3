"""Where a row lies in the ring, and what is stored there."""

from __future__ import annotations

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_llm.kernels.layout import TILE, CacheLayer, KvType
from edge_llm.kernels.ring import physical_tile, write_row
from tests.kernels.attention_rig import Rig, Shape
from tests.kernels.guard_pages import guarded_copy, untouched
from tests.reference.attention import physical_row


@numba.njit
def write(layer: np.ndarray, slot: int, head: int, position: int, key: int, value: int) -> None:
    write_row(layer, slot, head, position, key, value)


def store(rig: Rig, slot: int, head: int, position: int, key: np.ndarray, value: np.ndarray) -> None:
    """Write one row; nothing outside the ring is touched."""
    inputs = [guarded_copy(x.astype(np.float32)) for x in (key, value)]
    write(rig.layer, slot, head, position, *(x.ctypes.data for x in inputs))
    assert all(untouched(array) for array in (*inputs, *rig.arrays.values()))


@given(st.integers(0, 1 << 40), st.integers(0, 20), st.integers(1, 50))
def test_tiles_of_positions_are_mapped_as_a_whole(position: int, sink_tiles: int, ring_tiles: int) -> None:
    tiles = sink_tiles + ring_tiles
    tile = physical_tile.py_func(position // TILE, sink_tiles, tiles)
    assert 0 <= tile < tiles
    assert TILE * tile + position % TILE == physical_row(position, TILE * sink_tiles, TILE * tiles)


@pytest.mark.parametrize("kv_type", KvType, ids=lambda kv_type: kv_type.name)
@pytest.mark.parametrize("dim", [8, 40, 64])
def test_a_row_is_stored_in_its_place_and_nowhere_else(kv_type: KvType, dim: int) -> None:
    rng = np.random.default_rng(dim)
    shape = Shape(kv_heads=2, heads=2, dim=dim, kv_type=kv_type, slots=2, capacity=4 * TILE, sinks=TILE)
    rig = Rig(shape)
    for position in (0, 1, 15, 16, 63, 64, 4 * TILE - 1, 4 * TILE, 1000, 12345):
        slot, head = rng.integers(0, 2, 2)
        before = {
            (s, h, row): [x[h].copy() for x in rig.stored(s, row)]
            for s in range(2)
            for h in range(2)
            for row in range(shape.capacity)
        }
        key, value = rng.standard_normal((2, dim)) * [[3], [0.01]]
        store(rig, slot, head, position, key, value)
        kept = [x[head] for x in rig.stored(slot, position)]
        for got, given_ in zip(kept, (key, value), strict=True):
            step = 0 if kv_type == KvType.F32 else np.abs(given_).max() / 127
            assert np.abs(got - given_).max() <= 0.5001 * step + 1e-6 * np.abs(given_).max()
        del before[slot, head, physical_row(position, shape.sinks, shape.capacity)]
        for (s, h, row), old in before.items():
            assert all(np.array_equal(x[h], y) for x, y in zip(rig.stored(s, row), old, strict=True))


def test_codes_are_rounded_to_even_and_symmetric() -> None:
    rig = Rig(Shape(dim=8))
    x = np.array([127, -127, 0.5, 1.5, -0.5, -1.5, 2.5, 0])
    store(rig, 0, 0, 70, x, 2 * x)
    codes = [127, -127, 0, 2, 0, -2, 2, 0]
    assert rig.arrays[CacheLayer.KEYS][0, 0, 1, :, 6].reshape(-1).tolist() == [128 + code for code in codes]
    assert rig.arrays[CacheLayer.VALUES][0, 0, 1, 6, :, 0].tolist() == codes
    assert rig.arrays[CacheLayer.KEY_SCALES][0, 0, 70] == 1
    assert rig.arrays[CacheLayer.VALUE_SCALES][0, 0, 70] == 2


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 1e-31])
def test_nothing_and_next_to_nothing_are_stored_as_zeros(value: float) -> None:
    rig = Rig(Shape(dim=8))
    store(rig, 0, 0, 3, np.full(8, value), np.full(8, value))
    assert not any(x.any() for x in rig.stored(0, 3))


@pytest.mark.parametrize("kv_type", KvType, ids=lambda kv_type: kv_type.name)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", ["key", "value"])
def test_a_row_that_is_not_finite_is_a_key_of_nan_and_a_value_of_zeros(
    kv_type: KvType, value: float, which: str
) -> None:
    rig = Rig(Shape(dim=16, kv_type=kv_type))
    pair = {"key": np.ones(16), "value": np.ones(16)}
    pair[which][11] = value
    store(rig, 0, 0, 9, pair["key"], pair["value"])
    kept = rig.stored(0, 9)
    assert np.isnan(kept[0]).all()
    assert not kept[1].any()
