"""Philox4x32-10 against published vectors and a plain reference."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_llm.kernels.random import philox, uniforms
from tests.reference import sampling as truth

# The known-answer vectors that the authors publish with Random123.
VECTORS = [
    ("00000000 00000000 00000000 00000000 00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
WORD = st.integers(0, 2**32 - 1)
LONG = st.integers(0, 2**64 - 1)


def words(text: str) -> tuple[int, ...]:
    return tuple(int(word, 16) for word in text.split())


@pytest.mark.parametrize(("given_words", "expected"), VECTORS)
def test_published_vectors(given_words: str, expected: str) -> None:
    counter_and_key = words(given_words)
    assert truth.philox(counter_and_key[:4], counter_and_key[4:]) == words(expected)
    for function in (philox, philox.py_func):
        assert tuple(int(word) for word in function(*map(np.uint64, counter_and_key))) == words(expected)


@settings(max_examples=300)
@given(st.tuples(WORD, WORD, WORD, WORD), st.tuples(WORD, WORD))
def test_philox_equals_the_reference(counter: tuple[int, ...], key: tuple[int, ...]) -> None:
    assert tuple(map(int, philox(*map(np.uint64, (*counter, *key))))) == truth.philox(counter, key)


@settings(max_examples=300)
@given(LONG, LONG)
def test_uniforms_equal_the_reference(seed: int, counter: int) -> None:
    draws = uniforms(np.uint64(seed), np.uint64(counter))
    assert all(0.0 <= draw < 1.0 for draw in draws)
    assert tuple(map(Fraction, draws)) == truth.uniforms(seed, counter)


def test_uniforms_are_even_and_independent() -> None:
    both = np.array([[uniforms(np.uint64(seed), np.uint64(counter)) for counter in range(200)] for seed in range(200)])
    for draws in (both[..., 0], both[..., 1]):
        cells, _ = np.histogram(draws, bins=64, range=(0.0, 1.0))
        expected = draws.size / 64
        assert ((cells - expected) ** 2 / expected).sum() < 110  # chi-square, 63 degrees of freedom: p = 2e-4
        for one, other in ((draws[:, :-1], draws[:, 1:]), (draws[:-1], draws[1:])):
            assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(both[..., 0].ravel(), both[..., 1].ravel())[0, 1]) < 0.02
