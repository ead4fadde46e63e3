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
    """The layer's memory as layout.py describes it: [slot, head, row, dim], built from addresses alone."""
    record = layer_record(cache, layer)
    heads, dim, capacity = (int(record[f]) for f in (CacheLayer.KV_HEADS, CacheLayer.HEAD_DIM, CacheLayer.CAPACITY))
    rows = (cache.slots, heads, capacity)
    count = int(np.prod(rows))
    if record[CacheLayer.KV_TYPE] == KvType.INT8:
        keys = memory(record[CacheLayer.KEYS], np.uint8, count * dim)
        keys = keys.reshape(cache.slots, heads, capacity // TILE, dim // 4, TILE, 4).transpose(0, 1, 2, 4, 3, 5)
        values = memory(record[CacheLayer.VALUES], np.int8, count * dim).reshape(*rows, dim)
        scales = {
            f: memory(record[f], np.float32, count).reshape(rows)
            for f in (CacheLayer.KEY_SCALES, CacheLayer.VALUE_SCALES)
        }
    else:
        keys = memory(record[CacheLayer.KEYS], np.float32, count * dim)
        keys = keys.reshape(cache.slots, heads, capacity // TILE, dim, TILE).transpose(0, 1, 2, 4, 3)
        values = memory(record[CacheLayer.VALUES], np.float32, count * dim).reshape(*rows, dim)
        scales = {}
    return {CacheLayer.KEYS: keys, CacheLayer.VALUES: values, **scales}


def write(cache: KVCache, slot: int, position: int, token: int) -> None:
    """What a step does for one row: different bytes for every token, layer, head and dimension."""
    for layer in range(len(cache.geometry.layers)):
        for field, array in fields(cache, layer).items():
            row = _row(array, field, layer, token)
            if field is CacheLayer.KEYS:
                array[slot, :, position // TILE, position % TILE] = row.reshape(array.shape[1], *array.shape[4:])
            else:
                array[slot, :, position] = row


def gather(cache: KVCache, slot: int, layer: int, length: int) -> dict[CacheLayer, np.ndarray]:
    """Rows of positions [0, length) in temporal order, [length, heads, ...]."""
    out = {}
    for field, array in fields(cache, layer).items():
        rows = [cache.layers[layer].physical_row(position) for position in range(length)]
        if field is CacheLayer.KEYS:
            picked = [array[slot, :, row // TILE, row % TILE].reshape(array.shape[1], -1) for row in rows]
        else:
            picked = [array[slot, :, row] for row in rows]
        out[field] = np.array(picked)
    return out


def _row(array: np.ndarray, field: CacheLayer, layer: int, token: int) -> np.ndarray:
    """The value that `token` stands for: [heads, dim], or [heads] for a scale."""
    heads = array.shape[1]
    dim = int(np.prod(array.shape[4:])) if field is CacheLayer.KEYS else (array.shape[3] if array.ndim == 4 else 1)
    seed = np.arange(heads * dim) * 7 + token * 31 + int(field) * 3 + layer
    return (seed % 120).astype(array.dtype).reshape((heads, dim) if array.ndim != 3 else (heads,))


def holds(cache: KVCache, slot: int, tokens: list[int]) -> bool:
    for layer in range(len(cache.geometry.layers)):
        arrays = fields(cache, layer)
        for field, rows in gather(cache, slot, layer, len(tokens)).items():
            if any(
                not np.array_equal(row, _row(arrays[field], field, layer, t))
                for row, t in zip(rows, tokens, strict=True)
            ):
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
    max_examples=25, stateful_step_count=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
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
