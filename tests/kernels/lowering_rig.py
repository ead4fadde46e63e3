"""Compiles the CPU-specific pieces of `edge_llm.kernels.lowering` one by one, and checks that they are exact."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

from edge_llm.kernels.lowering import MAX_STEPS, detect_lowering, dot4_byte, dot4_nibble, dot_many, half_to_float
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
    for largest, one in ((15, dot4_nibble), (255, dot4_byte)):

        def single(builder: Any, codes: Any, x: Any, out: Any, dot: Any = one) -> None:
            bytes_, words = vector(I8, 4 * LANES), vector(I32, LANES)
            total = dot(
                builder, LOWERING, load(builder, out, words), load(builder, codes, bytes_), load(builder, x, bytes_)
            )
            store(builder, total, out)

        def many(builder: Any, codes: Any, x: Any, out: Any, nibbles: bool = largest == 15) -> None:
            steps = [
                [
                    tuple(
                        load(builder, offset(builder, at, 4 * LANES * (MAX_STEPS * i + t)), vector(I8, 4 * LANES))
                        for at in (codes, x)
                    )
                    for t in range(MAX_STEPS)
                ]
                for i in range(2)
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
                function(guarded_copy(codes).ctypes.data, guarded_copy(x).ctypes.data, out.ctypes.data)
                products = (codes.astype(np.int64) * x).reshape(len(start) // LANES, -1, LANES, 4)
                np.testing.assert_array_equal(out, start + products.sum((1, 3)).reshape(-1))


def _operands(rng: np.random.Generator, size: int, largest: int) -> list[tuple[np.ndarray, np.ndarray]]:
    random = [(rng.integers(0, largest + 1, size), rng.integers(-128, 128, size)) for _ in range(20)]
    extreme = [
        (np.full(size, code), np.full(size, x)) for code in (0, 1, largest - 1, largest) for x in (-128, -127, 0, 127)
    ]
    return [(codes.astype(np.uint8), x.astype(np.int8)) for codes, x in random + extreme]


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
