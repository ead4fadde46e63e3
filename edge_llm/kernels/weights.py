"""Weights: probabilities before division by their sum, as whole numbers in units of 2**-33 of the largest.

Their sums are exact and the same in any order; nothing else may be contracted or reordered by the compiler. So what is
chosen by them depends on the arguments alone, whatever the CPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from edge_llm.kernels.layout import SAMPLE_BLOCK
from edge_llm.kernels.penalties import LARGEST
from edge_llm.kernels.selection import block_mass, jit

_EXPONENT = 33
UNIT = 2.0**_EXPONENT
"""weight of the most probable token; MAX_VOCAB of them are 2**53"""
UNIT_KEY = (127 + _EXPONENT) << 23
ONE_KEY = 127 << 23
"""key of the smallest weight that is not 0"""

_LOG2_E = 1.4426950408889634
LEAST_POWER = np.float32(-40.0)
"""2 to this power weighs 0"""
# 2**f for -0.5 <= f <= 0.5, fitted for the least relative error (9e-8) among those with value 1 at 0.
_C0 = np.float32(1.0)
_C1 = np.float32(0.6931470036506653)
_C2 = np.float32(0.24022242426872253)
_C3 = np.float32(0.05550733581185341)
_C4 = np.float32(0.009671512991189957)
_C5 = np.float32(0.001326472614891827)


@jit
def float_of(bits: int) -> np.float32:
    """The float32 of these int32 bits."""
    return np.int32(bits).view(np.float32)


@jit
def bits_of(value: np.float32) -> Any:
    """The int32 bits of this float32."""
    return np.float32(value).view(np.int32)


@jit
def key_from(value: float) -> Any:
    """Key of the smallest float32 at or above `value`, a whole number from 0 to 2**53."""
    near = np.float32(value)
    return near.view(np.int32) + (1 if np.float64(near) < value else 0)


@jit
def weight_of(power: np.float32) -> np.float32:
    """2**power in units of 2**-33, rounded to a whole number; `power` <= 0."""
    power = max(power, LEAST_POWER)
    whole = np.rint(power)
    f = power - whole
    fraction = _C0 + f * (_C1 + f * (_C2 + f * (_C3 + f * (_C4 + f * _C5))))
    scale = float_of((np.int32(whole) + np.int32(127 + _EXPONENT)) << np.int32(23))
    return np.rint(fraction * scale)


@jit
def slope_of(temperature: float) -> np.float32:
    """Powers of two a logit: exp(x / temperature) is 2 ** (slope * x)."""
    return np.float32(min(_LOG2_E / temperature, LARGEST))


@jit
def weigh(
    values: Any, n: int, top: np.float32, floor: np.float32, slope: np.float32, weights: Any, bits: Any, maxima: Any
) -> Any:
    """weights[i] = 2 ** ((values[i] - top) * slope) in units of 2**-33, 0 for values below `floor`; gives their sum.

    `top` is the largest value, `bits` the int32 view of `weights`. `maxima` are those of `values` and become those of
    `weights`.
    """
    mass = 0.0
    for block in range((n + SAMPLE_BLOCK - 1) // SAMPLE_BLOCK):
        start, stop = np.uint64(block * SAMPLE_BLOCK), np.uint64(min(n, (block + 1) * SAMPLE_BLOCK))
        best = float_of(maxima[block])
        heaviest = np.int32(0)
        if best < floor or (best - top) * slope <= LEAST_POWER:  # most blocks, at low temperatures
            for i in range(start, stop):
                weights[i] = np.float32(0.0)
        else:
            for i in range(start, stop):
                weight = weight_of((values[i] - top) * slope)
                weights[i] = weight if values[i] >= floor else np.float32(0.0)
            for i in range(start, stop):
                heaviest = max(heaviest, bits[i])
            mass += block_mass(weights, start, stop, np.float32(1.0))
        maxima[block] = heaviest
    return np.int64(mass)


# log2(1 + 2z / (1 - z)) = sum of z**(2k + 1) * 2 / ((2k + 1) ln 2), for |z| < 0.172 to 1e-16
_SQRT_2 = 1.4142135623730951
_LN_2 = 0.6931471805599453
_SERIES = tuple(2.0 / (2 * k + 1) / _LN_2 for k in range(11))


@jit
def log2(value: float) -> float:
    """log2 of a number of at least 1, without a library's: they differ in the last bit."""
    whole = 0
    while value >= _SQRT_2:
        value *= 0.5
        whole += 1
    z = (value - 1.0) / (value + 1.0)
    tail = 0.0
    for k in range(len(_SERIES) - 1, -1, -1):
        tail = tail * z * z + _SERIES[k]
    return whole + tail * z
