"""Runs the attention kernels over rings in guarded memory, and holds them against the slow truth."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from edge_llm.kernels.attention import attention_merge, attention_plan, attention_prepare, attention_task
from edge_llm.kernels.layout import (
    CALL_FIELDS,
    LAYER_FIELDS,
    SEGMENT_RECORD_BYTES,
    TILE,
    UNBOUNDED,
    AttentionCall,
    CacheLayer,
    KvType,
    attention_scratch_bytes,
)
from edge_llm.kernels.tile_product import LOWERING
from tests.kernels.guard_pages import POISON, guarded, guarded_copy, untouched
from tests.reference.attention import Rules, attend, physical_row, turn

EPS = 1e-5
TOLERANCE = {KvType.INT8: 1e-3, KvType.F32: 5e-6}
"""largest error, as a part of the largest stored value"""


@dataclass(frozen=True)
class Shape:
    """One attention layer and its ring."""

    heads: int = 3
    kv_heads: int = 1
    dim: int = 64
    kv_type: KvType = KvType.INT8
    slots: int = 1
    capacity: int = 8 * TILE
    sinks: int = 0
    window: int = UNBOUNDED
    rotary_dim: int = 0
    norms: bool = False
    softcap: float = 0.0
    sink_rope: bool = False

    @property
    def rules(self) -> Rules:
        return Rules(1 / math.sqrt(self.dim), self.window, self.sinks, self.softcap)


@dataclass(frozen=True)
class Segment:
    """Rows of a step: qkv float32 [rows, heads + 2 * kv_heads, dim], for `slot` from `position` on."""

    slot: int
    position: int
    qkv: np.ndarray


def random_rows(shape: Shape, rows: int, seed: int = 1) -> np.ndarray:
    """qkv of that many rows; some heads point at a few keys only."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, shape.heads + 2 * shape.kv_heads, shape.dim))
    x[:, : shape.heads] *= np.linspace(0.5, 6, shape.heads)[:, None]
    return x.astype(np.float32)


