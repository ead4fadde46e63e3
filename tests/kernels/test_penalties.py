"""DRY's search for repeats against one that compares every place with the end, and how much of the text it reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_llm.kernels.penalties import _measure_repeats, penalise_repeats
from edge_llm.sampling.dry import DryWindow
from edge_llm.sampling.params import SamplingParams
from tests.reference import sampling as truth

LETTERS = 5


def window_of(text: list[int], breakers: set[int], size: int) -> DryWindow:
    return DryWindow(size, [b"!"], lambda token: b"!" if token in breakers else b"", text)


def penalties(text: list[int], breakers: set[int], params: SamplingParams) -> dict[int, float]:
    window = window_of(text, breakers, params.dry_penalty_last_n)
    values, longest = np.zeros(LETTERS, np.float32), np.full(LETTERS, 99, np.int32)
    options = (window.limit, params.dry_allowed_length, params.dry_multiplier, params.dry_base)
    assert penalise_repeats(values, *window.rows, *options, longest)
    return {token: -float(value) for token, value in enumerate(values) if value}


@settings(max_examples=1500)
@given(
    st.lists(st.integers(0, LETTERS - 1), max_size=60),
    st.lists(st.integers(0, LETTERS - 1), max_size=6),
    st.integers(0, 8),
    st.sets(st.integers(0, LETTERS - 1), max_size=2),
    st.integers(1, 5),
    st.sampled_from([1, 2, 3, 10, 40, 1000]),
    st.sampled_from([1.0, 1.75, 10.0]),
)
def test_equals_the_reference(
    text: list[int], period: list[int], times: int, breakers: set[int], allowed: int, last_n: int, base: float
) -> None:
    said = text + period * times
    params = SamplingParams(dry_multiplier=0.8, dry_base=base, dry_allowed_length=allowed, dry_penalty_last_n=last_n)
    expected = truth.repeat_penalties(said, breakers, params)
    assert penalties(said, breakers, params) == pytest.approx(expected, rel=1e-6)


class Reads:
    """An array that counts how often it is read."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.count = array, 0

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: Any) -> Any:
        self.count += 1
        return int(self.array[index])


@pytest.mark.parametrize(
    ("text", "most"),
    [
        (np.random.default_rng(0).integers(0, 1000, 8192).tolist(), 100),  # ~8 places to look at
        ([1] * 8192, 5 * 8192),
        ([1] * 49 + [2], 5 * 8192),
        ([1, 1, 2], 5 * 8192),
    ],
)
def test_a_long_text_is_read_where_it_may_repeat_and_once(text: list[int], most: int) -> None:
    """Each token that is found again costs one comparison, however many repeats overlap there."""
    text = (text * (8192 // len(text)))[:8192]
    tokens, distances, lengths = window_of(text, set(), 8192).rows
    reads = Reads(tokens), Reads(distances)
    _measure_repeats.py_func(*reads, len(text), lengths)
    assert reads[0].count + reads[1].count < most
