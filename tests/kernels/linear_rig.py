"""Runs the linear kernels over guarded memory, and holds them against the slow truth."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from edge_llm.kernels.block_format import BlockFormat, pack_codes, pack_scales, unpack
from edge_llm.kernels.layout import CALL_FIELDS, EmbeddingCall, LinearCall, quantised_bytes
from edge_llm.kernels.linear import embedding_row, linear_plan, linear_quantise, linear_task
from edge_llm.kernels.lowering import detect_lowering
from tests.kernels.guard_pages import guarded, guarded_copy, untouched
from tests.reference.linear import product, random_blocks

FORMS = (
    BlockFormat(4, 32, True),
    BlockFormat(4, 16, True),
    BlockFormat(8, 32, False),
    BlockFormat(8, 32, True),
    BlockFormat(8, 16, False),
)
FUSED = detect_lowering().fused
OUTPUTS = (1, 3, 4, 8, 15, 16, 17, 31, 32, 33, 48, 50, 63)
ROWS = (1, 2, 3, 4, 5, 7, 8, 23, 24, 25, 49)


class Matrix:
    """A random matrix, packed, between guard pages."""

    def __init__(
        self,
        rng: np.random.Generator,
        form: BlockFormat,
        outputs: int,
        inputs: int,
        *,
        bias: bool = False,
        at_end: bool = True,
    ) -> None:
        self.form, self.outputs, self.inputs, self.at_end = form, outputs, inputs, at_end
        self.q, self.d, self.m = random_blocks(rng, form, outputs, inputs)
        self.codes = guarded_copy(pack_codes(self.q, form), at_end=at_end)
        self.scales = guarded_copy(pack_scales(self.d, self.m, form), at_end=at_end)
        self.bias = guarded_copy(rng.standard_normal(outputs).astype(np.float32), at_end=at_end) if bias else None

    @property
    def weights(self) -> np.ndarray:
        """float32 [outputs, inputs]."""
        return unpack(self.codes, self.scales, self.form, self.outputs, self.inputs)

    def multiply(self, x: np.ndarray, *, threads: int = 1, order: Callable[[int], Sequence[int]] = range) -> np.ndarray:
        """x @ weights.T + bias by the kernels, rows and tasks in the given order; nothing else is written."""
        rows = len(x)
        source = guarded_copy(x, at_end=self.at_end)
        out = guarded((rows, self.outputs), np.float32, at_end=self.at_end)
        blocks = guarded((quantised_bytes(rows, self.inputs),), np.uint8, at_end=self.at_end)
        call = self._call(LinearCall, rows)
        call[LinearCall.X], call[LinearCall.OUT] = source.ctypes.data, out.ctypes.data
        call[LinearCall.X_BLOCKS], call[LinearCall.THREADS] = blocks.ctypes.data, threads
        call[LinearCall.BIAS] = 0 if self.bias is None else self.bias.ctypes.data
        tasks = linear_plan(call.ctypes.data)
        assert tasks == call[LinearCall.TASKS]
        for item in order(rows * int(call[LinearCall.PARTS])):
            linear_quantise(call.ctypes.data, item)
        for task in order(tasks):
            linear_task(call.ctypes.data, task)
        assert untouched(out)
        assert untouched(blocks)
        self.tasks = tasks
        return out

    def embed(self, ids: Sequence[int], scale: float) -> np.ndarray:
        """scale * weights[ids] by the kernel."""
        numbers = guarded_copy(np.array(ids, np.int64))
        out = guarded((len(ids), self.inputs), np.float32, at_end=self.at_end)
        call = self._call(EmbeddingCall, len(ids))
        call[EmbeddingCall.IDS], call[EmbeddingCall.OUT] = numbers.ctypes.data, out.ctypes.data
        call[EmbeddingCall.SCALE] = np.float64(scale).view(np.int64)
        for row in range(len(ids)):
            embedding_row(call.ctypes.data, row)
        assert untouched(out)
        return out

    def _call(self, fields: type[LinearCall] | type[EmbeddingCall], rows: int) -> np.ndarray:
        call = np.zeros(CALL_FIELDS, np.int64)
        call[fields.ROWS], call[fields.INPUTS], call[fields.OUTPUTS] = rows, self.inputs, self.outputs
        call[fields.BITS], call[fields.BLOCK], call[fields.HAS_MINIMUM] = (
            self.form.bits,
            self.form.block,
            self.form.minimum,
        )
        call[fields.CODES], call[fields.SCALES] = self.codes.ctypes.data, self.scales.ctypes.data
        return call


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two float32 arrays are equal bit for bit."""
    return a.shape == b.shape and bool(np.array_equal(a.view(np.uint32), b.view(np.uint32)))


