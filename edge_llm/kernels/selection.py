"""Finding the largest of many numbers without sorting: thresholds on integer keys, by bisection with vectorised passes.

Arrays hold the int32 bits of float32 numbers; a key orders bits as the numbers are ordered. Numbers are taken in
blocks of SAMPLE_BLOCK whose maxima are known, so that a pass leaves out blocks it does not concern. Loops that start
inside an array run over unsigned indices: numba then omits the test for negative ones, which would keep them from being
vectorised.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from edge_llm.kernels.layout import SAMPLE_BLOCK

jit = numba.njit(error_model="numpy")
# Only for sums of whole numbers below 2**53, which no order of adding rounds.
jit_any_order = numba.njit(error_model="numpy", fastmath={"reassoc"})

INFINITY_KEY = 0x7F800000
"""key of plus infinity; minus it is the key of minus infinity, and NaNs lie beyond both"""
_LEAST = np.int32(-(2**31))


@jit
def key_of(bits: int) -> Any:
    """The int32 that orders as the float32 of these int32 `bits` does, -0.0 as 0.0; given a key, the bits."""
    return np.int32(bits if bits >= 0 else _LEAST - bits)


@jit
def scan(bits: Any, n: int, maxima: Any) -> tuple[Any, Any]:
    """Lowest and highest key of `bits` [n]; `maxima` gets the bits of the largest of each block."""
    lowest = highest = key_of(bits[0])
    for block in range((n + SAMPLE_BLOCK - 1) // SAMPLE_BLOCK):
        top = _LEAST
        for i in range(np.uint64(block * SAMPLE_BLOCK), np.uint64(min(n, (block + 1) * SAMPLE_BLOCK))):
            key = key_of(bits[i])
            top = max(top, key)
            lowest = min(lowest, key)
        maxima[block] = key_of(top)
        highest = max(highest, top)
    return np.int64(lowest), np.int64(highest)


@jit
def first_of(bits: Any, n: int, maxima: Any, key: int) -> int:
    """The lowest index that holds `key`, the highest one that `scan` found."""
    block = 0
    while key_of(maxima[block]) != key:
        block += 1
    i = block * SAMPLE_BLOCK
    while i < n - 1 and key_of(bits[i]) != key:
        i += 1
    return i


@jit
def lowest_above(bits: Any, n: int, threshold: int) -> Any:
    """Lowest key of `bits` [n] above `threshold`; there must be one."""
    floor = np.int32(threshold)
    lowest = np.int32(INFINITY_KEY)
    for i in range(n):
        key = key_of(bits[i])
        lowest = min(lowest, key if key > floor else np.int32(INFINITY_KEY))
    return np.int64(lowest)


@jit
def count_from(bits: Any, n: int, threshold: int) -> Any:
    """How many of `bits` [n] have a key at or above `threshold`."""
    least = np.int32(threshold)
    found = np.int32(0)
    for i in range(n):
        found = np.int32(found + (key_of(bits[i]) >= least))
    return found


@jit_any_order
def block_mass(weights: Any, start: int, stop: int, least: np.float32) -> float:
    """Sum of those whole `weights` [start, stop) that are at least `least`."""
    mass = 0.0
    for i in range(np.uint64(start), np.uint64(stop)):
        mass += np.float64(weights[i]) if weights[i] >= least else 0.0
    return mass


@jit
def mass_from(weights: Any, n: int, maxima: Any, threshold: int) -> Any:
    """Sum of those `weights` [n], whole float32 numbers, whose key is at or above `threshold`."""
    least = np.int32(threshold).view(np.float32)
    mass = 0.0
    for block in range((n + SAMPLE_BLOCK - 1) // SAMPLE_BLOCK):
        if maxima[block] >= threshold:
            mass += block_mass(weights, block * SAMPLE_BLOCK, min(n, (block + 1) * SAMPLE_BLOCK), least)
    return np.int64(mass)


@jit
def gather(bits: Any, n: int, maxima: Any, low: int, high: int, band: Any, ids: Any) -> Any:
    """Put bits and indices of those with a key in [low, high) into `band` and `ids`, by rising index; gives how many.

    `band` may be `bits` itself.
    """
    found = np.uint64(0)
    first, width = np.int32(low), np.uint32(high - low)
    for block in range((n + SAMPLE_BLOCK - 1) // SAMPLE_BLOCK):
        if key_of(maxima[block]) >= low:
            for i in range(np.uint64(block * SAMPLE_BLOCK), np.uint64(min(n, (block + 1) * SAMPLE_BLOCK))):
                ids[found] = i  # always written, counted if wanted: no branch to guess wrong
                found += np.uint64(np.uint32(np.int32(key_of(bits[i]) - first)) < width)
    for j in range(found):
        band[j] = bits[ids[j]]
    return np.int64(found)


@jit
def gather_weights(bits: Any, n: int, maxima: Any, low: int, high: int, band: Any) -> Any:
    """`gather` without indices, for numbers that are not negative."""
    found = np.uint64(0)
    first, width = np.int32(low), np.uint32(high - low)
    for block in range((n + SAMPLE_BLOCK - 1) // SAMPLE_BLOCK):
        if maxima[block] >= low:
            for i in range(np.uint64(block * SAMPLE_BLOCK), np.uint64(min(n, (block + 1) * SAMPLE_BLOCK))):
                weight = bits[i]
                band[found] = weight
                found += np.uint64(np.uint32(np.int32(weight - first)) < width)
    return np.int64(found)


@jit
def narrow_count(bits: Any, n: int, low: int, high: int, need: int, width: int) -> tuple[int, int]:
    """Bisect [low, high) to `width`, so that `need` of `bits` [n] have keys from `low` on, but not from `high` on.

    Gives `low` anew and how many have keys from the new `high` on, there being none from the given one on.
    """
    above = 0
    while high - low > width:
        middle = low + (high - low) // 2
        found = count_from(bits, n, middle)
        if found >= need:
            low = middle
        else:
            high = middle
            above = found
    return low, above


@jit
def narrow_mass(
    weights: Any, n: int, maxima: Any, low: int, high: int, need: int, above: int, width: int
) -> tuple[int, int, int]:
    """Bisect [low, high) to `width`, so that the weights from `low` on sum to `need`, but not those from `high` on.

    `above` is the sum of weights from `high` on, which are not among `weights` [n]. Gives low, high and above anew.
    """
    beyond = above
    while high - low > width:
        middle = low + (high - low) // 2
        mass = beyond + mass_from(weights, n, maxima, middle)
        if mass >= need:
            low = middle
        else:
            high = middle
            above = mass
    return low, high, above


@jit
def largest(bits: Any, n: int, maxima: Any, highest: int, k: int, band: Any, ids: Any) -> None:
    """Put bits and indices of the `k` < n largest into `band` and `ids` [n], by rising index.

    Of those that are equal at the cut-off the lowest indices are kept. `maxima` and `highest` are those of `scan`.
    """
    blocks = (n + SAMPLE_BLOCK - 1) // SAMPLE_BLOCK
    if k < blocks:  # k blocks hold at least one number each at or above the k-th largest maximum
        low, _ = narrow_count(maxima, blocks, -INFINITY_KEY, highest + 1, k, 1)
    else:
        low, _ = narrow_count(bits, n, -INFINITY_KEY, highest + 1, k, 1 << 22)
    size = gather(bits, n, maxima, low, highest + 1, band, ids)
    cut, above = narrow_count(band, size, low, highest + 1, k, 1)
    ties = k - above
    kept = 0
    for j in range(size):
        key = key_of(band[j])
        if key < cut or (key == cut and ties == 0):
            continue
        ties -= key == cut
        band[kept], ids[kept] = band[j], ids[j]
        kept += 1
        if kept == k:
            break
