"""PlainRows: memory that grows with a conversation. tests/cache/machine.py holds what they share with tiled ones."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from edge_llm.cache.kv_cache import CacheGeometry
from edge_llm.cache.plain_rows import PlainRows
from edge_llm.cache.snapshot import Snapshot
from edge_llm.cache.tiled_rows import LayerGeometry
from edge_llm.errors import SessionError
from edge_llm.kernels.layout import TILE, KvType
from edge_llm.model.cache_descriptor import CacheDescriptor
from tests.cache.rig import append, make, serves, taken


def test_memory_grows_with_the_conversation_and_goes_with_it() -> None:
    cache = make(KvType.F32, context=2000, storage=PlainRows, geometry=CacheGeometry((LayerGeometry(2, 8),)))
    slot, sizes = taken(cache), []
    assert cache.nbytes == 0
    for _ in range(20):
        append(cache, slot, list(range(cache.length(slot), cache.length(slot) + 100)))
        sizes.append(cache.nbytes // cache.layers[0].layer.row_bytes(KvType.F32))
    assert sorted(set(sizes)) == [256, 512, 1024, 2048]
    assert serves(cache, slot, list(range(2000)))
    assert cache.truncate(slot, 300)
    assert cache.nbytes == 512 * cache.layers[0].layer.row_bytes(KvType.F32)
    assert serves(cache, slot, list(range(300)))
    cache.release(slot)
    assert cache.nbytes == 0


@pytest.mark.parametrize("rows", [0, 1, 256, 257, 300, 513, 1000, 3000])
def test_what_a_conversation_takes_is_known_before(rows: int) -> None:
    """Twice as much as its tiles, at times: whoever counts bytes must know."""
    cache = make(KvType.F32, context=2000, storage=PlainRows)
    slot, other = taken(cache), taken(cache)
    append(cache, other, list(range(70)))
    append(cache, slot, list(range(rows)))
    assert cache.slot_bytes(slot) == cache.bytes_of(rows)
    assert cache.used_bytes == cache.nbytes == cache.bytes_of(rows) + cache.bytes_of(70)
    cache.truncate(slot, rows // 2)
    assert cache.used_bytes == cache.nbytes


def test_a_ring_never_grows_past_its_capacity() -> None:
    cache = make(KvType.F32, storage=PlainRows)
    slot = taken(cache)
    append(cache, slot, list(range(1000)))
    for layer in cache.plain_layers:
        assert layer.rows(slot)[0].shape[2] == layer.ring.capacity
    assert serves(cache, slot, list(range(1000)))


def test_a_whole_ring_is_there_from_the_first_row_on() -> None:
    """For providers whose compilers fix every size."""
    cache = make(KvType.F32, storage=partial(PlainRows, whole=True))
    slot = taken(cache)
    assert cache.used_bytes == 0
    for rows in (1, 100):
        append(cache, slot, list(range(cache.length(slot), cache.length(slot) + rows)))
        for layer in cache.plain_layers:
            assert layer.rows(slot)[0].shape[2] == layer.ring.capacity
        assert cache.nbytes == cache.used_bytes == cache.bytes_of(1) == cache.bytes_of(cache.limit)
    assert serves(cache, slot, list(range(101)))
    assert cache.truncate(slot, 90)
    assert serves(cache, slot, list(range(90)))
    cache.release(slot)
    assert cache.nbytes == 0


def test_kernels_find_nothing_there() -> None:
    cache = make(KvType.F32, storage=PlainRows)
    with pytest.raises(SessionError):
        CacheDescriptor(cache.descriptor_address)
    cache.check_integrity()


@pytest.mark.parametrize("name", ["global.keys", "local.values"])
def test_a_snapshot_of_keys_that_are_no_numbers_is_refused(name: str) -> None:
    """Stock ops add a mask to scores, which hides no NaN."""
    cache = make(KvType.F32, storage=PlainRows)
    slot = taken(cache)
    append(cache, slot, list(range(TILE)))
    snapshot = cache.snapshot(slot, 0, TILE)
    assert snapshot is not None
    arrays = {key: array.copy() for key, array in snapshot.arrays.items()}
    arrays[name].reshape(-1)[7] = np.nan
    assert cache.truncate(slot, 0)
    with pytest.raises(ValueError, match="not finite"):
        cache.restore(slot, Snapshot(0, TILE, arrays))
    cache.restore(slot, snapshot)
    assert serves(cache, slot, list(range(TILE)))


def test_plain_rows_are_float32() -> None:
    with pytest.raises(ValueError, match="float32"):
        make(KvType.INT8, storage=PlainRows)
