"""The elementwise kernels, on this CPU's lowering, against the slow truth."""

from __future__ import annotations

import numpy as np
import pytest

from edge_llm.kernels.layout import Activation
from tests.kernels.elementwise_rig import check_activations, check_norms, run_activation, run_norm

kinds = pytest.mark.parametrize("kind", Activation, ids=lambda kind: kind.name)


def test_norms() -> None:
    check_norms()


def test_activations() -> None:
    check_activations()


def test_the_norm_of_zeros_is_zero() -> None:
    assert not run_norm(np.zeros((2, 64), np.float32), np.ones(64, np.float32))[0].any()


def test_the_norm_of_huge_numbers_is_a_number() -> None:
    x = np.full((1, 64), 3e38, np.float32)
    np.testing.assert_allclose(run_norm(x, np.ones(64, np.float32))[0], 1.0, rtol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_the_norm_shows_what_is_not_finite_in_its_group_alone(value: float) -> None:
    rng = np.random.default_rng(0)
    x, gamma = rng.standard_normal((3, 128)).astype(np.float32), np.ones(64, np.float32)
    good = run_norm(x, gamma)[0]
    x[1, 70] = value
    for normed in (run_norm(x, gamma)[0], run_norm(x, gamma, np.zeros_like(x))[0]):
        assert np.isnan(normed[1, 70])
        normed[1, 64:] = good[1, 64:]
        np.testing.assert_array_equal(normed, good)


def test_a_sum_that_overflows_shows() -> None:
    x = np.full((1, 8), 3e38, np.float32)
    normed, total = run_norm(x, np.ones(8, np.float32), x)
    assert total is not None
    assert np.isinf(total).all()
    assert np.isnan(normed).all()


@kinds
def test_limits_of_the_activations(kind: Activation) -> None:
    gate = np.array([[0.0, -0.0, 3e38, -3e38, 200.0, -200.0, 1e-45]], np.float32)
    out = run_activation(gate, np.ones_like(gate), kind)
    np.testing.assert_array_equal(out[0, :6], np.array([0, 0, 3e38, 0, 200, 0], np.float32))
    assert np.isfinite(out).all()


@kinds
def test_activations_show_what_is_not_finite(kind: Activation) -> None:
    gate = np.array([[np.nan, np.inf, -np.inf, 1.0, 1.0, -1e30]], np.float32)
    up = np.array([[1.0, 1.0, 1.0, np.nan, np.inf, np.inf]], np.float32)
    out = run_activation(gate, up, kind)
    assert not np.isfinite(out).any()


def test_rows_do_not_depend_on_one_another() -> None:
    rng = np.random.default_rng(0)
    x, delta, gamma = (rng.standard_normal(shape).astype(np.float32) for shape in ((9, 100), (9, 100), (100,)))
    for together, alone in (
        (run_norm(x, gamma, delta)[0], [run_norm(x[i : i + 1], gamma, delta[i : i + 1])[0] for i in range(9)]),
        *(
            (run_activation(x, delta, kind), [run_activation(x[i : i + 1], delta[i : i + 1], kind) for i in range(9)])
            for kind in Activation
        ),
    ):
        np.testing.assert_array_equal(together.view(np.uint32), np.concatenate(alone).view(np.uint32))


@pytest.mark.parametrize("width", [65, 96, 100, 1536])
def test_parts_of_a_row_are_those_of_the_whole(width: int) -> None:
    rng = np.random.default_rng(width)
    gate, up = rng.standard_normal((2, 3, width)).astype(np.float32)
    whole = run_activation(gate, up, Activation.SILU)
    for parts in (2, 3):
        assert np.array_equal(run_activation(gate, up, Activation.SILU, parts), whole)
