"""Random numbers that are a pure function of (seed, counter): Philox4x32-10.

There is no state to carry, so the draw for a position is the same whether the position was reached alone, in a batch,
by speculation or after a cache hit. Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3",
SC 2011; the constants are those of the paper.
"""

from __future__ import annotations

import numba
import numpy as np

# Everything is uint64 holding 32-bit values: numba would turn a mix of signed and unsigned integers into floats.
_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = np.uint64(0x9E3779B9)
_WEYL_1 = np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_ROUNDS = 10


@numba.njit(error_model="numpy")
def philox(
    c0: np.uint64, c1: np.uint64, c2: np.uint64, c3: np.uint64, k0: np.uint64, k1: np.uint64
) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:
    """Four random 32-bit words from a 128-bit counter and a 64-bit key; each argument is a uint64 below 2**32."""
    for _ in range(_ROUNDS):
        product_0 = _MULTIPLIER_0 * c0
        product_1 = _MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (
            (product_1 >> _HALF) ^ c1 ^ k0,
            product_1 & _LOW,
            (product_0 >> _HALF) ^ c3 ^ k1,
            product_0 & _LOW,
        )
        k0 = (k0 + _WEYL_0) & _LOW
        k1 = (k1 + _WEYL_1) & _LOW
    return c0, c1, c2, c3


@numba.njit(error_model="numpy")
def _fraction(high: np.uint64, low: np.uint64) -> float:
    return float(((high << _HALF) | low) >> np.uint64(11)) * 2.0**-53


@numba.njit(error_model="numpy")
def uniforms(seed: np.uint64, counter: np.uint64) -> tuple[float, float]:
    """Two independent float64 in [0, 1), multiples of 2**-53, for `seed` and `counter` (both uint64)."""
    a, b, c, d = philox(counter & _LOW, counter >> _HALF, np.uint64(0), np.uint64(0), seed & _LOW, seed >> _HALF)
    return _fraction(a, b), _fraction(c, d)
