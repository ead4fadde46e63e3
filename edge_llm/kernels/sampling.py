"""The fused sampler: one call turns a row of logits into a token. docs/sampling.md says what each stage means.

Weights (probabilities before division by their sum) are whole numbers in units of 2**-33 of the largest, so their sums are
exact and the same in any order; nothing here may be contracted or reordered by the compiler. The result depends on the
arguments alone, whatever the CPU.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types

from edge_llm.kernels.layout import CALL_FIELDS, MAX_VOCAB, SAMPLE_BLOCK, SampleCall, SampleStatus
from edge_llm.kernels.pointers import f32_at, f64_at, i32_at, i64_at
from edge_llm.kernels.random import uniform
from edge_llm.kernels.selection import INFINITY_KEY, first_of, gather, largest, mass_from, narrow_mass, scan

_jit = numba.njit(error_model="numpy")
# Only for sums of whole numbers below 2**53, which no order of adding rounds.
_jit_any_order = numba.njit(error_model="numpy", fastmath={"reassoc"})

_EXPONENT = 33
_UNIT = 2.0**_EXPONENT  # MAX_VOCAB of them are 2**53
_UNIT_KEY = (127 + _EXPONENT) << 23
_ONE_KEY = 127 << 23
_BINADE = 1 << 23  # keys from one power of two to the next

_LARGEST = float(np.finfo(np.float32).max)
_BAN = -100.0
_MAX_TEMPERATURE = 1e3

_LOG2_E = 1.4426950408889634
_LEAST_POWER = np.float32(-40.0)  # weighs 0
# 2**f for -0.5 <= f <= 0.5, fitted for the least relative error (9e-8) among those with value 1 at 0.
_C0 = np.float32(1.0)
_C1 = np.float32(0.6931470036506653)
_C2 = np.float32(0.24022242426872253)
_C3 = np.float32(0.05550733581185341)
_C4 = np.float32(0.009671512991189957)
_C5 = np.float32(0.001326472614891827)


@_jit
def _weight(power: np.float32) -> np.float32:
    """2**power in units of 2**-33, rounded to a whole number; `power` <= 0."""
    power = max(power, _LEAST_POWER)
    whole = np.rint(power)
    f = power - whole
    fraction = _C0 + f * (_C1 + f * (_C2 + f * (_C3 + f * (_C4 + f * _C5))))
    scale = np.int32((np.int32(whole) + np.int32(127 + _EXPONENT)) << np.int32(23)).view(np.float32)
    return np.rint(fraction * scale)


@_jit
def _weigh(values: Any, n: int, top: np.float32, temperature: float, weights: Any) -> float:
    """weights[i] = exp((values[i] - top) / temperature) in units of 2**-33, `top` being the largest value; gives their sum."""
    slope = np.float32(min(_LOG2_E / temperature, _LARGEST))
    for i in range(n):
        weights[i] = _weight((values[i] - top) * slope)
    return mass_from(weights, n, 0)


@_jit
def _bounded(value: float) -> np.float32:
    """float32 that is infinite only if `value` is: a huge logit must not ban a token, or drown all others."""
    if value == -np.inf:
        return np.float32(value)
    return np.float32(max(-_LARGEST, min(_LARGEST, value)))


@_jit
def _add_bias(values: Any, n: int, ids: Any, biases: Any) -> bool:
    for j in range(len(ids)):
        i = ids[j]
        if i < 0 or i >= n:
            return False
        values[i] = -np.inf if biases[j] <= _BAN else _bounded(values[i] + biases[j])
    return True


@_jit
def _mask(values: Any, n: int, mask: Any) -> None:
    for start in range(0, n, 32):
        word = mask[start >> 5]
        for lane in range(min(32, n - start)):
            if not (word >> np.int32(lane)) & 1:
                values[start + lane] = -np.inf


@_jit
def _penalise(values: Any, n: int, ids: Any, counts: Any, repetition: float, presence: float, frequency: float) -> bool:
    for j in range(len(ids)):
        i = ids[j]
        if i < 0 or i >= n:
            return False
        value = np.float64(values[i])
        value = value / repetition if value > 0.0 else value * repetition
        if counts[j] > 0:
            value -= presence + frequency * counts[j]
        values[i] = _bounded(value)
    return True


@_jit
def _nucleus(weights: Any, bits: Any, n: int, need: int, band: Any, band_weights: Any, band_ids: Any) -> tuple[float, int]:
    """The rule (cut, ties) of `_portion` for the smallest set of largest weights that sum to `need`."""
    low, high, above = narrow_mass(weights, n, _ONE_KEY, _UNIT_KEY + 1, need, 0, _BINADE)
    size = gather(bits, n, low, high, band, band_ids)  # few are left in the binade where the sum is reached
    low, _, above = narrow_mass(band_weights, size, low, high, need, above, 1)
    cut = np.int64(np.int32(low).view(np.float32))
    return np.float64(cut), (need - above + cut - 1) // cut


@_jit_any_order
def _portion(weights: Any, start: int, stop: int, cut: float) -> tuple[float, int]:
    """Sum of the weights above `cut` in [start, stop), and how many equal it: the first few of those are kept as well."""
    mass = 0.0
    equal = np.int32(0)
    for i in range(np.uint64(start), np.uint64(stop)):
        weight = np.float64(weights[i])
        mass += weight if weight > cut else 0.0
        equal = np.int32(equal + (weight == cut))
    return mass, equal


@_jit
def _walk(weights: Any, n: int, cut: float, ties: int, target: float) -> int:
    """The index at which the running sum of kept weights first exceeds `target`; -1 if none does."""
    for start in range(0, n, SAMPLE_BLOCK):
        stop = min(n, start + SAMPLE_BLOCK)
        mass, equal = _portion(weights, start, stop, cut)
        taken = min(ties, equal)
        mass += taken * cut
        if target < mass:
            for i in range(start, stop):
                weight = np.float64(weights[i])
                if weight < cut or (weight == cut and ties == 0):
                    continue
                ties -= weight == cut
                if target < weight:
                    return i
                target -= weight
        target -= mass
        ties -= taken
    return -1
