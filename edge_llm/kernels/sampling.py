"""The fused sampler: one call turns a row of logits into a token. docs/sampling.md says what each stage means.

This file holds the order of the stages; what they do is in `penalties`, `weights` and `truncation`. The result depends on
the arguments alone, whatever the CPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from edge_llm.kernels.layout import (
    CALL_FIELDS,
    MAX_DRY_WINDOW,
    MAX_VOCAB,
    SAMPLE_BLOCK,
    SampleCall,
    SampleStatus,
    sample_scratch_bytes,
)
from edge_llm.kernels.penalties import add_bias, copy_allowed, penalise_repeats, penalise_seen
from edge_llm.kernels.pointers import f32_at, f64_at, i32_at, i64_at
from edge_llm.kernels.random import uniforms
from edge_llm.kernels.selection import INFINITY_KEY, first_of, gather, jit, jit_any_order, key_of, largest, scan
from edge_llm.kernels.truncation import Scratch, at_least, exclude_top, keep_typical, nucleus, sigma_floor
from edge_llm.kernels.weights import UNIT, bits_of, float_of, log2, slope_of, weigh, weight_of

_LEAST_VALUE = np.float32(-np.finfo(np.float32).max)
_MAX_TEMPERATURE = 100.0
_MAX_PENALTY = 1e6
_MAX_SIGMAS = 1e6
_MAX_MU = 1e9


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
def _draw(weights: Any, n: int, maxima: Any, cut: float, ties: int, target: float) -> int:
    """The index at which the running sum of what stays by the rule (cut, ties) first exceeds `target`; -1: none."""
    done = 0.0
    for start in range(0, n, SAMPLE_BLOCK):
        if np.float64(float_of(maxima[start // SAMPLE_BLOCK])) < cut:
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
                    return i
        done += mass
        ties -= taken
    return -1


@jit
def _choose_by_filters(call: Any, real: Any, values: Any, n: int, top: Any, floor: Any, depths: Any, s: Any) -> int:
    """The index of one of the `n` values, by all stages from typical on."""
    slope = slope_of(real[SampleCall.TEMPERATURE])
    u, coin = uniforms(np.uint64(call[SampleCall.SEED]), np.uint64(call[SampleCall.COUNTER]))
    total = weigh(values, n, top, floor, slope, s.weights, s.weight_bits, s.maxima)
    heaviest = UNIT
    if real[SampleCall.TYPICAL_P] < 1.0:
        total = keep_typical(values, n, top, slope, total, real[SampleCall.TYPICAL_P], depths, s)
        heaviest = np.float64(float_of(scan(s.maxima, (n + SAMPLE_BLOCK - 1) // SAMPLE_BLOCK, s.band_maxima)[1]))
    cut, ties, mass = 0.0, np.int64(0), np.float64(total)
    if real[SampleCall.TOP_P] < 1.0:
        cut, ties, mass = nucleus(n, total, real[SampleCall.TOP_P], s)
    cut, ties, mass = at_least(np.ceil(real[SampleCall.MIN_P] * heaviest), n, cut, ties, mass, s)
    if coin < real[SampleCall.XTC_PROBABILITY]:
        cut, ties, mass = exclude_top(n, cut, ties, mass, real[SampleCall.XTC_THRESHOLD], s)
    return _draw(s.weights, n, s.maxima, cut, ties, np.floor(u * mass))


@jit
def _choose_by_mirostat(call: Any, real: Any, values: Any, n: int, top: Any, floor: Any, s: Any) -> int:
    """The index of one of the values whose surprise is at most mu; notes its own.

    Mirostat 2 of Basu et al. 2021, arXiv:2007.14966.
    """
    slope = slope_of(real[SampleCall.TEMPERATURE])
    u, _ = uniforms(np.uint64(call[SampleCall.SEED]), np.uint64(call[SampleCall.COUNTER]))
    total = np.float64(weigh(values, n, top, floor, slope, s.weights, s.weight_bits, s.maxima))
    share = np.float64(weight_of(min(np.float32(-real[SampleCall.MIROSTAT_MU]), np.float32(0.0)))) / UNIT
    cut, ties, mass = at_least(min(np.ceil(share * total), UNIT), n, 0.0, np.int64(0), total, s)
    index = _draw(s.weights, n, s.maxima, cut, ties, np.floor(u * mass))
    if index >= 0:
        real[SampleCall.SURPRISE] = log2(total / np.float64(s.weights[index]))
    return index


@jit
def _choose(call: Any, real: Any, values: Any, bits: Any, lowest: int, highest: int, s: Any) -> Any:
    """The token, from values that bias, mask and penalties have gone over; -1 would be a fault of this module."""
    n, k = len(values), call[SampleCall.TOP_K]
    first = first_of(bits, n, s.maxima, highest)
    if real[SampleCall.TEMPERATURE] == 0.0:
        return first
    top, floor = values[first], _LEAST_VALUE
    if real[SampleCall.TOP_N_SIGMA] > 0.0:
        floor = sigma_floor(values, bits, n, lowest, highest, real[SampleCall.TOP_N_SIGMA])
    mirostat = call[SampleCall.MIROSTAT] != 0
    size = n  # of the tokens that later stages look at
    if 0 < k < n and not mirostat:
        largest(bits, n, s.maxima, highest, k, s.band, s.ids)
        size = k
    elif floor > _LEAST_VALUE:
        size = gather(bits, n, s.maxima, key_of(bits_of(floor)), highest + 1, s.band, s.ids)
    if size == n:
        if mirostat:
            return _choose_by_mirostat(call, real, values, n, top, floor, s)
        return _choose_by_filters(call, real, values, n, top, floor, s.ids, s)
    scan(s.band, size, s.maxima)
    if mirostat:
        index = _choose_by_mirostat(call, real, s.band_floats, size, top, floor, s)
    else:
        index = _choose_by_filters(call, real, s.band_floats, size, top, floor, s.value_bits, s)
    return np.int64(s.ids[index]) if index >= 0 else -1


@jit
def _report(call: Any, real: Any, logits: Any, bits: Any, highest: int, alternatives: Any, s: Any) -> None:
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
    slope = slope_of(1.0)
    real[SampleCall.TOTAL] = weigh(logits, n, top, _LEAST_VALUE, slope, s.weights, s.weight_bits, s.maxima) / UNIT


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
        and 0 <= call[SampleCall.DRY_WINDOW] <= MAX_DRY_WINDOW
        and call[SampleCall.DRY_ALLOWED] >= 1
        and call[SampleCall.TOP_K] >= 0
        and 0.0 <= real[SampleCall.DRY_MULTIPLIER] <= _MAX_PENALTY
        and 1.0 <= real[SampleCall.DRY_BASE] <= _MAX_PENALTY
        and 0.0 <= real[SampleCall.TOP_N_SIGMA] <= _MAX_SIGMAS
        and 0.0 <= real[SampleCall.TEMPERATURE] <= _MAX_TEMPERATURE
        and 0.0 <= real[SampleCall.TYPICAL_P] <= 1.0
        and 0.0 <= real[SampleCall.TOP_P] <= 1.0
        and 0.0 <= real[SampleCall.MIN_P] <= 1.0
        and 0.0 <= real[SampleCall.XTC_PROBABILITY] <= 1.0
        and 0.0 <= real[SampleCall.XTC_THRESHOLD] <= 1.0
        and abs(real[SampleCall.MIROSTAT_MU]) <= _MAX_MU
        and 0.0 < real[SampleCall.REPETITION] <= _MAX_PENALTY
        and abs(real[SampleCall.PRESENCE]) <= _MAX_PENALTY
        and abs(real[SampleCall.FREQUENCY]) <= _MAX_PENALTY
    )


@jit
def _edit(
    call: Any,
    real: Any,
    logits: Any,
    history: tuple[Any, Any],
    bias: tuple[Any, Any],
    mask: Any,
    dry: tuple[Any, Any, Any],
    s: Any,
) -> bool:
    """Copy the logits, then bias, bans, mask and penalties, in their order; False if an argument is impossible.

    (The mask comes with the copy: no bias lifts a token from minus infinity.)
    """
    values = s.values
    copy_allowed(logits, mask, values)
    if not add_bias(values, *bias):
        return False
    repetition, presence = real[SampleCall.REPETITION], real[SampleCall.PRESENCE]
    if not penalise_seen(values, *history, repetition, presence, real[SampleCall.FREQUENCY]):
        return False
    limit, allowed = call[SampleCall.DRY_LIMIT], call[SampleCall.DRY_ALLOWED]
    multiplier, base = real[SampleCall.DRY_MULTIPLIER], real[SampleCall.DRY_BASE]
    return penalise_repeats(values, *dry, limit, allowed, multiplier, base, s.ids)


@jit
def sample(
    call: Any,
    real: Any,
    logits: Any,
    bits: Any,
    history: tuple[Any, Any],
    bias: tuple[Any, Any],
    mask: Any,
    dry: tuple[Any, Any, Any],
    alternatives: Any,
    s: Any,
) -> int:
    """The body of `sample_row` over arrays; `real` is the float64 view of `call`, `bits` the int32 one of `logits`.

    `history` is (ids, counts), `bias` (ids, values), `dry` (tokens, distances, lengths).
    """
    n = len(logits)
    lowest, highest = scan(bits, n, s.maxima)
    if lowest < -INFINITY_KEY or highest >= INFINITY_KEY or highest == -INFINITY_KEY:
        return SampleStatus.INVALID_ROW
    reported = call[SampleCall.LOGPROBS] != 0
    if reported:
        _report(call, real, logits, bits, highest, alternatives, s)
    if len(history[0]) > 0 or len(bias[0]) > 0 or len(mask) > 0 or len(dry[0]) > 0:
        if not _edit(call, real, logits, history, bias, mask, dry, s):
            return SampleStatus.BAD_CALL
        lowest, highest = scan(s.value_bits, n, s.maxima)
        if highest == -INFINITY_KEY:
            return SampleStatus.NOTHING_ALLOWED
        token = _choose(call, real, s.values, s.value_bits, lowest, highest, s)
    else:
        if reported:
            scan(bits, n, s.maxima)
        token = _choose(call, real, logits, bits, lowest, highest, s)
    if token < 0:
        return SampleStatus.BAD_CALL
    call[SampleCall.TOKEN] = token
    return SampleStatus.OK


@jit
def _scratch_at(address: int, n: int, blocks: int) -> Any:
    row = 4 * SAMPLE_BLOCK * blocks
    weights, band, band_ids, ids = address + row, address + 2 * row, address + 3 * row, address + 4 * row
    maxima = address + 5 * row
    return Scratch(
        f32_at(address, n),
        i32_at(address, n),
        f32_at(weights, n),
        i32_at(weights, n),
        f32_at(band, n),
        i32_at(band, n),
        f32_at(band_ids, n),
        i32_at(band_ids, n),
        i32_at(ids, n),
        i32_at(maxima, blocks),
        i32_at(maxima + 4 * blocks, blocks),
    )


def sample_row(address: int) -> int:
    """Choose one token as the SampleCall record at `address` asks; gives a SampleStatus."""
    call = i64_at(address, CALL_FIELDS)
    real = f64_at(address, CALL_FIELDS)
    if not _in_range(call, real):
        return SampleStatus.BAD_CALL
    n, seen, biases = call[SampleCall.VOCAB], call[SampleCall.HISTORY], call[SampleCall.BIASES]
    window = call[SampleCall.DRY_WINDOW]
    return sample(
        call,
        real,
        f32_at(call[SampleCall.LOGITS], n),
        i32_at(call[SampleCall.LOGITS], n),
        (i32_at(call[SampleCall.HISTORY_IDS], seen), i32_at(call[SampleCall.HISTORY_COUNTS], seen)),
        (i32_at(call[SampleCall.BIAS_IDS], biases), f64_at(call[SampleCall.BIAS_VALUES], biases)),
        i32_at(call[SampleCall.MASK], (n + 31) // 32 if call[SampleCall.MASK] != 0 else 0),
        (
            i32_at(call[SampleCall.DRY_TOKENS], window),
            i32_at(call[SampleCall.DRY_DISTANCES], window),
            i32_at(call[SampleCall.DRY_LENGTHS], window),
        ),
        i32_at(call[SampleCall.ALTERNATIVE_IDS], call[SampleCall.ALTERNATIVES]),
        _scratch_at(call[SampleCall.SCRATCH], n, (n + SAMPLE_BLOCK - 1) // SAMPLE_BLOCK),
    )


ENTRIES = {"sample_row": (types.int64(types.int64), sample_row)}