class Rig:
    """The rings of one layer, full of stale rows, and steps over them."""

    def __init__(self, shape: Shape, *, seed: int = 0, at_end: bool = True) -> None:
        self.shape, self._at_end = shape, at_end
        self.arrays = self._allocate(np.random.default_rng(seed))
        self.layer = np.zeros(LAYER_FIELDS, np.int64)
        for field, array in self.arrays.items():
            self.layer[field] = array.ctypes.data
        self.layer[CacheLayer.CAPACITY], self.layer[CacheLayer.SINKS] = shape.capacity, shape.sinks
        self.layer[CacheLayer.WINDOW], self.layer[CacheLayer.KV_TYPE] = shape.window, shape.kv_type
        self.layer[CacheLayer.KV_HEADS], self.layer[CacheLayer.HEAD_DIM] = shape.kv_heads, shape.dim
        self.call = np.zeros(CALL_FIELDS, np.int64)
        self.gammas = 1 + 0.1 * np.random.default_rng(1).standard_normal((2, shape.dim)).astype(np.float32)
        self._buffers: dict[tuple[str, int], np.ndarray] = {}  # guarded pages are dear, and steps are many

    def _allocate(self, rng: np.random.Generator) -> dict[CacheLayer, np.ndarray]:
        s = self.shape
        rings, tiles = (s.slots, s.kv_heads), s.capacity // TILE
        if s.kv_type == KvType.INT8:
            codes = rng.integers(0, 256, (*rings, tiles, TILE * s.dim))
            scales = rng.uniform(0.1, 1, (2, *rings, s.capacity)).astype(np.float32)
            stale = {
                CacheLayer.KEYS: codes.astype(np.uint8).reshape(*rings, tiles, s.dim // 4, TILE, 4),
                CacheLayer.VALUES: codes.astype(np.int8).reshape(*rings, tiles, TILE // 4, s.dim, 4),
                CacheLayer.KEY_SCALES: scales[0],
                CacheLayer.VALUE_SCALES: scales[1],
            }
        else:
            numbers = 50 * rng.standard_normal((2, *rings, tiles, TILE * s.dim)).astype(np.float32)
            stale = {
                CacheLayer.KEYS: numbers[0].reshape(*rings, tiles, s.dim, TILE),
                CacheLayer.VALUES: numbers[1].reshape(*rings, tiles, TILE, s.dim),
            }
        return {field: guarded_copy(array, at_end=self._at_end) for field, array in stale.items()}

    # --- steps ---

    def step(self, segments: Sequence[Segment], *, threads: int = 1, order: int = 1) -> np.ndarray:
        """Run a step: float32 [rows, heads, dim]. `order` -1 runs each phase backwards. Nothing else is written."""
        out = self.fill_call(segments, threads)
        call = self.call.ctypes.data
        assert attention_plan(call) == self.call[AttentionCall.TASKS]
        heads = int(self.call[AttentionCall.ROWS]) * self.shape.kv_heads
        tasks, merges = (int(self.call[field]) for field in (AttentionCall.TASKS, AttentionCall.MERGES))
        for count, run in ((heads, attention_prepare), (tasks, attention_task), (merges, attention_merge)):
            for i in range(count)[::order]:
                run(call, i)
        assert all(untouched(array) for array in (*self._buffers.values(), *self.arrays.values()))
        return out.copy()

    def fill_call(self, segments: Sequence[Segment], threads: int) -> np.ndarray:
        """Write the call record of a step; its poisoned output."""
        s, call = self.shape, self.call
        table, positions = [], []
        for segment in segments:
            table.append((segment.slot, len(positions), len(segment.qkv), segment.position))
            positions += range(segment.position, segment.position + len(segment.qkv))
        rows = len(positions)
        size = attention_scratch_bytes(max_rows=rows, heads=s.heads, head_dim=s.dim, capacity=s.capacity)
        scratch = self._buffer("scratch", (-(-size // 64) * 64,), np.uint8)
        out = self._buffer("out", (rows, s.heads, s.dim), np.float32)
        call[:] = 0
        call[AttentionCall.QKV] = self._input("qkv", np.concatenate([segment.qkv for segment in segments]))
        call[AttentionCall.OUT], call[AttentionCall.ROWS] = out.ctypes.data, rows
        call[AttentionCall.SEGMENTS] = self._input("segments", np.array(table, np.int32))
        call[AttentionCall.SEGMENT_COUNT], call[AttentionCall.LAYER] = len(segments), self.layer.ctypes.data
        call[AttentionCall.HEADS], call[AttentionCall.KV_HEADS] = s.heads, s.kv_heads
        call[AttentionCall.HEAD_DIM], call[AttentionCall.ROTARY_DIM] = s.dim, s.rotary_dim
        call[AttentionCall.SCALE] = np.float64(s.rules.scale).view(np.int64)
        call[AttentionCall.SOFTCAP] = np.float64(s.softcap).view(np.int64)
        call[AttentionCall.EPS] = np.float64(EPS).view(np.int64)
        call[AttentionCall.SCRATCH], call[AttentionCall.SCRATCH_BYTES] = scratch.ctypes.data, scratch.nbytes
        call[AttentionCall.SEGMENT_RECORDS] = self._buffer(
            "records", (rows * SEGMENT_RECORD_BYTES,), np.uint8
        ).ctypes.data
        call[AttentionCall.THREADS] = threads
        if s.norms:
            call[AttentionCall.Q_NORM] = self._input("q_norm", self.gammas[0])
            call[AttentionCall.K_NORM] = self._input("k_norm", self.gammas[1])
        if s.rotary_dim and rows:
            call[AttentionCall.ROPE] = self._input("rope", np.stack([self.rope(p) for p in positions]))
            if s.sink_rope:
                call[AttentionCall.SINK_ROPE] = self._input("sinks", np.stack([self.sink_rope(p) for p in positions]))
        return out

    def _buffer(self, name: str, shape: Sequence[int], kind: type[np.generic]) -> np.ndarray:
        key = name, int(np.prod(shape)) * np.dtype(kind).itemsize
        if key not in self._buffers:
            self._buffers[key] = guarded((key[1],), np.uint8, at_end=self._at_end)
        self._buffers[key][...] = POISON
        return self._buffers[key].view(kind).reshape(shape)

    def _input(self, name: str, values: np.ndarray) -> int:
        buffer = self._buffer(name, values.shape, values.dtype.type)
        buffer[...] = values
        return buffer.ctypes.data

    def rope(self, position: int) -> np.ndarray:
        half = self.shape.rotary_dim // 2
        angles = position * 100.0 ** -(np.arange(half) / half)
        return np.concatenate([np.cos(angles), np.sin(angles)]).astype(np.float32)

    def sink_rope(self, position: int) -> np.ndarray:
        return self.rope(min(position, self.shape.window + self.shape.sinks - 1))

    # --- the truth ---

    def stored(self, slot: int, position: int) -> tuple[np.ndarray, np.ndarray]:
        """Key and value of a position as the ring holds them: float64 [kv_heads, dim] each."""
        s, arrays = self.shape, self.arrays
        tile, row = divmod(physical_row(position, s.sinks, s.capacity), TILE)
        keys = arrays[CacheLayer.KEYS][slot, :, tile]
        values = arrays[CacheLayer.VALUES][slot, :, tile]
        if s.kv_type == KvType.F32:
            return keys[..., row].astype(np.float64), values[:, row].astype(np.float64)
        key_scale, value_scale = (
            arrays[field][slot, :, TILE * tile + row, None].astype(np.float64)
            for field in (CacheLayer.KEY_SCALES, CacheLayer.VALUE_SCALES)
        )
        key = keys[:, :, row].reshape(s.kv_heads, s.dim).astype(np.float64) - 128
        return key * key_scale, values[:, row % 16, :, row // 16] * value_scale

    def truth(self, segment: Segment) -> np.ndarray:
        """float64 [rows, heads, dim] of a segment that has just been run, from what the ring holds."""
        s = self.shape
        oldest, end = segment.position - s.window + 1, segment.position + len(segment.qkv)
        rows = [k for k in range(end) if k < s.sinks or k >= oldest]
        keys, values = np.zeros((2, end, s.kv_heads, s.dim))
        for k in rows:
            keys[k], values[k] = self.stored(segment.slot, k)
        self.largest = np.abs(values).max()
        return attend(*self.queries(segment), keys, values, segment.position, s.rules)

    def queries(self, segment: Segment) -> tuple[np.ndarray, np.ndarray]:
        """Normed and turned: float64 [rows, heads, dim], and those that meet sinks."""
        s = self.shape
        given, gamma = segment.qkv[:, : s.heads], self.gammas[0] if s.norms else None
        positions = range(segment.position, segment.position + len(given))
        queries = turn(given, self._ropes(self.rope, positions), gamma, EPS)
        return queries, turn(given, self._ropes(self.sink_rope, positions), gamma, EPS) if s.sink_rope else queries

    def keys(self, segment: Segment) -> np.ndarray:
        """Normed and turned: float64 [rows, kv_heads, dim]."""
        s = self.shape
        given, gamma = segment.qkv[:, s.heads : s.heads + s.kv_heads], self.gammas[1] if s.norms else None
        positions = range(segment.position, segment.position + len(given))
        return turn(given, self._ropes(self.rope, positions), gamma, EPS)

    def _ropes(self, rope: Callable[[int], np.ndarray], positions: range) -> np.ndarray | None:
        """[rows, 1, rotary_dim]: one for all heads of a row."""
        return np.array([rope(p) for p in positions])[:, None] if self.shape.rotary_dim and positions else None

    def check(self, segments: Sequence[Segment], **options: int) -> np.ndarray:
        """Run a step and compare it with the truth."""
        out = self.step(segments, **options)
        first = 0
        for segment in segments:
            rows = out[first : first + len(segment.qkv)]
            error = np.abs(rows - self.truth(segment)).max(initial=0)
            assert error <= TOLERANCE[self.shape.kv_type] * self.largest, (self.shape, segment.position, error)
            first += len(segment.qkv)
        return out


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two float32 arrays are equal bit for bit."""
    return a.shape == b.shape and bool(np.array_equal(a.view(np.uint32), b.view(np.uint32)))


def chunks(qkv: np.ndarray, sizes: Sequence[int], slot: int = 0) -> Iterator[Segment]:
    """Rows of one conversation in chunks of `sizes`, taken round and round."""
    position, i = 0, 0
    while position < len(qkv):
        n = sizes[i % len(sizes)]
        yield Segment(slot, position, qkv[position : position + n])
        position, i = position + n, i + 1


def run(
    rig: Rig, qkv: np.ndarray, sizes: Sequence[int], *, slot: int = 0, threads: int = 1, order: int = 1
) -> np.ndarray:
    """A conversation in chunks, a step each: float32 [rows, heads, dim]."""
    return np.concatenate([rig.step([part], threads=threads, order=order) for part in chunks(qkv, sizes, slot)])


# --- checks that every lowering must pass ---


def check_shape(shape: Shape, rows: int = 150) -> None:
    """A prompt in two chunks and some decode rows are right, at both ends of a page."""
    for at_end in (True, False):
        rig = Rig(shape, at_end=at_end)
        for segment in chunks(random_rows(shape, rows), (rows - 45, 43, 1, 1)):
            rig.check([segment], threads=2)


def check_independence(shape: Shape, rows: int) -> None:
    """A row has the same bits alone and in any chunk, with any threads, order and neighbours, whatever is stale."""
    qkv = random_rows(shape, rows)
    alone = run(Rig(shape), qkv, (1,))
    for seed, (sizes, threads, order) in enumerate(
        [((rows,), 1, 1), ((1,), 2, -1), ((1,), 7, 1), ((7, 64, 2), 1, -1), ((50,), 16, 1), ((90, 1, 1), 4, 1)]
    ):
        assert same_bits(run(Rig(shape, seed=seed), qkv, sizes, threads=threads, order=order), alone), (sizes, threads)
    batch = Rig(replace(shape, slots=3), seed=9)
    others = [random_rows(shape, rows, seed) for seed in (2, 3)]
    got = []
    for one, two, three in zip(
        chunks(others[0], (33,), 2), chunks(qkv, (33,), 0), chunks(others[1], (33,), 1), strict=True
    ):
        got.append(batch.step([one, two, three], threads=2)[len(one.qkv) : -len(three.qkv)])
    assert same_bits(np.concatenate(got), alone)


def check_ring(shape: Shape, rows: int, largest_chunk: int) -> None:
    """A ring that wraps gives the bits of a full cache, in every chunking; both are right."""
    qkv = random_rows(shape, rows)
    full = Rig(replace(shape, capacity=-(-rows // TILE) * TILE), seed=3)
    expected = np.concatenate([full.check([part]) for part in chunks(qkv, (largest_chunk,))])
    for seed, sizes in enumerate([(largest_chunk,), (1, largest_chunk - 1, 3), (17,)]):
        ring = Rig(shape, seed=seed)
        got = [ring.step([part], threads=1 + seed) for part in chunks(qkv, sizes)]
        assert same_bits(np.concatenate(got), expected), sizes
        ring.truth(Segment(0, rows - 1, qkv[-1:]))


def check_not_finite(kv_type: KvType) -> None:
    """What is not a number reaches the rows that attend to it, and no others; a slot is clean when it is used again."""
    shape = Shape(heads=4, kv_heads=2, dim=16, kv_type=kv_type, window=40, capacity=3 * TILE)
    qkv = random_rows(shape, 100)
    good = run(Rig(shape), qkv, (50,))
    for value in (np.nan, np.inf, -np.inf):
        for part, bad_rows, bad_heads in (
            (1, slice(60, 61), slice(1, 2)),  # query head 1
            (5, slice(60, 100), slice(2, 4)),  # the key of kv head 1
            (6, slice(60, 100), slice(0, 2)),  # the value of kv head 0
        ):
            bad = qkv.copy()
            bad[60, part, 5] = value
            rig = Rig(shape)
            out = run(rig, bad, (50,))
            assert np.isnan(out[bad_rows, bad_heads]).all(), (value, part)
            out[bad_rows, bad_heads] = good[bad_rows, bad_heads]
            assert same_bits(out, good), (value, part)
            assert same_bits(run(rig, qkv, (50,)), good)
    for scale in (0.0, 1e-38, 1e-20, 1e15):
        extreme = qkv * np.float32(scale)
        out = run(Rig(shape), extreme, (50,))
        assert np.isfinite(out).all()
        assert np.abs(out).max() <= 1.01 * np.abs(extreme[:, 6:]).max()


LOWERING_SHAPES = (
    Shape(dim=8, heads=1),
    Shape(dim=24, heads=5),
    Shape(dim=72, heads=2, kv_heads=2, softcap=20.0, norms=True, rotary_dim=10),
    Shape(dim=128, heads=4, kv_heads=2, window=50),
    Shape(dim=80, heads=8, kv_type=KvType.F32, rotary_dim=80),
    Shape(dim=40, heads=3, kv_type=KvType.F32, softcap=5.0),
)


def main() -> None:
    """Check all that depends on the lowering, and print its name: for a process in which another CPU is named."""
    for shape in LOWERING_SHAPES:
        check_shape(shape, 110)
    for kv_type in KvType:
        check_independence(Shape(dim=16, kv_type=kv_type, capacity=16 * TILE), 280)
        check_not_finite(kv_type)
    sys.stdout.write(LOWERING.name)


if __name__ == "__main__":
    main()
