"""Rotary tables against the formula written out."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_llm.model.manifest import RopeTable
from edge_llm.model.rope import RopeRows, rope_rows

TABLES = (
    RopeTable(base=1e4, rotary_dim=8),
    RopeTable(base=1e6, rotary_dim=8, factor=4.0),
    RopeTable(base=5e5, rotary_dim=8, frequency_factors=(1.0, 2.0, 4.0, 8.0)),
)


@pytest.mark.parametrize("position", [0, 1, 511, 8192, 1_000_003])
def test_rows_follow_the_formula(position: int) -> None:
    out = np.empty((len(TABLES), 1, 8), np.float32)
    rope_rows(TABLES, np.array([position]), out)
    for table, row in zip(TABLES, out[:, 0], strict=True):
        for i in range(4):
            angle = position * table.base ** (-2 * i / 8) / table.factor / (table.frequency_factors or [1] * 4)[i]
            assert row[i] == pytest.approx(math.cos(angle), abs=1e-6)
            assert row[4 + i] == pytest.approx(math.sin(angle), abs=1e-6)


def test_a_row_depends_on_its_position_only() -> None:
    many, one = np.empty((3, 100, 8), np.float32), np.empty((3, 1, 8), np.float32)
    rope_rows(TABLES, np.arange(1000, 1100), many)
    for i in (0, 7, 99):
        rope_rows(TABLES, np.array([1000 + i]), one)
        assert np.array_equal(many[:, i], one[:, 0])


@given(st.lists(st.lists(st.integers(0, 5000), min_size=1, max_size=12), min_size=1, max_size=60))
def test_kept_rows_are_those_that_would_be_computed(steps: list[list[int]]) -> None:
    kept = RopeRows(TABLES)
    for positions in steps:
        out, expected = (np.empty((len(TABLES), len(positions), 8), np.float32) for _ in range(2))
        kept.fill(np.array(positions), out)
        rope_rows(TABLES, np.array(positions), expected)
        assert np.array_equal(out, expected)
