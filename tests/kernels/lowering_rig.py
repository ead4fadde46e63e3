"""Compiles the CPU-specific pieces of `edge_llm.kernels.lowering` one by one, and checks that they are exact."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

from edge_llm.kernels.lowering import (
    MAX_STEPS,
    broadcast_steps,
    byte_codes,
    detect_lowering,
    dot_bytes,
    dot_many,
    dot_nibbles,
    half_to_float,
    sum_bytes,
)
from edge_llm.kernels.vector_ir import F16, I8, I16, I32, load, offset, store, vector
from tests.kernels.guard_pages import guarded_copy

LOWERING = detect_lowering()
LANES = LOWERING.lanes


def compiled(emit: Callable[..., None]) -> Callable[..., None]:
    """`emit(builder, a, b, c)` over three addresses, as a compiled function."""

    @intrinsic
    def body(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: list[Any]) -> Any:
            emit(builder, *args)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 3), generate

    @numba.njit
    def function(a: int, b: int, c: int) -> None:
        body(a, b, c)

    return function


def check_dots() -> None:
    """Exact sums for every kind of code and activation, extremes together."""
    rng = np.random.default_rng(6)
    for largest, one in ((15, dot_nibbles), (255, dot_bytes)):

        def pair(builder: Any, codes: Any, x: Any, at: int, nibbles: bool = largest == 15) -> tuple[Any, Any]:
            bytes_ = [load(builder, offset(builder, base, at), vector(I8, 4 * LANES)) for base in (codes, x)]
            return bytes_[0] if nibbles else byte_codes(builder, LOWERING, bytes_[0]), bytes_[1]

        def single(builder: Any, codes: Any, x: Any, out: Any, dot: Any = one, pair: Any = pair) -> None:
            before = load(builder, out, vector(I32, LANES))
            store(builder, dot(builder, LOWERING, before, [pair(builder, codes, x, 0)]), out)

        def many(builder: Any, codes: Any, x: Any, out: Any, nibbles: bool = largest == 15, pair: Any = pair) -> None:
            steps = [
                [pair(builder, codes, x, 4 * LANES * (MAX_STEPS * i + t)) for t in range(MAX_STEPS)] for i in range(2)
            ]
            places = [offset(builder, out, 4 * LANES * i) for i in range(2)]
            accs = [load(builder, place, vector(I32, LANES)) for place in places]
            for total, place in zip(dot_many(builder, LOWERING, accs, steps, nibbles=nibbles), places, strict=True):
                store(builder, total, place)

        for steps, emit in ((1, single), (2 * MAX_STEPS, many)):
            function = compiled(emit)
            for codes, x in _operands(rng, steps * 4 * LANES, largest):
                start = rng.integers(-(2**30), 2**30, 2 * LANES if steps > 1 else LANES).astype(np.int32)
                out = guarded_copy(start)
                sums = _corrected(codes, x, largest).reshape(len(start) // LANES, -1, LANES, 4).sum((1, 3))
                inputs = [guarded_copy(codes), guarded_copy(x)]
                function(*(array.ctypes.data for array in (*inputs, out)))
                np.testing.assert_array_equal(out, start + sums.reshape(-1))


def _corrected(codes: np.ndarray, x: np.ndarray, largest: int) -> np.ndarray:
    """Products, of codes less 128 where the lowering takes bytes so."""
    zero = 128 if LOWERING.signed and largest == 255 else 0
    return (codes.astype(np.int64) - zero) * x


def _operands(rng: np.random.Generator, size: int, largest: int) -> list[tuple[np.ndarray, np.ndarray]]:
    least = -128 if largest == 15 else -127
    random = [(rng.integers(0, largest + 1, size), rng.integers(least, 128, size)) for _ in range(20)]
    extreme = [
        (np.full(size, code), np.full(size, x)) for code in (0, 1, largest - 1, largest) for x in (least, -1, 0, 127)
    ]
    return [(codes.astype(np.uint8), x.astype(np.int8)) for codes, x in random + extreme]


def check_activations_of_steps() -> None:
    """Every lane gets the four bytes of its step; a sum of bytes is exact."""
    steps = 8

    def spread(builder: Any, source: Any, out: Any, _: Any) -> None:
        for t, value in enumerate(broadcast_steps(builder, LOWERING, source, steps)):
            store(builder, value, offset(builder, out, 4 * LANES * t))

    def total(builder: Any, source: Any, out: Any, _: Any) -> None:
        store(builder, sum_bytes(builder, LOWERING, source, 64), out)

    rng = np.random.default_rng(5)
    x = guarded_copy(rng.integers(-127, 128, 4 * steps).astype(np.int8))
    out = guarded_copy(np.zeros((steps, LANES, 4), np.int8))
    compiled(spread)(x.ctypes.data, out.ctypes.data, 0)
    np.testing.assert_array_equal(out, np.broadcast_to(x.reshape(steps, 1, 4), out.shape))
    sums = guarded_copy(np.zeros(LANES, np.int32))
    function = compiled(total)
    for values in (rng.integers(-127, 128, 64), np.full(64, 127), np.full(64, -127)):
        source = guarded_copy(values.astype(np.int8))
        function(source.ctypes.data, sums.ctypes.data, 0)
        assert (sums == values.sum()).all()


def check_half_to_float() -> None:
    """All 65,536 fp16 numbers: equal, or NaN where NaN."""

    def emit(builder: Any, source: Any, target: Any, _: Any) -> None:
        value = builder.bitcast(load(builder, source, vector(I16, LANES)), vector(F16, LANES))
        store(builder, half_to_float(builder, LOWERING, value), target)

    function = compiled(emit)
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    floats = np.zeros(1 << 16, np.float32)
    for i in range(0, 1 << 16, LANES):
        function(halves.ctypes.data + 2 * i, floats.ctypes.data + 4 * i, 0)
    with np.errstate(invalid="ignore"):
        expected = halves.astype(np.float32)
    np.testing.assert_array_equal(floats, expected)
    assert np.array_equal(np.signbit(floats), np.signbit(expected))


def main() -> None:
    """Check all that depends on the lowering, and print its name: for a process in which another CPU is named."""
    from tests.kernels.elementwise_rig import check_activations, check_norms
    from tests.kernels.linear_rig import (
        FORMS,
        check_embedding,
        check_every_remainder,
        check_extremes,
        check_independence,
    )

    check_dots()
    check_activations_of_steps()
    check_half_to_float()
    for form in FORMS:
        check_every_remainder(form, 96, (1, 4, 7, 25))
        check_independence(form)
        check_embedding(form)
        check_extremes(form)
    check_norms()
    check_activations()
    sys.stdout.write(LOWERING.name)


if __name__ == "__main__":
    main()
