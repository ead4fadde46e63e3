"""Norms and activations in float64."""

from __future__ import annotations

import numpy as np


def rms_norm(x: np.ndarray, gamma: np.ndarray, eps: float) -> np.ndarray:
    """x / sqrt(mean(x^2) + eps) * gamma over groups of len(gamma) of the last axis."""
    groups = x.astype(np.float64).reshape(len(x), -1, len(gamma))
    normed = groups / np.sqrt((groups**2).mean(-1, keepdims=True) + eps) * gamma
    return normed.reshape(x.shape)


def silu(x: np.ndarray) -> np.ndarray:
    """x / (1 + exp(-x))."""
    return _times_sigmoid(x, x)


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    """x / 2 (1 + tanh(z)) with z = sqrt(2 / pi) (x + 0.044715 x^3); as x sigmoid(2 z), which does not cancel."""
    return _times_sigmoid(x, 2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))


def _times_sigmoid(x: np.ndarray, z: np.ndarray) -> np.ndarray:
    e = np.exp(-np.abs(z))
    return x * np.where(z >= 0, 1.0, e) / (1 + e)
