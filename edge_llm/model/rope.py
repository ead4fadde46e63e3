"""Cosines and sines of rotary position embedding, computed by the host in float64: any position, no table limit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge_llm.model.manifest import RopeTable


def inverse_frequencies(table: RopeTable) -> np.ndarray:
    """float64 [rotary_dim / 2]: base^(-2i / rotary_dim) (RoFormer, arXiv:2104.09864), divided by the table's factors."""
    exponents = np.arange(0, table.rotary_dim, 2, dtype=np.float64) / table.rotary_dim
    frequencies = table.base**-exponents / table.factor
    if table.frequency_factors is not None:
        frequencies /= np.asarray(table.frequency_factors, np.float64)
    return frequencies


def rope_rows(tables: Sequence[RopeTable], positions: np.ndarray, out: np.ndarray) -> None:
    """Fill `out` float32 [tables, rows, rotary_dim] for int64 `positions` [rows]: cosines, then sines."""
    for table, rows in zip(tables, out, strict=True):
        angles = positions[:, None] * inverse_frequencies(table)
        half = table.rotary_dim // 2
        rows[:, :half] = np.cos(angles)
        rows[:, half:] = np.sin(angles)