def check_product(matrix: Matrix, x: np.ndarray) -> None:
    """The kernels' product is the truth's, but for the rounding of its float32 sums."""
    truth, size = product(x, matrix.q, matrix.d, matrix.m, fused=FUSED)
    if matrix.bias is not None:
        truth, size = truth + matrix.bias, size + np.abs(matrix.bias)
    error = np.abs(matrix.multiply(x) - truth)
    terms = matrix.q.shape[1] * (2 if matrix.form.minimum else 1) + 4
    assert (error <= terms * 2.0**-23 * size + 1e-37).all(), (
        matrix.form,
        matrix.outputs,
        matrix.inputs,
        len(x),
        error.max(),
    )


def check_every_remainder(form: BlockFormat, inputs: int, some_rows: Sequence[int] = ROWS) -> None:
    """All remainders of outputs, with some of rows, with and without a bias, at both ends of a page."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((max(some_rows), inputs)).astype(np.float32)
    for outputs in OUTPUTS:
        matrix = Matrix(rng, form, outputs, inputs, bias=outputs % 2 == 1, at_end=outputs % 3 != 0)
        for rows in some_rows:
            check_product(matrix, x[:rows])


def check_independence(form: BlockFormat) -> None:
    """A row's result has the same bits alone, among others, at any place, for any cut and order of the tasks."""
    rng = np.random.default_rng(2)
    for outputs, inputs, most_tasks in ((1000, 96, 6), (48, 2048, 6)):  # cut by outputs, and by rows too
        matrix = Matrix(rng, form, outputs, inputs, bias=True)
        x = (rng.standard_normal((60, inputs)) * 10 ** rng.uniform(-3, 3, (60, 1))).astype(np.float32)
        alone = np.concatenate([matrix.multiply(x[i : i + 1]) for i in range(len(x))])
        for rows in (2, 3, 6, 24, 25, 60):
            assert same_bits(matrix.multiply(x[:rows]), alone[:rows])
            assert same_bits(matrix.multiply(x[-rows:]), alone[-rows:])
        tasks = set()
        for threads in (1, 2, 3, 64):
            assert same_bits(matrix.multiply(x, threads=threads, order=lambda n: range(n)[::-1]), alone)
            tasks.add(matrix.tasks)
            assert same_bits(matrix.multiply(x[:1], threads=threads), alone[:1])
        assert max(tasks) >= most_tasks


def check_embedding(form: BlockFormat) -> None:
    """Rows of the table, bit for bit what `unpack` gives, times the scale."""
    rng = np.random.default_rng(3)
    for outputs in (1, 16, 37):
        matrix = Matrix(rng, form, outputs, 64)
        ids = [0, outputs - 1, outputs // 2, 0]
        for scale in (1.0, 24.0, 0.1):
            assert same_bits(matrix.embed(ids, scale), matrix.weights[ids] * np.float32(scale))


def check_extremes(form: BlockFormat) -> None:
    """Zeros, equal, tiny and huge inputs are multiplied like any other; a row that is not finite becomes NaN, alone."""
    rng = np.random.default_rng(7)
    matrix = Matrix(rng, form, 40, 96)
    for value in (0.0, -0.0, 1.0, -127.0, 1e-45, 1e-38, 3e-36, 1e30, -1e30):
        check_product(matrix, np.full((3, 96), value, np.float32))
    spread = np.full((2, 96), 1e-30, np.float32)
    spread[:, ::7] = 1e30
    check_product(matrix, spread)
    x = rng.standard_normal((30, 96)).astype(np.float32)
    good = matrix.multiply(x)
    for value in (np.nan, -np.nan, np.inf, -np.inf):
        for row, column in ((0, 0), (13, 95), (29, 50)):
            bad = x.copy()
            bad[row, column] = value
            result = matrix.multiply(bad)
            assert np.isnan(result[row]).all()
            assert np.isnan(matrix.multiply(bad[row : row + 1])).all()
            others = np.arange(len(x)) != row
            assert same_bits(result[others], good[others])
    assert not np.isfinite(matrix.multiply(np.full((1, 96), 3e38, np.float32))).any()
