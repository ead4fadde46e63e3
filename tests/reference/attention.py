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
    """float64 [..., dim]: RMS norm if there is a `gamma`, rotary embedding if there is a `rope` [..., cosines, then sines]."""
    x = x.astype(np.float64)
    if gamma is not None:
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * gamma
    if rope is None:
        return x
    cosine, sine = np.split(rope.astype(np.float64), 2, axis=-1)
    half = cosine.shape[-1]
    a, b = x[..., :half], x[..., half : 2 * half]
    return np.concatenate([a * cosine - b * sine, b * cosine + a * sine, x[..., 2 * half :]], -1)


def physical_row(position: int, sinks: int, capacity: int) -> int:
    """Where the row of a position lies: sinks stay, the others go round."""
    return position if position < sinks else sinks + (position - sinks) % (capacity - sinks)


def attend(
    queries: np.ndarray, sink_queries: np.ndarray, keys: np.ndarray, values: np.ndarray, first: int, rules: Rules
) -> np.ndarray:
    """float64 [rows, heads, dim] of queries [rows, heads, dim] at the positions `first`, `first` + 1, ...

    Keys and values are [positions, kv_heads, dim]; those of sinks meet `sink_queries`.
    """
    rows, heads, _ = queries.shape
    p, k = first + np.arange(rows)[:, None], np.arange(first + rows)
    seen = (k <= p) & ((k < rules.sinks) | (k > p - rules.window))
    k = k[seen.any(axis=0)]
    out = np.empty(queries.shape)
    for h in range(heads):
        g = h * keys.shape[1] // heads
        mine, stored = keys[k, g], values[k, g]
        scores = np.where(k < rules.sinks, sink_queries[:, h] @ mine.T, queries[:, h] @ mine.T) * rules.scale
        if rules.softcap:
            scores = rules.softcap * np.tanh(scores / rules.softcap)
        scores[~seen[:, k]] = -np.inf
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[:, h] = weights @ stored / weights.sum(axis=1, keepdims=True)
    return out
