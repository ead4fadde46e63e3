"""KVCache: its books, what it keeps and what it gives back. tests/cache/machine.py does all of it in any order."""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path

import numpy as np
import pytest

from edge_llm.cache.kv_cache import CacheGeometry, KVCache
from edge_llm.cache.tiled_rows import LayerGeometry, TiledRows
from edge_llm.errors import ParameterError
from edge_llm.kernels.layout import CACHE_MAGIC, MAX_POSITION, TILE, UNBOUNDED, Cache, CacheLayer, KvType
from tests.cache.rig import (
    CONTEXT,
    GEOMETRY,
    MAX_CHUNK,
    append,
    descriptor,
    layer_record,
    make,
    memory,
    serves,
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
    cache = make(geometry=CacheGeometry((LayerGeometry(2, 8),) * 2))
    source, target = taken(cache), taken(cache)
    append(cache, source, list(range(CONTEXT)))
    append(cache, target, list(range(1000, 1000 + CONTEXT)))
    assert cache.fork(source, target, length)
    assert cache.length(target) == length
    assert serves(cache, target, list(range(length)))
    assert serves(cache, source, list(range(CONTEXT)))


@pytest.mark.parametrize("length", [10, TILE, TILE + 9, 150, 200, 300, 3 * CONTEXT])
def test_rows_that_both_have_are_not_copied(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two forks of one conversation, in layers whose rings wrap; both slide at the greatest length."""
    copied: list[int] = []
    copy = TiledRows.copy

    def counted(self: TiledRows, source: int, target: int, tiles: np.ndarray) -> None:
        copied.append(int(tiles.sum()))
        copy(self, source, target, tiles)

    for apart in (1, 9, TILE, TILE + 1):
        cache = make()
        source, target = taken(cache), taken(cache)
        same = max(0, length - apart)
        append(cache, source, list(range(same)))
        assert cache.fork(source, target, same)
        append(cache, source, list(range(same, length)))
        append(cache, target, list(range(2000, 2000 + length - same)))
        copied.clear()
        monkeypatch.setattr(TiledRows, "copy", counted)
        assert cache.fork(source, target, length, same=same)
        monkeypatch.undo()
        assert max(copied) <= -(-apart // TILE) + 1
        append(cache, target, [7] * 3)
        assert serves(cache, target, [*range(length), *[7] * 3])
        assert serves(cache, source, list(range(length)))


def test_a_slot_that_was_written_further_gets_all_rows() -> None:
    """Rejected rows of the target have overwritten some that both had."""
    cache = make()
    source, target = taken(cache), taken(cache)
    append(cache, source, list(range(190)))
    assert cache.fork(source, target, 190)
    write(cache, target, 190, [7] * MAX_CHUNK)
    assert cache.fork(source, target, 190, same=189)
    assert cache.truncate(target, 100)
    append(cache, target, [7])
    assert serves(cache, target, [*range(100), 7])


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
    assert serves(cache, source, tokens[:77])
    assert serves(cache, target, tokens[:77])
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
    written = memory(descriptor(cache)[Cache.WRITTEN], np.int64, cache.slots)
    for wrong in (-1, 1000):  # rows that nobody wrote; rows that have overwritten what comes next
        written[slot] = wrong
        with pytest.raises(AssertionError, match=f"slot {slot} has lost"):
            cache.check_integrity()
    written[slot] = 0
    for field in (Cache.MAGIC, Cache.LIMIT, Cache.FIRST_LAYER + CacheLayer.SINKS):
        old, descriptor(cache)[field] = descriptor(cache)[field], 1
        with pytest.raises(AssertionError, match="descriptor"):
            cache.check_integrity()
        descriptor(cache)[field] = old
    cache.check_integrity()


def test_integrity_check_sees_rows_written_past_the_end() -> None:
    cache = make()
    values = cache.layers[1].arrays[CacheLayer.VALUES]
    (ctypes.c_char * 1).from_address(values.ctypes.data + values.nbytes)[0] = 1
    with pytest.raises(AssertionError, match="past the end of VALUES"):
        cache.check_integrity()


@pytest.mark.parametrize(("kv_type", "row_bytes", "local_bytes"), [(KvType.INT8, 96, 40), (KvType.F32, 256, 128)])
def test_bytes_are_counted(kv_type: KvType, row_bytes: int, local_bytes: int) -> None:
    """Global layers take bytes for each token up to the context, the local one for its ring of 192 rows."""
    cache = make(kv_type)
    slot = taken(cache)
    assert GEOMETRY.row_bytes(kv_type) == row_bytes
    assert CacheGeometry((LayerGeometry(1, 16, window=70),)).row_bytes(kv_type) == local_bytes
    assert cache.used_bytes == 0
    for length, tiles, local_tiles in [(1, 1, 1), (65, 2, 2), (197, 4, 3), (320, 5, 3), (5000, 5, 3)]:
        append(cache, slot, list(range(cache.length(slot), length)))
        assert cache.used_bytes == TILE * (tiles * row_bytes + local_tiles * local_bytes)
    assert cache.nbytes >= cache.slots * TILE * (5 * row_bytes + 3 * local_bytes)
    assert cache.truncate(slot, 0)
    assert cache.used_bytes == 0


@pytest.mark.parametrize("kv_type", KvType)
@pytest.mark.parametrize("context", [TILE, 1024, 1100])
@pytest.mark.parametrize("platform", [sys.platform, "darwin"])
def test_a_released_slot_holds_zeros_and_its_neighbours_what_they_held(
    kv_type: KvType, context: int, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots begin and end inside pages of memory."""
    monkeypatch.setattr(sys, "platform", platform)
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
    rows = 4 * (16384 + TILE) * 8192
    assert rows < cache.nbytes < 1.001 * rows
    slot = taken(cache)
    assert resident() - before < 8 << 20
    cache.commit(slot, 16384)
    for layer in cache.layers:
        layer.arrays[CacheLayer.VALUES][slot] = 1.0
    assert resident() - before > 60 << 20
    cache.truncate(slot, 4096)
    assert 15 << 20 < resident() - before < 20 << 20
    cache.release(slot)
    assert resident() - before < 8 << 20


@pytest.mark.parametrize("rows", [0, 1, 64, 65, 130, 134, CONTEXT, 5 * CONTEXT])
def test_what_a_conversation_takes_is_known_before(rows: int) -> None:
    """To the byte while no ring has wrapped, and never less."""
    cache = make()
    slot, other = taken(cache), taken(cache)
    append(cache, other, range(70))
    append(cache, slot, range(rows))
    assert cache.slot_bytes(slot) <= cache.bytes_of(rows)
    if rows <= 130:
        assert cache.slot_bytes(slot) == cache.bytes_of(rows)
    assert cache.slot_bytes(slot) + cache.slot_bytes(other) == cache.used_bytes


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
