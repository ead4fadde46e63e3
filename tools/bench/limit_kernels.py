"""What this machine can do at most: reading memory, and multiplying bytes in registers. Two loops of our own in LLVM IR.

`read` loads every byte once with the widest vectors of the CPU's lowering and asks for lines 8 KB ahead, as BlockLinear
does. `multiply` does nothing but the lowering's dot product of bytes (vpdpbusd on zmm or ymm, pmaddubsw + pmaddwd, ...):
for each step, vectors of codes from the first-level cache times activations that stay in registers, into independent
sums. Units for matrices (AMX) are not used: the kernels whose limit this is have none either.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from edge_llm.kernels.lowering import detect_lowering, dot_many
from edge_llm.kernels.vector_ir import I8, I32, I64, constant, load, load_broadcast, offset, prefetch, vector

LOWERING = detect_lowering()
_VECTOR = 4 * LOWERING.lanes
_LINE = 64
_AHEAD = 8192
_STRIDE = 8 * _VECTOR
"""bytes of one turn of the reading loop"""
_CODES, _ROWS = (6, 4) if LOWERING.registers == 32 else (4, 3)
"""vectors of codes and of activations of one step: as many sums as fill the registers"""
_STEPS = 4
"""steps of one turn of the multiplying loop, each over codes of its own"""
_BANK = _STEPS * _CODES * _VECTOR
"""bytes of codes of one turn; turns alternate between two banks, or the compiler would multiply once and only add"""


@intrinsic
def _read(_: Any, address: Any, nbytes: Any) -> Any:
    """Exclusive or of all vectors, so that no load is left out; `nbytes` is a multiple of _STRIDE."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, nbytes = args
        words = vector(I32, LOWERING.lanes)
        totals = [cgutils.alloca_once_value(builder, constant(I32, LOWERING.lanes, 0)) for _ in range(8)]
        with cgutils.for_range(builder, builder.udiv(nbytes, I64(_STRIDE)), intp=I64) as loop:
            here = builder.add(address, builder.mul(loop.index, I64(_STRIDE)))
            for line in range(0, _STRIDE, _LINE):
                prefetch(builder, offset(builder, here, _AHEAD + line))
            for i, total in enumerate(totals):
                value = load(builder, offset(builder, here, i * _VECTOR), words, 64)
                builder.store(builder.xor(builder.load(total), value), total)
        return _sum(builder, [builder.load(total) for total in totals])

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _multiply(_: Any, codes: Any, activations: Any, turns: Any) -> Any:
    """Sum of all dot products; `codes` holds two banks of bytes 0..15, `activations` four bytes for each row of a step."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        codes, activations, turns = args
        bytes_ = vector(I8, _VECTOR)
        rows = [
            builder.bitcast(load_broadcast(builder, offset(builder, activations, 4 * i), I32, LOWERING.lanes), bytes_)
            for i in range(_ROWS)
        ]
        slots = [cgutils.alloca_once_value(builder, constant(I32, LOWERING.lanes, 0)) for _ in range(_CODES * _ROWS)]
        with cgutils.for_range(builder, turns, intp=I64) as loop:
            bank = builder.add(codes, builder.mul(builder.and_(loop.index, I64(1)), I64(_BANK)))
            loaded = [load(builder, offset(builder, bank, i * _VECTOR), bytes_, 64) for i in range(_STEPS * _CODES)]
            pairs = [[(code, row) for code in loaded[i::_CODES]] for i in range(_CODES) for row in rows]
            sums = dot_many(builder, LOWERING, [builder.load(slot) for slot in slots], pairs, nibbles=True)
            for slot, total in zip(slots, sums, strict=True):
                builder.store(total, slot)
        return _sum(builder, [builder.load(slot) for slot in slots])

    return types.int64(types.int64, types.int64, types.int64), generate


def _sum(builder: Any, vectors: list[Any]) -> Any:
    total = vectors[0]
    for value in vectors[1:]:
        total = builder.add(total, value)
    lanes = [builder.extract_element(total, ir.Constant(I32, i)) for i in range(LOWERING.lanes)]
    result = lanes[0]
    for lane in lanes[1:]:
        result = builder.add(result, lane)
    return builder.sext(result, I64)


@numba.cfunc("int64(int64, int64, int64)", error_model="numpy")
def _read_passes(address: int, nbytes: int, passes: int) -> int:
    total = 0
    for _ in range(passes):
        total += _read(address, nbytes)
    return total


@numba.cfunc("int64(int64, int64, int64)", error_model="numpy")
def _multiply_turns(codes: int, activations: int, turns: int) -> int:
    return _multiply(codes, activations, turns)


class Limits:
    """The two loops on `threads` threads; ctypes lets go of the GIL while they run."""

    def __init__(self, threads: int, max_bytes: int) -> None:
        """`max_bytes` bounds what `read` reads at once."""
        self._threads = threads
        self._share = -(-max_bytes // threads // _STRIDE) * _STRIDE
        self._memory = [_aligned(self._share) for _ in range(threads)]
        self._codes = [_aligned(2 * _BANK) for _ in range(threads)]
        self._activations = [np.ones(4 * _ROWS, np.int8) for _ in range(threads)]

    def read(self, nbytes: int, passes: int) -> int:
        """Read about `nbytes` bytes, divided among the threads, `passes` times; the bytes that were read in all."""
        share = min(self._share, max(_STRIDE, nbytes // self._threads // _STRIDE * _STRIDE))
        self._each(lambda i: _read_passes.ctypes(self._memory[i].ctypes.data, share, passes))
        return share * self._threads * passes

    def multiply(self, operations: int) -> int:
        """Do about that many operations, a product and a sum being two; how many were done."""
        turn = 2 * _STEPS * _CODES * _ROWS * _VECTOR
        turns = max(1, operations // self._threads // turn)
        self._each(
            lambda i: _multiply_turns.ctypes(self._codes[i].ctypes.data, self._activations[i].ctypes.data, turns)
        )
        return turns * turn * self._threads

    def _each(self, work: Callable[[int], Any]) -> None:
        others = [threading.Thread(target=work, args=(i,)) for i in range(1, self._threads)]
        for thread in others:
            thread.start()
        work(0)
        for thread in others:
            thread.join()


def _aligned(nbytes: int) -> np.ndarray:
    """uint8 [nbytes] of ones, 64-byte aligned: written once, so that every page is its own."""
    buffer = np.ones(nbytes + _LINE, np.uint8)
    start = -buffer.ctypes.data % _LINE
    return buffer[start : start + nbytes]
