"""Runs the attention kernels over rings in guarded memory, and the slow truth beside them."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from edge_llm.kernels.attention import attention_merge, attention_plan, attention_prepare, attention_task
from edge_llm.kernels.layout import (
    CALL_FIELDS,
    LAYER_FIELDS,
    TILE,
    UNBOUNDED,
    AttentionCall,
    CacheLayer,
    KvType,
    attention_scratch_bytes,
)
from tests.reference.attention import Rules, attend, physical_row, turn

_PAGE = mmap.PAGESIZE
_keep: list[mmap.mmap] = []


def guarded(shape: Sequence[int], kind: type[np.generic], fill: int = 0xA5) -> np.ndarray:
    """An array that ends where an unreadable page begins; every byte before it and in it is `fill`."""
    size = int(np.prod(shape)) * np.dtype(kind).itemsize
    pages = -(-size // _PAGE) * _PAGE
    memory = mmap.mmap(-1, pages + _PAGE)
    _keep.append(memory)
    memory[:pages] = bytes([fill]) * pages
    whole = np.frombuffer(memory, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(whole.ctypes.data + pages), ctypes.c_size_t(_PAGE), 0) == 0
    return whole[pages - size : pages].view(kind).reshape(shape)


@dataclass(frozen=True)
class Shape:
    """One attention layer and its ring."""

    heads: int = 3
    kv_heads: int = 1
    dim: int = 64
    kv_type: KvType = KvType.INT8
    slots: int = 2
    capacity: int = 8 * TILE
    sinks: int = 0
    window: int = UNBOUNDED
    rotary_dim: int = 0
    norms: bool = False
    softcap: float = 0.0
    sink_rope: bool = False
    max_rows: int = 64
    context: int = 4096

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.dim)


@dataclass(frozen=True)
class Segment:
    """Rows of one step: qkv float32 [rows, heads + 2 * kv_heads, dim] of `slot` from `position` on."""

    slot: int
    position: int
    qkv: np.ndarray


@dataclass
class Rig:
    """Rings of one layer, and steps over them."""

    shape: Shape
    seed: int = 0
    arrays: dict[CacheLayer, np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        s = self.shape
        rows = (s.slots, s.kv_heads, s.capacity)
        tiles = s.capacity // TILE
        if s.kv_type == KvType.INT8:
            self.arrays = {
                CacheLayer.KEYS: guarded((s.slots, s.kv_heads, tiles, s.dim // 4, TILE, 4), np.uint8),
                CacheLayer.VALUES: guarded((s.slots, s.kv_heads, tiles, TILE // 4, s.dim, 4), np.int8),
                CacheLayer.KEY_SCALES: guarded(rows, np.float32),
                CacheLayer.VALUE_SCALES: guarded(rows, np.float32),
            }
        else:
            self.arrays = {
                CacheLayer.KEYS: guarded((s.slots, s.kv_heads, tiles, s.dim, TILE), np.float32),
                CacheLayer.VALUES: guarded((*rows, s.dim), np.float32),
            }
        rng = np.random.default_rng(self.seed)
        for array in self.arrays.values():  # stale rows are finite, and large enough to be seen if they count
            array[...] = (
                rng.integers(0, 100, array.shape)
                if array.dtype.itemsize == 1
                else 50 * rng.standard_normal(array.shape)
            )
        rng = np.random.default_rng(1)  # what is not memory is the same in all rigs
        self.gammas = [1 + 0.1 * rng.standard_normal(s.dim).astype(np.float32) for _ in range(2)]
        self.frequencies = 100.0 ** -(np.arange(s.rotary_dim // 2) / max(1, s.rotary_dim // 2))
        self.layer = np.zeros(LAYER_FIELDS, np.int64)
        for name, array in self.arrays.items():
            self.layer[name] = array.ctypes.data
        numbers = {CacheLayer.CAPACITY: s.capacity, CacheLayer.SINKS: s.sinks, CacheLayer.WINDOW: s.window}
        numbers |= {CacheLayer.KV_HEADS: s.kv_heads, CacheLayer.HEAD_DIM: s.dim, CacheLayer.KV_TYPE: s.kv_type}
        for name, number in numbers.items():
            self.layer[name] = number
        self.scratch = guarded((self._scratch_bytes(),), np.uint8)
        self.call = np.zeros(CALL_FIELDS, np.int64)

    def _scratch_bytes(self) -> int:
        s = self.shape
        size = attention_scratch_bytes(
            max_rows=s.max_rows, heads=s.heads, kv_heads=s.kv_heads, head_dim=s.dim, context=s.context
        )
        return -(-size // 64) * 64

    def random_rows(self, rows: int, seed: int) -> np.ndarray:
        """qkv of that many rows."""
        s = self.shape
        x = np.random.default_rng(seed).standard_normal((rows, s.heads + 2 * s.kv_heads, s.dim))
        x[:, : s.heads] *= 3
        return x.astype(np.float32)

    def rope(self, position: int) -> np.ndarray | None:
        """Cosines and sines of one position."""
        if not self.shape.rotary_dim:
            return None
        angles = position * self.frequencies
        return np.concatenate([np.cos(angles), np.sin(angles)]).astype(np.float32)

    def sink_position(self, position: int) -> int:
        """Where the query of a row stands for the sinks, once the ring has slid."""
        s = self.shape
        return min(position, s.window + s.sinks - 1)

    def fill_call(self, segments: Sequence[Segment], threads: int) -> np.ndarray:
        """Write the call record of a step; its (poisoned) output."""
        s, call = self.shape, self.call
        rows = sum(len(segment.qkv) for segment in segments)
        qkv = guarded((rows, s.heads + 2 * s.kv_heads, s.dim), np.float32)
        out = guarded((rows, s.heads * s.dim), np.float32)
        table = guarded((len(segments), 4), np.int32)
        first = 0
        positions: list[int] = []
        for i, segment in enumerate(segments):
            n = len(segment.qkv)
            qkv[first : first + n] = segment.qkv
            table[i] = segment.slot, first, n, segment.position
            positions += range(segment.position, segment.position + n)
            first += n
        self._inputs = [qkv, table]
        call[:] = 0
        call[AttentionCall.QKV] = qkv.ctypes.data
        call[AttentionCall.OUT] = out.ctypes.data
        call[AttentionCall.ROWS] = rows
        call[AttentionCall.SEGMENTS] = table.ctypes.data
        call[AttentionCall.SEGMENT_COUNT] = len(segments)
        call[AttentionCall.LAYER] = self.layer.ctypes.data
        call[AttentionCall.HEADS] = s.heads
        call[AttentionCall.KV_HEADS] = s.kv_heads
        call[AttentionCall.HEAD_DIM] = s.dim
        for name, value in (
            (AttentionCall.SCALE, s.scale),
            (AttentionCall.SOFTCAP, s.softcap),
            (AttentionCall.EPS, 1e-5),
        ):
            call[name] = np.float64(value).view(np.int64)
        call[AttentionCall.SCRATCH] = self.scratch.ctypes.data
        call[AttentionCall.SCRATCH_BYTES] = self.scratch.nbytes
        call[AttentionCall.THREADS] = threads
        if s.rotary_dim and rows:
            call[AttentionCall.ROTARY_DIM] = s.rotary_dim
            call[AttentionCall.ROPE] = self._table([self.rope(p) for p in positions])
            if s.sink_rope:
                call[AttentionCall.SINK_ROPE] = self._table([self.rope(self.sink_position(p)) for p in positions])
        if s.norms:
            call[AttentionCall.Q_NORM] = self._table(self.gammas[0])
            call[AttentionCall.K_NORM] = self._table(self.gammas[1])
        return out

    def _table(self, values: object) -> int:
        array = np.asarray(values, np.float32)
        table = guarded(array.shape, np.float32)
        table[...] = array
        self._inputs.append(table)
        return table.ctypes.data

    def step(self, segments: Sequence[Segment], threads: int = 1, order: int = 1) -> np.ndarray:
        """Run one step; out [rows, heads, dim]. `order` -1 runs the tasks of each phase backwards."""
        out = self.fill_call(segments, threads)
        call = self.call.ctypes.data
        assert attention_plan(call) == self.call[AttentionCall.TASKS]
        phases = (
            (AttentionCall.ROWS, attention_prepare),
            (AttentionCall.TASKS, attention_task),
            (AttentionCall.MERGES, attention_merge),
        )
        for count, run in phases:
            for i in range(int(self.call[count]))[::order]:
                run(call, i)
        return out.reshape(len(out), self.shape.heads, self.shape.dim).copy()

    # --- the truth ---

    def stored(self, slot: int, position: int) -> tuple[np.ndarray, np.ndarray]:
        """Key and value of a position as the ring holds them, float64 [kv_heads, dim]."""
        s, a = self.shape, self.arrays
        row = physical_row(position, s.sinks, s.capacity)
        if s.kv_type == KvType.F32:
            return a[CacheLayer.KEYS][slot, :, row // TILE, :, row % TILE].astype(np.float64), a[CacheLayer.VALUES][
                slot, :, row
            ].astype(np.float64)
        keys = (
            a[CacheLayer.KEYS][slot, :, row // TILE, :, row % TILE].reshape(s.kv_heads, s.dim).astype(np.float64) - 128
        )
        values = a[CacheLayer.VALUES][slot, :, row // TILE, row % 16, :, row // 16 % 4].astype(np.float64)
        scales = [
            a[name][slot, :, row, None].astype(np.float64) for name in (CacheLayer.KEY_SCALES, CacheLayer.VALUE_SCALES)
        ]
        return keys * scales[0], values * scales[1]

    def truth(self, segment: Segment) -> np.ndarray:
        """float64 [rows, heads, dim] of a segment that has been run, from the keys and values as they are stored."""
        s = self.shape
        rules = Rules(s.scale, s.window, s.sinks, s.softcap)
        last = segment.position + len(segment.qkv)
        oldest = segment.position - s.window + 1
        empty = (np.zeros((s.kv_heads, s.dim)),) * 2
        rows = [self.stored(segment.slot, k) if k < s.sinks or k >= oldest else empty for k in range(last)]
        keys, values = (np.stack([row[i] for row in rows], 1) for i in range(2))
        out = np.zeros((len(segment.qkv), s.heads, s.dim))
        gamma = self.gammas[0] if s.norms else None
        for i, row in enumerate(segment.qkv):
            p = segment.position + i
            queries = turn(row[: s.heads], self.rope(p), gamma, 1e-5)
            sink_queries = (
                turn(row[: s.heads], self.rope(self.sink_position(p)), gamma, 1e-5) if s.sink_rope else queries
            )
            for h in range(s.heads):
                g = h // (s.heads // s.kv_heads)
                out[i, h] = attend(queries[h], keys[g], values[g], p, rules, sink_queries[h])
        return out
