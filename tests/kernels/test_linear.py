"""The linear kernels, on this CPU's lowering, against the slow truth."""

from __future__ import annotations

import numpy as np
import pytest

from edge_llm.kernels.block_format import BlockFormat
from edge_llm.kernels.layout import CALL_FIELDS, LinearCall
from edge_llm.kernels.linear import linear_plan
from tests.kernels.linear_rig import (
    FORMS,
    Matrix,
    check_embedding,
    check_every_remainder,
    check_extremes,
    check_independence,
    check_product,
)

formats = pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.bits}-{form.block}-{form.minimum}")


@formats
@pytest.mark.parametrize("inputs", [32, 96])
def test_every_remainder_of_outputs_and_rows(form: BlockFormat, inputs: int) -> None:
    check_every_remainder(form, inputs)


@formats
def test_a_row_does_not_depend_on_others_or_on_the_cut(form: BlockFormat) -> None:
    check_independence(form)


@formats
def test_embedding_rows_are_exact(form: BlockFormat) -> None:
    check_embedding(form)


@formats
def test_extreme_inputs(form: BlockFormat) -> None:
    check_extremes(form)


@formats
def test_extreme_weights(form: BlockFormat) -> None:
    matrix = Matrix(np.random.default_rng(0), form, 32, 64)
    x = np.random.default_rng(1).standard_normal((9, 64)).astype(np.float32)
    for scale in (0.0, 65504.0, -65504.0, 6e-8):
        matrix.d[...] = scale
        if matrix.m is not None:
            matrix.m[...] = -scale
        matrix.scales[...] = np.float16(scale)
        if matrix.m is not None:
            matrix.scales.reshape(-1, 2, 16)[:, 1] = np.float16(-scale)
        check_product(matrix, x)


@formats
def test_the_quantisation_error_is_small(form: BlockFormat) -> None:
    """int8 activations cost about half a percent of a product with unrelated weights."""
    matrix = Matrix(np.random.default_rng(0), form, 64, 512)
    x = np.random.default_rng(1).standard_normal((16, 512)).astype(np.float32)
    exact = x.astype(np.float64) @ matrix.weights.T.astype(np.float64)
    assert np.linalg.norm(matrix.multiply(x) - exact) < 0.01 * np.linalg.norm(exact)


@formats
def test_no_rows_are_no_work(form: BlockFormat) -> None:
    matrix = Matrix(np.random.default_rng(0), form, 50, 64)
    assert matrix.multiply(np.zeros((0, 64), np.float32), threads=4).shape == (0, 50)
    assert matrix.tasks == 0


@pytest.mark.parametrize("threads", [1, 2, 5, 16, 64])
@pytest.mark.parametrize(
    ("outputs", "inputs", "rows"), [(576, 576, 1), (49152, 576, 1), (48, 2048, 500), (1, 32, 1), (1536, 576, 512)]
)
def test_work_is_cut_evenly_and_never_too_fine(threads: int, outputs: int, inputs: int, rows: int) -> None:
    call = np.zeros(CALL_FIELDS, np.int64)
    call[LinearCall.ROWS], call[LinearCall.INPUTS], call[LinearCall.OUTPUTS] = rows, inputs, outputs
    call[LinearCall.THREADS] = threads
    tasks = linear_plan(call.ctypes.data)
    assert 1 <= tasks <= (4 * threads if threads > 1 else 1)
    assert tasks <= -(-outputs // 32) * -(-rows // 24)
