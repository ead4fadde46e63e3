"""Attention over a ring, slow and in float64: what `edge_llm.kernels.attention` approximates. Written from the contract."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

TILE = 64


@dataclass(frozen=True)
class Rules:
    """Which keys a row sees (k < sinks or p - window < k, and k <= p), and how scores are scaled and capped."""

    scale: float
    window: int = 1 << 40
    sinks: int = 0
    softcap: float = 0.0


def turn(x: np.ndarray, rope: np.ndarray | None, gamma: np.ndarray | None = None, eps: float = 0.0) -> np.ndarray:
    """RMS norm (if `gamma`) and rotary embedding (if `rope`: cosines, then sines) of the vectors x[..., dim], in float64."""
    x = x.astype(np.float64)
    if gamma is not None:
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * gamma
    if rope is None:
        return x
    half = len(rope) // 2
    cosine, sine = rope[:half].astype(np.float64), rope[half:].astype(np.float64)
    a, b = x[..., :half], x[..., half : 2 * half]
    return np.concatenate([a * cosine - b * sine, b * cosine + a * sine, x[..., 2 * half :]], -1)


def physical_row(position: int, sinks: int, capacity: int) -> int:
    """Where the row of a position lies: sinks stay, the others go round."""
    return position if position < sinks else sinks + (position - sinks) % (capacity - sinks)


def attend(
    query: np.ndarray, keys: np.ndarray, values: np.ndarray, position: int, rules: Rules, sink_query: np.ndarray
) -> np.ndarray:
    """Output [dim] of one query [dim] at `position`, from keys and values [positions, dim]; sinks are scored by `sink_query`."""
    k = np.arange(position + 1)
    seen = (k < rules.sinks) | (k > position - rules.window)
    scores = (
        np.where(k < rules.sinks, keys[: position + 1] @ sink_query, keys[: position + 1] @ query)[seen] * rules.scale
    )
    if rules.softcap:
        scores = rules.softcap * np.tanh(scores / rules.softcap)
    weights = np.exp(scores - scores.max())
    return weights @ values[: position + 1][seen] / weights.sum()
