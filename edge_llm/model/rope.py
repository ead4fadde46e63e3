"""Cosines and sines of rotary position embedding, computed by the host in float64: any position, no table limit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from edge_llm.model.manifest import RopeTable

_BLOCK = 64
"""positions whose rows are computed together and kept"""
_KEPT_BLOCKS = 32
"""more than an engine answers conversations at a time"""
_FEW = 8
"""positions up to which looking rows up is quicker than computing them all at once"""


@lru_cache(maxsize=16)
def inverse_frequencies(table: RopeTable) -> np.ndarray:
    """float64 [rotary_dim / 2]: base^(-2i / rotary_dim) (RoFormer, arXiv:2104.09864), divided by the table's factors."""
    exponents = np.arange(0, table.rotary_dim, 2, dtype=np.float64) / table.rotary_dim
    frequencies = table.base**-exponents / table.factor
    if table.frequency_factors is not None:
        frequencies /= np.asarray(table.frequency_factors, np.float64)
    frequencies.flags.writeable = False
    return frequencies


def rope_rows(tables: Sequence[RopeTable], positions: np.ndarray, out: np.ndarray) -> None:
    """Fill `out` float32 [tables, rows, rotary_dim] for int64 `positions` [rows]: cosines, then sines."""
    for table, rows in zip(tables, out, strict=True):
        angles = positions[:, None] * inverse_frequencies(table)
        half = table.rotary_dim // 2
        rows[:, :half] = np.cos(angles)
        rows[:, half:] = np.sin(angles)


class RopeRows:
    """What `rope_rows` gives, for steps that follow one another: a token's row was computed with those before it."""

    def __init__(self, tables: Sequence[RopeTable]) -> None:
        self._tables = tables
        self._blocks: OrderedDict[int, np.ndarray] = OrderedDict()

    def fill(self, positions: np.ndarray, out: np.ndarray) -> None:
        """As `rope_rows`."""
        if len(positions) > _FEW:
            rope_rows(self._tables, positions, out)
            return
        for row, position in enumerate(positions.tolist()):
            number, place = divmod(position, _BLOCK)
            out[:, row] = self._block(number)[:, place]

    def _block(self, number: int) -> np.ndarray:
        """float32 [tables, _BLOCK, rotary_dim] from position `number` * _BLOCK on."""
        block = self._blocks.get(number)
        if block is None:
            if len(self._blocks) >= _KEPT_BLOCKS:
                self._blocks.popitem(last=False)
            rotary_dim = self._tables[0].rotary_dim if self._tables else 0
            block = self._blocks[number] = np.empty((len(self._tables), _BLOCK, rotary_dim), np.float32)
            rope_rows(self._tables, np.arange(number * _BLOCK, (number + 1) * _BLOCK), block)
        self._blocks.move_to_end(number)
        return block
