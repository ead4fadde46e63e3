"""The sampler's stages that change single logits: bias and bans, grammar mask, penalties. docs/sampling.md has the formulas."""

from __future__ import annotations

from typing import Any

import numpy as np

from edge_llm.kernels.selection import jit

LARGEST = float(np.finfo(np.float32).max)
_BAN = -100.0
_MOST_DRY = 128.0
"""enough for weight 0 at any temperature up to 5, and too little to spoil the standard deviation of the logits"""


@jit
def bounded(value: float) -> np.float32:
    """float32 that is infinite only if `value` is: a huge logit must neither ban its token nor drown all others."""
    if value == -np.inf:
        return np.float32(value)
    return np.float32(max(-LARGEST, min(LARGEST, value)))


@jit
def add_bias(values: Any, ids: Any, biases: Any) -> bool:
    """Add `biases` to the values of `ids`; False if one is no number, or an id is not of the vocabulary."""
    for j in range(len(ids)):
        i = ids[j]
        if i < 0 or i >= len(values) or np.isnan(biases[j]):
            return False
        values[i] = bounded(-np.inf if biases[j] <= _BAN else values[i] + biases[j])
    return True


@jit
def copy_allowed(logits: Any, mask: Any, values: Any) -> None:
    """Copy `logits` to `values`, minus infinity for tokens whose bit in `mask` is not set; an empty one allows all."""
    n = len(logits)
    if len(mask) == 0:
        for i in range(n):
            values[i] = logits[i]
        return
    for word in range(n // 32):
        allowed = mask[word]
        for lane in range(32):
            at = np.uint64(32 * word + lane)
            values[at] = logits[at] if (allowed >> np.int32(lane)) & 1 else np.float32(-np.inf)
    for i in range(n // 32 * 32, n):
        values[i] = logits[i] if (mask[n // 32] >> np.int32(i % 32)) & 1 else np.float32(-np.inf)


@jit
def penalise_seen(values: Any, ids: Any, counts: Any, repetition: float, presence: float, frequency: float) -> bool:
    """Repetition, presence and frequency penalties of distinct `ids`; False if an id is not of the vocabulary."""
    for j in range(len(ids)):
        i = ids[j]
        if i < 0 or i >= len(values):
            return False
        value = np.float64(values[i])
        value = value / repetition if value > 0.0 else value * repetition
        if counts[j] > 0:
            value -= presence + frequency * counts[j]
        values[i] = bounded(value)
    return True


@jit
def _measure_repeats(tokens: Any, distances: Any, limit: int, lengths: Any) -> None:
    """lengths[k] = how many of the last tokens also stand k tokens earlier, for each k at which the last token stands.

    The Z algorithm over the reversed text, leaving out all places where nothing can match: what it reads of `lengths`
    it has written before. Two tokens that are found equal are never compared again, so the cost is O(such places and
    tokens repeated there), at most O(window).
    """
    last = len(tokens) - 1
    left = right = 0  # the repeat that reaches back furthest lies from `left` to before `right` tokens before the end
    j = last
    while 0 < distances[j] <= j:
        j -= distances[j]
        k = last - j
        same = min(np.int64(lengths[k - left]), right - k) if k < right else 0
        if k + same >= right:
            while same < limit and k + same <= last and tokens[last - same] == tokens[j - same]:
                same += 1
            left, right = k, k + same
        lengths[k] = same


@jit
def _power(base: float, exponent: int) -> float:
    """By squaring: libraries round their powers differently."""
    result = 1.0
    while exponent > 0:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


@jit
def penalise_repeats(
    values: Any,
    tokens: Any,
    distances: Any,
    lengths: Any,
    limit: int,
    allowed: int,
    multiplier: float,
    base: float,
    longest: Any,
) -> bool:
    """DRY: lower the value of each token that would lengthen a repeat of at least `allowed` tokens.

    Arguments are the fields of SampleCall of that name; `longest` is int32 scratch [vocab]. False if a token is not of
    the vocabulary.
    """
    last = len(tokens) - 1
    if limit < allowed or last < 1:
        return True
    _measure_repeats(tokens, distances, limit, lengths)
    for phase in range(3):  # forget, find the longest repeat that a token would continue, penalise it once
        j = last
        while 0 < distances[j] <= j:
            j -= distances[j]
            token, length = tokens[j + 1], lengths[last - j]
            if token >= len(values):
                return False
            if length < allowed or token < 0:
                continue
            if phase == 0:
                longest[token] = 0
            elif phase == 1:
                longest[token] = max(longest[token], length)
            elif longest[token] > 0:
                penalty = min(multiplier * _power(base, np.int64(longest[token]) - allowed), _MOST_DRY)
                values[token] = bounded(np.float64(values[token]) - penalty)
                longest[token] = 0
    return True
