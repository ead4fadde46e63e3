"""The sampler's stages that leave tokens out: top-n-sigma, typical, top-p, min-p, XTC. docs/sampling.md has the formulas.

What stays is said by a rule (cut, ties, mass): the weights above `cut` and the first `ties` of those that equal it, which
sum to `mass`. A token of weight 0 is out, too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from edge_llm.kernels.layout import SAMPLE_BLOCK
from edge_llm.kernels.penalties import LARGEST, bounded
from edge_llm.kernels.selection import (
    INFINITY_KEY,
    gather_weights,
    jit,
    jit_any_order,
    key_of,
    lowest_above,
    mass_from,
    narrow_mass,
    scan,
)
from edge_llm.kernels.weights import LEAST_POWER, ONE_KEY, UNIT_KEY, float_of, key_from

_HALF = np.float32(0.5)
_SPREAD_STEPS = np.float32(2.0**21)
_DEPTH_STEPS = np.float32(2.0**20)
_FAR = np.int32(2**31 - 1)


class Scratch(NamedTuple):
    """Arrays [vocab] that one call works in, each as int32 and as float32 where both are needed."""

    values: Any
    """float32"""
    value_bits: Any
    """int32, the same memory"""
    weights: Any
    weight_bits: Any
    band_floats: Any
    band: Any
    band_weights: Any
    band_ids: Any
    """int32, the same memory"""
    ids: Any
    """int32"""
    maxima: Any
    """int32 [blocks], as the next one"""
    band_maxima: Any


@jit
def _deviation(values: Any, n: int, top: np.float32, low: np.float32) -> Any:
    """Standard deviation of the `values` [n] from `low` to `top`, summed exactly in whole steps of (top - low) / 2**21."""
    half_top = top * _HALF  # halves, for the difference of two float32 may be too large for one
    reach = half_top - low * _HALF
    if reach == 0.0:
        return 0.0
    scale = min(_SPREAD_STEPS / reach, np.float32(LARGEST))
    count, total, squares = np.int32(0), np.int64(0), np.int64(0)
    for i in range(n):
        depth = half_top - values[i] * _HALF
        inside = depth <= reach
        steps = np.int32(np.rint((depth if inside else np.float32(0.0)) * scale))
        count = np.int32(count + inside)
        total += np.int64(steps)
        squares += np.int64(steps) * np.int64(steps)
    mean = np.float64(total) / np.float64(count)
    return np.sqrt(max(0.0, np.float64(squares) / np.float64(count) - mean * mean)) / np.float64(scale) * 2.0


@jit
def sigma_floor(values: Any, bits: Any, n: int, lowest: int, highest: int, sigmas: float) -> np.float32:
    """Top-n-sigma: the value `sigmas` standard deviations below the largest. Tokens of minus infinity do not count.

    `lowest` and `highest` are those of `scan`. Tang et al. 2024, arXiv:2411.07641.
    """
    if lowest == -INFINITY_KEY:
        lowest = lowest_above(bits, n, -INFINITY_KEY)
    top, low = float_of(key_of(highest)), float_of(key_of(lowest))
    return bounded(np.float64(top) - sigmas * _deviation(values, n, top, low))


@jit_any_order
def _depth_mass(depths: Any, weights: Any, n: int) -> float:
    """Sum of weight times depth, each rounded to a whole number: of all of a row at most 0.54 * 2**33 * MAX_VOCAB."""
    mass = 0.0
    for i in range(n):
        mass += np.float64(np.rint(weights[i] * np.float32(depths[i]) / _DEPTH_STEPS))
    return mass


@jit_any_order
def _mass_to(distances: Any, weights: Any, n: int, bound: int) -> float:
    most = np.int32(bound)
    mass = 0.0
    for i in range(n):
        mass += np.float64(weights[i]) if distances[i] <= most else 0.0
    return mass


@jit
def _gather_between(distances: Any, weights: Any, n: int, low: int, high: int, kept: Any, kept_weights: Any) -> Any:
    """Put distances in (low, high] and their weights into `kept` and `kept_weights`; gives how many."""
    found = np.uint64(0)
    first, width = np.int32(low + 1), np.uint32(high - low)
    for i in range(np.uint64(n)):
        distance, weight = distances[i], weights[i]
        kept[found], kept_weights[found] = distance, weight
        found += np.uint64(np.uint32(np.int32(distance - first)) < width)
    return np.int64(found)


@jit
def keep_typical(
    values: Any, n: int, top: np.float32, slope: np.float32, total: int, share: float, depths: Any, s: Any
) -> Any:
    """Typical: leave out all but the tokens whose surprise is nearest to the expected one; gives the sum of the weights left.

    Weights of what is out become 0, `s.maxima` follow. `depths` is int32 scratch [n]. Meister et al. 2022,
    arXiv:2202.00666: of the distances |-log p - entropy| the shortest for which p sums to `share`; all at that distance stay.
    """
    # -log2 p is depth + log2(sum of weights), so the distance from the entropy is that of the depth from its mean
    for i in range(n):  # depth: how many bits less probable than the first, in steps of 2**-20
        depths[i] = np.int32(np.rint(max((values[i] - top) * slope, LEAST_POWER) * -_DEPTH_STEPS))
    mean = np.int32(np.rint(_depth_mass(depths, s.weights, n) * np.float64(_DEPTH_STEPS) / total))
    furthest: Any = np.int32(0)
    for i in range(n):
        distance: Any = np.int32(abs(depths[i] - mean))
        depths[i] = distance
        furthest = max(furthest, distance if s.weights[i] > 0.0 else np.int32(0))
    need = max(1.0, np.ceil(share * total))
    distances, weights, size = depths, s.weights, n
    high: Any = np.int64(furthest)
    low, below = -1, 0.0
    while high - low > 1:
        width = max(1, (high - low) // 16)
        within = below
        while high - low > width:
            middle = low + (high - low) // 2
            mass = below + _mass_to(distances, weights, size, middle)
            if mass >= need:
                high = middle
            else:
                low = middle
                within = mass
        size = _gather_between(distances, weights, size, low, high, s.band, s.band_weights)
        distances, weights, below = s.band, s.band_weights, within
    for i in range(n):
        s.weights[i] = s.weights[i] if depths[i] <= high else np.float32(0.0)
    scan(s.weight_bits, n, s.maxima)
    return np.int64(below + _mass_to(distances, weights, size, high))


@jit
def nucleus(n: int, total: int, share: float, s: Any) -> tuple[Any, Any, Any]:
    """Top-p: the rule for the smallest set of largest weights that sum to `share` of `total`.

    Holtzman et al. 2019, arXiv:1904.09751.
    """
    need: Any = max(1, np.int64(np.ceil(share * total)))
    # all weights below 1 + (total - need) / n together are no more than may be left out
    low: Any = max(ONE_KEY, key_from(1.0 + (total - need) // n) - 1)
    high, above = UNIT_KEY + 1, np.int64(0)
    size = gather_weights(s.weight_bits, n, s.maxima, low, high, s.band)
    while True:
        low, highest = scan(s.band, size, s.band_maxima)
        low, high, above = narrow_mass(
            s.band_floats, size, s.band_maxima, low, highest + 1, need, above, max(1, (highest + 1 - low) // 16)
        )
        if high - low == 1:
            break
        size = gather_weights(s.band, size, s.band_maxima, low, high, s.band)  # those that are still in doubt
    cut = np.int64(float_of(low))
    ties = (need - above + cut - 1) // cut
    return np.float64(cut), ties, np.float64(above + ties * cut)


@jit
def at_least(least: float, n: int, cut: float, ties: int, mass: float, s: Any) -> tuple[Any, Any, Any]:
    """The rule (cut, ties, mass) without weights below `least`, a whole number that the largest weight reaches."""
    if least <= cut or least <= 1.0:
        return cut, ties, mass
    return least - 1.0, np.int64(0), np.float64(mass_from(s.weights, n, s.maxima, key_from(least)))


@jit
def exclude_top(n: int, cut: float, ties: int, mass: float, threshold: float, s: Any) -> tuple[Any, Any, Any]:
    """XTC: of the tokens with a probability of at least `threshold` leave out all but the least probable one.

    Of equal ones the last stays. Weights of what is out become 0. p-e-w, text-generation-webui pull request 6335.
    """
    least = max(np.ceil(threshold * mass), cut if ties > 0 else cut + 1.0, 1.0)
    lowest, count, equal, removed = _range_from(s.weights, n, s.maxima, least)
    if lowest == cut:
        count, removed, equal = count - equal + ties, removed - (equal - ties) * cut, ties
    if count < 2:
        return cut, ties, mass
    for block in range((n + SAMPLE_BLOCK - 1) // SAMPLE_BLOCK):
        if np.float64(float_of(s.maxima[block])) < least:
            continue
        for i in range(block * SAMPLE_BLOCK, min(n, (block + 1) * SAMPLE_BLOCK)):
            weight = np.float64(s.weights[i])
            if weight < least:
                continue
            equal -= weight == lowest
            if weight > lowest or equal > 0:
                s.weights[i] = np.float32(0.0)
    return cut, ties, mass - removed + lowest  # if lowest is cut, only the first of the equal ones left has mass


@jit
def _range_from(weights: Any, n: int, maxima: Any, least: float) -> tuple[Any, Any, Any, Any]:
    """Of the weights from `least` on: the lowest, how many there are, how many equal the lowest, and their sum."""
    equal: Any = np.int64(0)
    lowest, count, mass = np.inf, np.int64(0), 0.0
    for block in range((n + SAMPLE_BLOCK - 1) // SAMPLE_BLOCK):
        if np.float64(float_of(maxima[block])) < least:
            continue
        for i in range(block * SAMPLE_BLOCK, min(n, (block + 1) * SAMPLE_BLOCK)):
            weight = np.float64(weights[i])
            if weight < least:
                continue
            count += 1
            mass += weight
            if weight < lowest:
                lowest, equal = weight, 0
            equal += weight == lowest
    return lowest, count, equal, mass
