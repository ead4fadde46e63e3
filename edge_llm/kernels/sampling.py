"""The fused sampler: one call turns a row of logits into a token. docs/sampling.md says what each stage means.

Weights (probabilities before division by their sum) are whole numbers in units of 2**-33 of the largest, so their sums
are exact and the same in any order; nothing else may be contracted or reordered by the compiler. The result depends on
the arguments alone, whatever the CPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types

from edge_llm.kernels.layout import (
    CALL_FIELDS,
    MAX_VOCAB,
    SAMPLE_BLOCK,
    SampleCall,
    SampleStatus,
    sample_scratch_bytes,
)
from edge_llm.kernels.pointers import f32_at, f64_at, i32_at, i64_at
from edge_llm.kernels.random import uniform
from edge_llm.kernels.selection import (
    INFINITY_KEY,
    first_of,
    gather,
    jit,
    jit_any_order,
    key_of,
    largest,
    mass_from,
    narrow_mass,
    scan,
)

_EXPONENT = 33
_UNIT = 2.0**_EXPONENT  # MAX_VOCAB of them are 2**53
_UNIT_KEY = (127 + _EXPONENT) << 23
_ONE_KEY = 127 << 23

_LARGEST = float(np.finfo(np.float32).max)
_BAN = -100.0
_MAX_TEMPERATURE = 100.0
_MAX_PENALTY = 1e6

_LOG2_E = 1.4426950408889634
_LEAST_POWER = np.float32(-40.0)  # weighs 0
# 2**f for -0.5 <= f <= 0.5, fitted for the least relative error (9e-8) among those with value 1 at 0.
_C0 = np.float32(1.0)
_C1 = np.float32(0.6931470036506653)
_C2 = np.float32(0.24022242426872253)
_C3 = np.float32(0.05550733581185341)
_C4 = np.float32(0.009671512991189957)
_C5 = np.float32(0.001326472614891827)


class Scratch(NamedTuple):
    """Arrays [vocab] that one call works in; those named `..._bits` are int32 views of float32 ones."""

    values: Any
    value_bits: Any
    weights: Any
    weight_bits: Any
    band: Any
    """int32"""
    band_floats: Any
    """the same memory as float32"""
    band_ids: Any
    ids: Any
    maxima: Any
    """int32 [blocks], as the next one"""
    band_maxima: Any


@jit
def _float_of(bits: int) -> np.float32:
    return np.int32(bits).view(np.float32)


@jit
def _weight(power: np.float32) -> np.float32:
    """2**power in units of 2**-33, rounded to a whole number; `power` <= 0."""
    power = max(power, _LEAST_POWER)
    whole = np.rint(power)
    f = power - whole
    fraction = _C0 + f * (_C1 + f * (_C2 + f * (_C3 + f * (_C4 + f * _C5))))
    scale = _float_of((np.int32(whole) + np.int32(127 + _EXPONENT)) << np.int32(23))
    return np.rint(fraction * scale)


@jit
def _weigh(values: Any, n: int, top: np.float32, temperature: float, weights: Any, bits: Any, maxima: Any) -> Any:
    """weights[i] = exp((values[i] - top) / temperature) in units of 2**-33, `top` the largest value; gives their sum.

    `bits` is the int32 view of `weights`. `maxima` are those of `values` and become those of `weights`.
    """
    slope = np.float32(min(_LOG2_E / temperature, _LARGEST))
    for block in range((n + SAMPLE_BLOCK - 1) // SAMPLE_BLOCK):
        start, stop = np.uint64(block * SAMPLE_BLOCK), np.uint64(min(n, (block + 1) * SAMPLE_BLOCK))
        if (_float_of(maxima[block]) - top) * slope <= _LEAST_POWER:  # most blocks, at low temperatures
            for i in range(start, stop):
                weights[i] = np.float32(0.0)
        else:
            for i in range(start, stop):
                weights[i] = _weight((values[i] - top) * slope)
    scan(bits, n, maxima)
    return mass_from(weights, n, maxima, _ONE_KEY)


@jit
def _bounded(value: float) -> np.float32:
    """float32 that is infinite only if `value` is: a huge logit must neither ban its token nor drown all others."""
    if value == -np.inf:
        return np.float32(value)
    return np.float32(max(-_LARGEST, min(_LARGEST, value)))


@jit
def _add_bias(values: Any, n: int, ids: Any, biases: Any) -> bool:
    for j in range(len(ids)):
        i = ids[j]
        if i < 0 or i >= n or np.isnan(biases[j]):
            return False
        values[i] = _bounded(-np.inf if biases[j] <= _BAN else values[i] + biases[j])
    return True


@jit
def _mask(values: Any, n: int, mask: Any) -> None:
    for word in range(len(mask)):
        allowed = mask[word]
        for lane in range(np.uint64(min(32, n - 32 * word))):
            i = np.uint64(32 * word) + lane
            if (allowed >> np.int32(lane)) & 1 == 0:
                values[i] = np.float32(-np.inf)


@jit
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


@jit
def _nucleus(n: int, need: int, s: Scratch) -> tuple[Any, Any]:
    """The rule (cut, ties) of `_walk` for the smallest set of largest weights that sum to `need`."""
    weights, bits, maxima, size = s.weights, s.weight_bits, s.maxima, n
    low, high, above = _ONE_KEY, _UNIT_KEY + 1, np.int64(0)
    while True:
        low, high, above = narrow_mass(weights, size, maxima, low, high, need, above, max(1, (high - low) // 16))
        if high - low == 1:
            break
        size = gather(bits, size, maxima, low, high, s.band, s.band_ids)  # go on with those that are still in doubt
        weights, bits, maxima = s.band_floats, s.band, s.band_maxima
        low, high = scan(bits, size, maxima)
        high += 1
    cut = np.int64(_float_of(low))
    return np.float64(cut), (need - above + cut - 1) // cut


@jit_any_order
def _portion(weights: Any, start: int, stop: int, cut: float) -> tuple[Any, Any]:
    """Sum of the weights above `cut` in [start, stop), and how many equal it."""
    mass = 0.0
    equal = np.int32(0)
    for i in range(np.uint64(start), np.uint64(stop)):
        weight = np.float64(weights[i])
        mass += weight if weight > cut else 0.0
        equal = np.int32(equal + (weight == cut))
    return mass, equal


@jit
def _walk(weights: Any, n: int, maxima: Any, cut: float, ties: int, target: float) -> tuple[int, Any]:
    """The index at which the running sum of kept weights first exceeds `target` (-1: none), and the sum so far.

    Kept are the weights above `cut` and the first `ties` of those that equal it.
    """
    done = 0.0
    for start in range(0, n, SAMPLE_BLOCK):
        if np.float64(_float_of(maxima[start // SAMPLE_BLOCK])) < cut:
            continue
        stop = min(n, start + SAMPLE_BLOCK)
        mass, equal = _portion(weights, start, stop, cut)
        taken: Any = min(ties, np.int64(equal))
        mass += taken * cut
        if done + mass > target:
            for i in range(start, stop):
                weight = np.float64(weights[i])
                if weight < cut or (weight == cut and ties == 0):
                    continue
                ties -= weight == cut
                done += weight
                if done > target:
                    return i, done
        done += mass
        ties -= taken
    return -1, done


@jit
def _draw(n: int, total: int, top_p: float, min_p: float, u: float, s: Scratch) -> int:
    """The index of one of the `n` weights, after top-p and min-p, chosen by `u` in [0, 1)."""
    cut, ties = 0.0, np.int64(0)
    if top_p < 1.0:
        cut, ties = _nucleus(n, max(1, np.int64(np.ceil(top_p * total))), s)
    least = np.ceil(min_p * _UNIT)
    if least > cut:  # whole numbers: at least `least` is more than `least - 1`
        cut, ties = least - 1.0, np.int64(0)
    mass = np.float64(total)
    if cut > 0.0:
        _, mass = _walk(s.weights, n, s.maxima, cut, ties, np.inf)
    index, _ = _walk(s.weights, n, s.maxima, cut, ties, np.floor(u * mass))
    return index


@jit
def _choose(call: Any, real: Any, values: Any, bits: Any, highest: int, s: Scratch) -> Any:
    """The token, from values that bias, mask and penalties have gone over; -1 would be a fault of this module."""
    n = len(values)
    first = first_of(bits, n, s.maxima, highest)
    temperature = real[SampleCall.TEMPERATURE]
    if temperature == 0.0:
        return first
    u = uniform(np.uint64(call[SampleCall.SEED]), np.uint64(call[SampleCall.COUNTER]))
    top_p, min_p, k = real[SampleCall.TOP_P], real[SampleCall.MIN_P], call[SampleCall.TOP_K]
    top = values[first]
    if k == 0 or k >= n:
        total = _weigh(values, n, top, temperature, s.weights, s.weight_bits, s.maxima)
        return _draw(n, total, top_p, min_p, u, s)
    largest(bits, n, s.maxima, highest, k, s.band, s.ids)
    scan(s.band, k, s.maxima)
    total = _weigh(s.band_floats, k, top, temperature, s.weights, s.weight_bits, s.maxima)
    index = _draw(k, total, top_p, min_p, u, s)
    return np.int64(s.ids[index]) if index >= 0 else -1


@jit
def _report(call: Any, real: Any, logits: Any, bits: Any, highest: int, alternatives: Any, s: Scratch) -> None:
    """What log-softmax of the raw logits needs, and the ids of the most probable tokens, best first."""
    n, k = len(logits), len(alternatives)
    if k < n:
        largest(bits, n, s.maxima, highest, k, s.band, s.ids)
    else:
        for i in range(n):
            s.ids[i] = i
    listed = 0
    for j in range(k):
        key = key_of(bits[s.ids[j]])
        if key == -INFINITY_KEY:
            continue
        place = listed
        while place > 0 and key_of(bits[alternatives[place - 1]]) < key:
            alternatives[place] = alternatives[place - 1]
            place -= 1
        alternatives[place] = s.ids[j]
        listed += 1
    top = logits[first_of(bits, n, s.maxima, highest)]
    call[SampleCall.LISTED] = listed
    real[SampleCall.MAXIMUM] = top
    real[SampleCall.TOTAL] = _weigh(logits, n, top, 1.0, s.weights, s.weight_bits, s.maxima) / _UNIT


_scratch_bytes = jit(sample_scratch_bytes)


@jit
def _in_range(call: Any, real: Any) -> bool:
    n = call[SampleCall.VOCAB]
    return (
        0 < n <= MAX_VOCAB
        and call[SampleCall.SCRATCH_BYTES] >= _scratch_bytes(n)
        and 0 <= call[SampleCall.HISTORY] <= n
        and 0 <= call[SampleCall.BIASES] <= n
        and 0 <= call[SampleCall.ALTERNATIVES] <= n
        and call[SampleCall.TOP_K] >= 0
        and 0.0 <= real[SampleCall.TEMPERATURE] <= _MAX_TEMPERATURE
        and 0.0 <= real[SampleCall.TOP_P] <= 1.0
        and 0.0 <= real[SampleCall.MIN_P] <= 1.0
        and 0.0 < real[SampleCall.REPETITION] <= _MAX_PENALTY
        and abs(real[SampleCall.PRESENCE]) <= _MAX_PENALTY
        and abs(real[SampleCall.FREQUENCY]) <= _MAX_PENALTY
    )


@jit
def sample(
    call: Any,
    real: Any,
    logits: Any,
    bits: Any,
    history_ids: Any,
    history_counts: Any,
    bias_ids: Any,
    bias_values: Any,
    mask: Any,
    alternatives: Any,
    s: Scratch,
) -> int:
    """The body of `sample_row` over arrays; `real` is the float64 view of `call`, `bits` the int32 one of `logits`."""
    n = len(logits)
    lowest, highest = scan(bits, n, s.maxima)
    if lowest < -INFINITY_KEY or highest >= INFINITY_KEY or highest == -INFINITY_KEY:
        return SampleStatus.INVALID_ROW
    reported = call[SampleCall.LOGPROBS] != 0
    if reported:
        _report(call, real, logits, bits, highest, alternatives, s)
    edited = len(history_ids) > 0 or len(bias_ids) > 0 or len(mask) > 0
    if edited:
        for i in range(n):
            s.values[i] = logits[i]
        if not _add_bias(s.values, n, bias_ids, bias_values):
            return SampleStatus.BAD_CALL
        _mask(s.values, n, mask)
        repetition, presence = real[SampleCall.REPETITION], real[SampleCall.PRESENCE]
        if not _penalise(s.values, n, history_ids, history_counts, repetition, presence, real[SampleCall.FREQUENCY]):
            return SampleStatus.BAD_CALL
        _, highest = scan(s.value_bits, n, s.maxima)
        if highest == -INFINITY_KEY:
            return SampleStatus.NOTHING_ALLOWED
        token = _choose(call, real, s.values, s.value_bits, highest, s)
    else:
        if reported:
            scan(bits, n, s.maxima)
        token = _choose(call, real, logits, bits, highest, s)
    if token < 0:
        return SampleStatus.BAD_CALL
    call[SampleCall.TOKEN] = token
    return SampleStatus.OK


def sample_row(address: int) -> int:
    """Choose one token as the SampleCall record at `address` asks; gives a SampleStatus."""
    call = i64_at(address, CALL_FIELDS)
    real = f64_at(address, CALL_FIELDS)
    if not _in_range(call, real):
        return SampleStatus.BAD_CALL
    n = call[SampleCall.VOCAB]
    blocks = (n + SAMPLE_BLOCK - 1) // SAMPLE_BLOCK
    row = 4 * SAMPLE_BLOCK * blocks
    values = call[SampleCall.SCRATCH]
    weights, band, band_ids, ids, maxima = (
        values + row,
        values + 2 * row,
        values + 3 * row,
        values + 4 * row,
        values + 5 * row,
    )
    scratch = Scratch(
        f32_at(values, n),
        i32_at(values, n),
        f32_at(weights, n),
        i32_at(weights, n),
        i32_at(band, n),
        f32_at(band, n),
        i32_at(band_ids, n),
        i32_at(ids, n),
        i32_at(maxima, blocks),
        i32_at(maxima + 4 * blocks, blocks),
    )
    return sample(
        call,
        real,
        f32_at(call[SampleCall.LOGITS], n),
        i32_at(call[SampleCall.LOGITS], n),
        i32_at(call[SampleCall.HISTORY_IDS], call[SampleCall.HISTORY]),
        i32_at(call[SampleCall.HISTORY_COUNTS], call[SampleCall.HISTORY]),
        i32_at(call[SampleCall.BIAS_IDS], call[SampleCall.BIASES]),
        f64_at(call[SampleCall.BIAS_VALUES], call[SampleCall.BIASES]),
        i32_at(call[SampleCall.MASK], (n + 31) // 32 if call[SampleCall.MASK] != 0 else 0),
        i32_at(call[SampleCall.ALTERNATIVE_IDS], call[SampleCall.ALTERNATIVES]),
        scratch,
    )


ENTRIES = {"sample_row": (types.int64(types.int64), sample_row)}
