"""Attention over a ring, slow and in float64: what the attention kernels approximate. Written from the contract alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Rules:
    """Row p sees k <= p with k < sinks or k > p - window; scores are scaled, then capped."""

    scale: float
    window: int
    sinks: int = 0
    softcap: float = 0.0


def turn(x: np.ndarray, rope: np.ndarray | None, gamma: np.ndarray | None = None, eps: float = 0.0) -> np.ndarray:
    """float64 [..., dim]: RMS norm if there is a `gamma`, rotary embedding if there is a `rope` (cosines, then sines)."""
    x = x.astype(np.float64)
    if gamma is not None:
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * gamma
    if rope is None:
        return x
    cosine, sine = np.split(rope.astype(np.float64), 2)
    half = len(cosine)
    a, b = x[..., :half], x[..., half : 2 * half]
    return np.concatenate([a * cosine - b * sine, b * cosine + a * sine, x[..., 2 * half :]], -1)


def physical_row(position: int, sinks: int, capacity: int) -> int:
    """Where the row of a position lies: sinks stay, the others go round."""
    return position if position < sinks else sinks + (position - sinks) % (capacity - sinks)


def attend(
    query: np.ndarray, sink_query: np.ndarray, keys: np.ndarray, values: np.ndarray, position: int, rules: Rules
) -> np.ndarray:
    """float64 [dim] of one query at `position` from keys and values [positions, dim]; sinks are scored by `sink_query`."""
    k = np.arange(position + 1)
    seen = (k < rules.sinks) | (k > position - rules.window)
    keys, values, k = keys[: position + 1][seen], values[: position + 1][seen], k[seen]
    scores = np.where(k < rules.sinks, keys @ sink_query, keys @ query) * rules.scale
    if rules.softcap:
        scores = rules.softcap * np.tanh(scores / rules.softcap)
    weights = np.exp(scores - scores.max())
    return weights @ values / weights.sum()
