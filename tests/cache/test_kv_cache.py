"""KVCache: its books, what it keeps and what it gives back. tests/cache/test_machine.py runs all of it in any order."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from edge_llm.cache.kv_cache import CacheGeometry, KVCache
from edge_llm.cache.tiled_rows import LayerGeometry
from edge_llm.errors import ParameterError
from edge_llm.kernels.layout import CACHE_MAGIC, MAX_POSITION, TILE, UNBOUNDED, Cache, CacheLayer, KvType
from tests.cache.rig import (
    CONTEXT,
    GEOMETRY,
    append,
    descriptor,
    holds,
    layer_record,
    make,
    memory,
    taken,
    write,
)


@pytest.mark.parametrize("kv_type", KvType)
def test_descriptor_tells_kernels_where_everything_is(kv_type: KvType) -> None:
    cache = KVCache(GEOMETRY, slots=2, context=100, kv_type=kv_type, max_chunk=50, generation=7)
    slot = taken(cache)
    cache.commit(slot, 42)
    header = descriptor(cache)
    assert header[Cache.MAGIC] == CACHE_MAGIC
    assert [header[f] for f in (Cache.GENERATION, Cache.LAYERS, Cache.SLOTS, Cache.LIMIT)] == [7, 3, 2, MAX_POSITION]
    for field in (Cache.LENGTHS, Cache.WRITTEN):
        assert memory(header[field], np.int64, 2)[slot] == 42
    for layer, (capacity, sinks, window) in enumerate([(3 * TILE, TILE, 36), (2 * TILE, 0, 70), (3 * TILE, TILE, 36)]):
        record = layer_record(cache, layer)
        assert record[CacheLayer.CAPACITY] == capacity
        assert record[CacheLayer.SINKS] == sinks
        assert record[CacheLayer.WINDOW] == window
        assert record[CacheLayer.KV_TYPE] == kv_type
        addresses = [int(record[f]) for f in range(4)]
        assert all(address % 64 == 0 for address in addresses)
        assert [bool(address) for address in addresses] == [True, True, kv_type is KvType.INT8, kv_type is KvType.INT8]


def test_a_context_that_the_sinks_would_fill_does_not_slide() -> None:
    cache = make(context=TILE)
    assert not cache.slides
    assert cache.limit == descriptor(cache)[Cache.LIMIT] == TILE
    record = layer_record(cache, 0)
    assert [record[f] for f in (CacheLayer.CAPACITY, CacheLayer.SINKS, CacheLayer.WINDOW)] == [TILE, 0, UNBOUNDED]
    slot = taken(cache)
    cache.commit(slot, TILE)
    with pytest.raises(ValueError, match="cannot commit 1 rows at 64 of 64"):
        cache.commit(slot, 1)
    assert make(context=TILE + 1).slides
    assert make(context=1, sinks=0).slides


def test_a_conversation_that_slides_may_have_as_many_positions_as_steps_can_name() -> None:
    cache = make()
    slot = taken(cache)
    cache.commit(slot, MAX_POSITION)
    with pytest.raises(ValueError, match="cannot commit 1 rows"):
        cache.commit(slot, 1)
    cache.check_integrity()


@pytest.mark.parametrize("length", [0, 1, TILE - 1, TILE, TILE + 1, 2 * TILE + 3])
def test_fork_copies_rows_at_any_length(length: int) -> None:
    cache = make(geometry=CacheGeometry((LayerGeometry(2, 8), LayerGeometry(1, 16))))
    source, target = taken(cache), taken(cache)
    append(cache, source, list(range(CONTEXT)))
    append(cache, target, list(range(1000, 1000 + CONTEXT)))
    assert cache.fork(source, target, length)
    assert cache.length(target) == length
    assert holds(cache, target, list(range(length)))
    assert holds(cache, source, list(range(CONTEXT)))


def test_layers_refuse_together_when_one_has_lost_rows() -> None:
    """The ring of the second layer holds 192 rows, of which the next one needs 69."""
    cache = make()
    source, target = taken(cache), taken(cache)
    tokens = list(range(300))
    append(cache, source, tokens[:190])
    write(cache, source, 190, [7] * 10)  # rejected, but the first 8 rows are gone
    assert cache.truncate(source, 100)
    append(cache, source, tokens[100:190])
    assert not cache.truncate(source, 76)
    assert not cache.fork(source, target, 76)
    assert (cache.length(source), cache.length(target)) == (190, 0)
    assert cache.fork(source, target, 77)
    assert cache.truncate(source, 77)
    assert holds(cache, source, tokens[:77])
    assert holds(cache, target, tokens[:77])
    assert cache.truncate(source, 0)


def test_faults_of_the_caller_are_refused() -> None:
    cache = make()
    slot = taken(cache)
    for call in (
        lambda: cache.length(slot + 1),
        lambda: cache.release(-1),
        lambda: cache.truncate(slot, 1),
        lambda: cache.truncate(slot, -1),
        lambda: cache.commit(slot, -1),
        lambda: cache.fork(slot, slot, 0),
        lambda: cache.fork(slot, slot + 1, 0),
    ):
        with pytest.raises(ValueError, match=r"slot|commit"):
            call()
    cache.release(slot)
    with pytest.raises(ValueError, match="not taken"):
        cache.release(slot)


def test_integrity_check_sees_broken_books() -> None:
    cache = make()
    slot = taken(cache)
    lengths = memory(descriptor(cache)[Cache.LENGTHS], np.int64, cache.slots)
    lengths[slot] = MAX_POSITION + 1
    with pytest.raises(AssertionError, match=f"slot {slot}"):
        cache.check_integrity()
    lengths[slot] = 0
    descriptor(cache)[Cache.MAGIC] = 1
    with pytest.raises(AssertionError, match="descriptor"):
        cache.check_integrity()


def test_bytes_are_counted() -> None:
    for kv_type, row_bytes in ((KvType.INT8, 2 * (4 * 12 + 20)), (KvType.F32, 2 * (4 * 32 + 64))):
        cache = make(kv_type)
        slot = taken(cache)
        assert GEOMETRY.row_bytes(kv_type) == row_bytes
        assert cache.used_bytes == 0
        cache.commit(slot, TILE + 1)
        assert cache.used_bytes == 2 * TILE * row_bytes
        assert cache.nbytes >= cache.slots * 3 * TILE * row_bytes


@pytest.mark.parametrize("kv_type", KvType)
@pytest.mark.parametrize("context", [TILE, 1024, 1100])
def test_a_released_slot_holds_zeros_and_its_neighbours_what_they_held(kv_type: KvType, context: int) -> None:
    """Slots begin and end inside pages of memory."""
    cache = make(kv_type, slots=3, context=context)
    arrays = [array for layer in cache.layers for array in layer.arrays.values()]
    for slot in range(3):
        assert cache.acquire() == slot
    for array in arrays:
        array[:] = 1
    cache.release(1)
    for array in arrays:
        assert not array[1].any()
        assert (array[[0, 2]] == 1).all()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc to see resident memory")
def test_memory_follows_use() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    geometry = CacheGeometry((LayerGeometry(4, 64),) * 4)
    before = resident()
    cache = KVCache(geometry, slots=4, context=16384, kv_type=KvType.F32, max_chunk=TILE)
    assert cache.nbytes == 4 * (16384 + TILE) * 8192
    slot = taken(cache)
    assert resident() - before < 8 << 20
    for layer in cache.layers:
        layer.arrays[CacheLayer.VALUES][slot] = 1.0
    assert resident() - before > 60 << 20
    cache.release(slot)
    assert resident() - before < 8 << 20


def test_close_makes_the_descriptor_void() -> None:
    cache = make()
    cache.close()
    cache.close()
    assert descriptor(cache)[Cache.MAGIC] == 0
    assert cache.acquire() is None


def test_memory_that_cannot_be_reserved_is_named() -> None:
    with pytest.raises(ParameterError, match="cannot be reserved") as caught:
        KVCache(
            CacheGeometry((LayerGeometry(1024, 1024),)), slots=1024, context=1 << 24, kv_type=KvType.F32, max_chunk=1
        )
    assert caught.value.hint
