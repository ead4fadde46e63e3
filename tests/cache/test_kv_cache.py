"""KVCache against a plain model: what each slot holds, read back through the addresses that kernels get."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edge_llm.cache.kv_cache import CacheGeometry, KVCache
from edge_llm.cache.tiled_rows import LayerGeometry
from edge_llm.errors import ParameterError
from edge_llm.kernels.layout import CACHE_MAGIC, LAYER_FIELDS, TILE, UNBOUNDED, Cache, CacheLayer, KvType

GEOMETRY = CacheGeometry((LayerGeometry(2, 8), LayerGeometry(1, 16, window=100)))
CONTEXT = 3 * TILE + 5


def make(kv_type: KvType = KvType.INT8, slots: int = 3, context: int = CONTEXT) -> KVCache:
    return KVCache(GEOMETRY, slots=slots, context=context, kv_type=kv_type)


def descriptor(cache: KVCache) -> np.ndarray:
    length = Cache.FIRST_LAYER + LAYER_FIELDS * len(cache.geometry.layers)
    return np.ctypeslib.as_array((ctypes.c_int64 * length).from_address(cache.descriptor_address))


def layer_record(cache: KVCache, layer: int) -> np.ndarray:
    first = Cache.FIRST_LAYER + LAYER_FIELDS * layer
    return descriptor(cache)[first : first + LAYER_FIELDS]


def memory(address: int, kind: type, count: int) -> np.ndarray:
    size = count * np.dtype(kind).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(int(address)), kind)


def fields(cache: KVCache, layer: int) -> dict[CacheLayer, np.ndarray]:
    """The layer's memory in the shapes that layout.py gives, built from addresses alone."""
    record = layer_record(cache, layer)
    heads, dim, capacity = (int(record[f]) for f in (CacheLayer.KV_HEADS, CacheLayer.HEAD_DIM, CacheLayer.CAPACITY))
    head, tiles = (cache.slots, heads), capacity // TILE
    if record[CacheLayer.KV_TYPE] == KvType.INT8:
        shapes = {
            CacheLayer.KEYS: ((*head, tiles, dim // 4, TILE, 4), np.uint8),
            CacheLayer.VALUES: ((*head, tiles, TILE // 4, dim, 4), np.int8),
            CacheLayer.KEY_SCALES: ((*head, capacity), np.float32),
            CacheLayer.VALUE_SCALES: ((*head, capacity), np.float32),
        }
    else:
        shapes = {
            CacheLayer.KEYS: ((*head, tiles, dim, TILE), np.float32),
            CacheLayer.VALUES: ((*head, capacity, dim), np.float32),
        }
    return {
        field: memory(record[field], kind, int(np.prod(shape))).reshape(shape)
        for field, (shape, kind) in shapes.items()
    }


def place(array: np.ndarray, field: CacheLayer, slot: int, row: int) -> tuple[object, ...]:
    """The index of a physical row: what it selects has one entry a head, and one a dimension unless it is a scale."""
    tile, inside = divmod(row, TILE)
    if field is CacheLayer.KEYS:
        return (slot, slice(None), tile, slice(None), inside)
    if field is CacheLayer.VALUES and array.dtype == np.int8:
        return (slot, slice(None), tile, inside % (TILE // 4), slice(None), inside // (TILE // 4))
    return (slot, slice(None), row)


def write(cache: KVCache, slot: int, position: int, token: int) -> None:
    """What a step does for one row: different bytes for every token, layer, head and dimension."""
    for layer, rows in enumerate(cache.layers):
        for field, array in fields(cache, layer).items():
            index = place(array, field, slot, rows.physical_row(position))
            array[index] = content(array[index], field, layer, token)


def content(row: np.ndarray, field: CacheLayer, layer: int, token: int) -> np.ndarray:
    """What stands for `token` in a row of this shape."""
    seed = np.arange(row.size) * 7 + token * 31 + int(field) * 3 + layer
    return (seed % 120).astype(row.dtype).reshape(row.shape)


def holds(cache: KVCache, slot: int, tokens: list[int]) -> bool:
    """Whether the rows of positions 0, 1, ... are those of `tokens`, in every layer."""
    for layer, rows in enumerate(cache.layers):
        for field, array in fields(cache, layer).items():
            for position, token in enumerate(tokens):
                row = array[place(array, field, slot, rows.physical_row(position))]
                if not np.array_equal(row, content(row, field, layer, token)):
                    return False
    return True


class CacheMachine(RuleBasedStateMachine):
    """acquire, write + commit, truncate, fork and release in any order, beside lists of tokens."""

    @initialize(kv_type=st.sampled_from(KvType))
    def start(self, kv_type: KvType) -> None:
        self.cache = make(kv_type)
        self.model: dict[int, list[int]] = {}
        self.token = 0

    def slot(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.model)))

    @rule()
    def acquire(self) -> None:
        slot = self.cache.acquire()
        assert (slot is None) == (len(self.model) == self.cache.slots)
        if slot is not None:
            assert slot not in self.model
            self.model[slot] = []
            assert not any(array[slot].any() for layer in self.cache.layers for array in layer.arrays.values())

    @precondition(lambda self: self.model)
    @rule(data=st.data(), rows=st.integers(1, 70), dropped=st.integers(0, 3))
    def step(self, data: st.DataObject, rows: int, dropped: int) -> None:
        """Writes some rows and commits all but the last `dropped` of them, as after rejected drafts."""
        slot = self.slot(data)
        tokens = self.model[slot]
        rows = min(rows, CONTEXT - len(tokens))
        for i in range(rows):
            write(self.cache, slot, len(tokens) + i, self.token + i)
        kept = max(0, rows - dropped)
        self.cache.commit(slot, kept)
        tokens.extend(range(self.token, self.token + kept))
        self.token += rows

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        slot = self.slot(data)
        length = data.draw(st.integers(0, len(self.model[slot])))
        assert self.cache.truncate(slot, length)
        del self.model[slot][length:]

    @precondition(lambda self: len(self.model) > 1)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        source, target = data.draw(st.permutations(sorted(self.model)))[:2]
        length = data.draw(st.integers(0, len(self.model[source])))
        assert self.cache.fork(source, target, length)
        self.model[target] = self.model[source][:length]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slot = self.slot(data)
        self.cache.release(slot)
        del self.model[slot]

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check_integrity()
        assert self.cache.free_slots == self.cache.slots - len(self.model)
        for slot, tokens in self.model.items():
            assert self.cache.length(slot) == len(tokens)
            assert holds(self.cache, slot, tokens)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("kv_type", KvType)
def test_descriptor_tells_kernels_where_everything_is(kv_type: KvType) -> None:
    cache = KVCache(GEOMETRY, slots=2, context=100, kv_type=kv_type, generation=7)
    slot = cache.acquire()
    assert slot is not None
    cache.commit(slot, 42)
    header = descriptor(cache)
    assert header[Cache.MAGIC] == CACHE_MAGIC
    assert [header[f] for f in (Cache.GENERATION, Cache.LAYERS, Cache.SLOTS, Cache.CONTEXT)] == [7, 2, 2, 100]
    assert memory(header[Cache.LENGTHS], np.int64, 2)[slot] == 42
    for layer, window in ((0, UNBOUNDED), (1, 100)):
        record = layer_record(cache, layer)
        assert record[CacheLayer.CAPACITY] == 2 * TILE
        assert record[CacheLayer.SINKS] == 0
        assert record[CacheLayer.WINDOW] == window
        assert record[CacheLayer.KV_TYPE] == kv_type
        addresses = [int(record[f]) for f in range(4)]
        assert all(address % 64 == 0 for address in addresses)
        assert [bool(address) for address in addresses] == [True, True, kv_type is KvType.INT8, kv_type is KvType.INT8]


@pytest.mark.parametrize("length", [0, 1, TILE - 1, TILE, TILE + 1, 2 * TILE + 3])
def test_fork_copies_rows_at_any_length(length: int) -> None:
    cache = make()
    source, target = cache.acquire(), cache.acquire()
    assert source is not None
    assert target is not None
    for position in range(CONTEXT):
        write(cache, source, position, position)
        write(cache, target, position, 1000 + position)
    cache.commit(source, CONTEXT)
    cache.commit(target, CONTEXT)
    assert cache.fork(source, target, length)
    assert cache.length(target) == length
    assert holds(cache, target, list(range(length)))
    assert holds(cache, source, list(range(CONTEXT)))


def test_layers_refuse_together_when_one_has_lost_rows() -> None:
    cache = make()
    source, target = cache.acquire(), cache.acquire()
    assert source is not None
    assert target is not None
    cache.commit(source, 3 * TILE)
    cache.layers[1].capacity = 2 * TILE  # as if this layer were a short ring: it holds the last 128 of 192 rows
    assert not cache.truncate(source, 160)
    assert not cache.fork(source, target, 160)
    assert (cache.length(source), cache.length(target)) == (3 * TILE, 0)
    assert cache.truncate(source, 164)
    assert cache.length(source) == 164


def test_capacity_is_in_tiles_but_the_context_is_the_limit() -> None:
    cache = make(context=TILE + 1)
    slot = cache.acquire()
    assert slot is not None
    assert cache.layers[0].capacity == 2 * TILE
    cache.commit(slot, TILE + 1)
    with pytest.raises(ValueError, match="cannot commit 1 rows at 65 of 65"):
        cache.commit(slot, 1)


def test_faults_of_the_caller_are_refused() -> None:
    cache = make()
    slot = cache.acquire()
    assert slot is not None
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
    slot = cache.acquire()
    assert slot is not None
    lengths = memory(descriptor(cache)[Cache.LENGTHS], np.int64, cache.slots)
    lengths[slot] = CONTEXT + 1
    with pytest.raises(AssertionError, match=f"slot {slot}"):
        cache.check_integrity()
    lengths[slot] = 0
    descriptor(cache)[Cache.MAGIC] = 1
    with pytest.raises(AssertionError, match="descriptor"):
        cache.check_integrity()


def test_bytes_are_counted() -> None:
    for kv_type, row_bytes in ((KvType.INT8, 2 * (2 * 12 + 20)), (KvType.F32, 2 * (2 * 32 + 64))):
        cache = make(kv_type)
        slot = cache.acquire()
        assert slot is not None
        assert GEOMETRY.row_bytes(kv_type) == row_bytes
        assert cache.used_bytes == 0
        cache.commit(slot, TILE + 1)
        assert cache.used_bytes == 2 * TILE * row_bytes
        assert cache.nbytes >= cache.slots * 4 * TILE * row_bytes


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
    cache = KVCache(geometry, slots=4, context=16384, kv_type=KvType.F32)
    assert cache.nbytes == 4 * 16384 * 8192
    slot = cache.acquire()
    assert slot is not None
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
        KVCache(CacheGeometry((LayerGeometry(1024, 1024),)), slots=1024, context=1 << 24, kv_type=KvType.F32)
    assert caught.value.hint
