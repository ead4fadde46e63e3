"""The arithmetic of rings, against a ring that is simply written."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_llm.cache.ring_geometry import RingGeometry, runs
from edge_llm.kernels.layout import TILE, UNBOUNDED
from tests.reference.attention import physical_row

GEOMETRIES = st.builds(
    RingGeometry.of,
    st.none() | st.integers(1, 300),
    context=st.integers(1, 600),
    sinks=st.sampled_from([0, TILE, 2 * TILE]),
    max_chunk=st.integers(1, 130),
)


@given(GEOMETRIES, st.integers(0, 1500), st.data())
def test_what_is_held_is_what_was_not_overwritten(ring: RingGeometry, written: int, data: st.DataObject) -> None:
    length = data.draw(st.integers(max(0, written - 200), written) | st.integers(0, written))
    if ring.window == UNBOUNDED:
        written, length = min(written, ring.capacity), min(length, ring.capacity)
    owners = np.full(ring.capacity, -1)
    for position in range(written):
        assert ring.physical_row(position) == physical_row(position, ring.sinks, ring.capacity)
        owners[ring.physical_row(position)] = position
    there = {int(position) for position in owners if 0 <= position < length}
    sinks, others = ring.held(length, written)
    assert {*sinks, *others} == there
    tiles = {int(row) // TILE for row in np.flatnonzero((owners >= 0) & (owners < length))}
    assert set(np.flatnonzero(ring.kept_tiles(length, written)).tolist()) == tiles
    for start in range(0, length, 7):
        for stop in {start + 1, min(start + TILE, length), length}:
            assert ring.holds(start, stop, written) == there.issuperset(range(start, stop))
    if ring.serves(length, written):
        assert all(k in there for k in range(length) if k < ring.sinks or k > length - ring.window)


@given(GEOMETRIES, st.integers(0, 2000), st.integers(0, 130))
def test_a_step_never_overwrites_what_its_rows_attend_to(ring: RingGeometry, length: int, rows: int) -> None:
    """Nor what comes after it if nothing of it is committed."""
    room = ring.ring_rows - ring.window + 1 if ring.window < UNBOUNDED else ring.capacity - length
    assert (rows > room) or ring.serves(length, length + rows)


@pytest.mark.parametrize(
    ("window", "context", "sinks", "max_chunk", "expected"),
    [
        (None, 8192, TILE, 256, RingGeometry(8448, TILE, 8128)),
        (None, 100, TILE, 28, RingGeometry(128, TILE, 36)),
        (None, 100, TILE, 29, RingGeometry(192, TILE, 36)),
        (None, 65, TILE, 1, RingGeometry(128, TILE, 1)),
        (None, 64, TILE, 256, RingGeometry(64, 0, UNBOUNDED)),
        (None, 1, TILE, 256, RingGeometry(64, 0, UNBOUNDED)),
        (None, 100, 0, 28, RingGeometry(128, 0, 100)),
        (512, 8192, TILE, 256, RingGeometry(768, 0, 512)),
        (512, 10, TILE, 1, RingGeometry(576, 0, 512)),
    ],
)
def test_the_design(window: int | None, context: int, sinks: int, max_chunk: int, expected: RingGeometry) -> None:
    assert RingGeometry.of(window, context=context, sinks=sinks, max_chunk=max_chunk) == expected


@pytest.mark.parametrize("wrong", [{"sinks": 10}, {"sinks": -TILE}, {"context": 0}, {"max_chunk": 0}, {"window": 0}])
def test_impossible_rings_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="no ring has"):
        RingGeometry.of(**{"window": 5, "context": 100, "sinks": TILE, "max_chunk": 1} | wrong)


@given(st.lists(st.booleans(), max_size=12))
def test_runs_cover_what_is_true(tiles: list[bool]) -> None:
    found = list(runs(np.array(tiles, np.bool_)))
    assert [i for begin, end in found for i in range(begin, end)] == [i for i, tile in enumerate(tiles) if tile]
    assert all(before[1] < after[0] for before, after in pairwise(found))
