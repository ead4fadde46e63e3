"""Finding the largest of many numbers without sorting: thresholds on integer keys, by bisection with vectorised passes."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from edge_llm.kernels.layout import SAMPLE_BLOCK

_jit = numba.njit(error_model="numpy")
# Only for sums of whole numbers below 2**53, which no order of adding rounds.
_jit_any_order = numba.njit(error_model="numpy", fastmath={"reassoc"})

INFINITY_KEY = 0x7F800000
"""key of plus infinity; minus it is the key of minus infinity, and NaNs lie beyond both"""
_LEAST = np.int32(-(2**31))


@_jit
def key_of(bits: int) -> int:
    """The int32 that orders as the float32 of these int32 `bits` does; -0.0 and 0.0 are one."""
    return np.int32(bits if bits >= 0 else _LEAST - bits)


@_jit
def scan(bits: Any, n: int, maxima: Any) -> tuple[int, int]:
    """Lowest and highest key of `bits` [n]; `maxima` gets the highest of each block of SAMPLE_BLOCK."""
    lowest = highest = key_of(bits[0])
    for block in range((n + SAMPLE_BLOCK - 1) // SAMPLE_BLOCK):
        top = _LEAST
        for i in range(np.uint64(block * SAMPLE_BLOCK), np.uint64(min(n, (block + 1) * SAMPLE_BLOCK))):
            key = key_of(bits[i])
            top = max(top, key)
            lowest = min(lowest, key)
        maxima[block] = top
        highest = max(highest, top)
    return lowest, highest


@_jit
def first_of(bits: Any, n: int, maxima: Any, key: int) -> int:
    """The lowest index that holds `key`, the highest key that `scan` found."""
    block = 0
    while maxima[block] != key:
        block += 1
    i = block * SAMPLE_BLOCK
    while i < n - 1 and key_of(bits[i]) != key:
        i += 1
    return i


@_jit
def count_from(keys: Any, n: int, threshold: int) -> int:
    """How many of `keys` [n] are at or above `threshold`."""
    least = np.int32(threshold)
    found = np.int32(0)
    for i in range(n):
        found = np.int32(found + (keys[i] >= least))
    return found


@_jit_any_order
def mass_from(weights: Any, n: int, threshold: int) -> int:
    """Sum of those `weights` [n], whole float32 numbers, whose key is at or above `threshold`."""
    least = np.int32(threshold).view(np.float32)
    total = 0.0
    for i in range(n):
        total += np.float64(weights[i]) if weights[i] >= least else 0.0
    return np.int64(total)


@_jit
def gather(bits: Any, n: int, low: int, high: int, keys: Any, ids: Any) -> int:
    """Put keys and indices of those in [low, high) into `keys` and `ids` [n], by rising index; gives how many."""
    found = 0
    for start in range(0, n, SAMPLE_BLOCK):
        first, stop = np.uint64(start), np.uint64(min(n, start + SAMPLE_BLOCK))
        top = _LEAST
        for i in range(first, stop):
            top = max(top, key_of(bits[i]))
        if top >= low:
            for i in range(first, stop):  # always written, counted if wanted: no branch to guess wrong
                key = key_of(bits[i])
                keys[found] = key
                ids[found] = i
                found += (key >= low) & (key < high)
    return found


@_jit
def narrow_count(keys: Any, n: int, low: int, high: int, need: int) -> tuple[int, int]:
    """The highest key that at least `need` of `keys` [n] reach, and how many exceed it. All `need` reach `low`, none `high`."""
    above = 0
    while high - low > 1:
        middle = low + (high - low) // 2
        found = count_from(keys, n, middle)
        if found >= need:
            low = middle
        else:
            high = middle
            above = found
    return low, above


@_jit
def narrow_mass(weights: Any, n: int, low: int, high: int, need: int, above: int, width: int) -> tuple[int, int, int]:
    """Bisect [low, high) until it is at most `width`: the weights from `low` on sum to `need`, those from `high` on do not.

    `above` is the sum of weights from `high` on, which are not among `weights` [n]. Gives low, high and above anew.
    """
    beyond = above
    while high - low > width:
        middle = low + (high - low) // 2
        mass = beyond + mass_from(weights, n, middle)
        if mass >= need:
            low = middle
        else:
            high = middle
            above = mass
    return low, high, above


@_jit
def largest(bits: Any, n: int, maxima: Any, highest: int, k: int, band: Any, band_ids: Any, ids: Any) -> None:
    """Put the indices of the `k` < n largest into `ids`, by rising index; at the cut-off the lowest indices are kept.

    `maxima` and `highest` are those of `scan`; `band`, `band_ids` int32 [n] are scratch.
    """
    blocks = (n + SAMPLE_BLOCK - 1) // SAMPLE_BLOCK
    low = -INFINITY_KEY
    if k < blocks:  # k blocks hold at least one number each at or above the k-th largest maximum
        low, _ = narrow_count(maxima, blocks, low, highest + 1, k)
    size = gather(bits, n, low, highest + 1, band, band_ids)
    cut, above = narrow_count(band, size, low, highest + 1, k)
    ties = k - above
    kept = 0
    for j in range(size):
        if band[j] < cut or (band[j] == cut and ties == 0):
            continue
        ties -= band[j] == cut
        ids[kept] = band_ids[j]
        kept += 1
