"""Runs the elementwise kernels over guarded memory, and holds them against the slow truth."""

from __future__ import annotations

import numpy as np

from edge_llm.kernels.elementwise import activation_part, add_norm_row, norm_row
from edge_llm.kernels.layout import CALL_FIELDS, Activation, ActivationCall, NormCall
from tests.kernels.guard_pages import guarded, guarded_copy, untouched
from tests.reference.elementwise import gelu_tanh, rms_norm, silu

EPS = 1e-5
WIDTHS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 100, 576)
TRUTH = {Activation.SILU: silu, Activation.GELU_TANH: gelu_tanh}


def run_norm(x: np.ndarray, gamma: np.ndarray, delta: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray | None]:
    """(normed, sum) of `add_norm_row`, or (normed, None) of `norm_row` without a delta."""
    arrays = {
        NormCall.X: guarded_copy(x),
        NormCall.GAMMA: guarded_copy(gamma),
        NormCall.OUT: guarded(x.shape, np.float32),
    }
    if delta is not None:
        arrays |= {NormCall.DELTA: guarded_copy(delta), NormCall.SUM: guarded(x.shape, np.float32)}
    call = np.zeros(CALL_FIELDS, np.int64)
    for field, array in arrays.items():
        call[field] = array.ctypes.data
    call[NormCall.ROWS], call[NormCall.WIDTH], call[NormCall.GROUP] = len(x), x.shape[1], len(gamma)
    call[NormCall.EPS] = np.float64(EPS).view(np.int64)
    for row in range(len(x)):
        (norm_row if delta is None else add_norm_row)(call.ctypes.data, row)
    assert all(untouched(array) for array in arrays.values())
    return arrays[NormCall.OUT], arrays.get(NormCall.SUM)


def run_activation(gate: np.ndarray, up: np.ndarray, kind: Activation, parts: int = 1) -> np.ndarray:
    """f(gate) * up by the kernel."""
    x, out = guarded_copy(np.concatenate([gate, up], axis=1)), guarded(gate.shape, np.float32)
    call = np.zeros(CALL_FIELDS, np.int64)
    call[ActivationCall.X], call[ActivationCall.OUT] = x.ctypes.data, out.ctypes.data
    rows, width = gate.shape
    call[ActivationCall.ROWS], call[ActivationCall.WIDTH], call[ActivationCall.KIND] = rows, width, kind
    call[ActivationCall.PARTS] = parts
    for item in range(rows * parts):
        activation_part(call.ctypes.data, item)
    assert untouched(out)
    return out


def check_norms() -> None:
    """Every width, in one group and in several, with and without a delta."""
    rng = np.random.default_rng(4)
    for width in WIDTHS:
        for groups in (1, 3):
            x, delta = (rng.standard_normal((3, width * groups)) * [[1], [1e-4], [1e5]] for _ in range(2))
            x, delta, gamma = (
                x.astype(np.float32),
                delta.astype(np.float32),
                rng.standard_normal(width).astype(np.float32),
            )
            np.testing.assert_allclose(run_norm(x, gamma)[0], rms_norm(x, gamma, EPS), rtol=4e-7)
            normed, total = run_norm(x, gamma, delta)
            np.testing.assert_array_equal(total, x + delta)
            np.testing.assert_allclose(normed, rms_norm(x + delta, gamma, EPS), rtol=4e-7)


def check_activations() -> None:
    """Every width, and gates over all magnitudes: within 4e-7 of the truth, relative to the gate."""
    rng = np.random.default_rng(5)
    for kind, truth in TRUTH.items():
        for width in WIDTHS:
            gate = (rng.standard_normal((3, width)) * [[1], [10], [100]]).astype(np.float32)
            up = rng.standard_normal((3, width)).astype(np.float32)
            error = np.abs(run_activation(gate, up, kind) - truth(gate.astype(np.float64)) * up)
            assert (error <= 4e-7 * np.abs(gate * up)).all(), (kind, width)
        gate = np.concatenate(
            [np.linspace(-100, 100, 4001), np.geomspace(1e-30, 1e30, 400), -np.geomspace(1e-30, 1e30, 400)]
        )
        gate = gate.astype(np.float32)[None]
        with np.errstate(over="ignore"):
            expected = truth(gate.astype(np.float64))
        error = np.abs(run_activation(gate, np.ones_like(gate), kind) - expected)
        assert (error <= 4e-7 * np.abs(gate)).all(), kind
        # Where nothing has vanished yet the result itself is that good.
        near = (gate > -10) & (gate < 100) if kind is Activation.SILU else gate > -1
        assert (error[near] <= 1e-6 * np.abs(expected[near])).all(), kind
