"""How weights are stored, byte by byte."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from edge_llm.errors import ModelFormatError, ParameterError, UnsupportedModelError
from edge_llm.kernels.block_format import BlockFormat, group_count, pack_codes, pack_scales, unpack
from tests.reference.linear import random_blocks

FORMS = (
    BlockFormat(4, 32, True),
    BlockFormat(4, 16, True),
    BlockFormat(8, 32, False),
    BlockFormat(8, 32, True),
    BlockFormat(8, 16, False),
)
formats = pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.bits}-{form.block}-{form.minimum}")


@formats
@pytest.mark.parametrize("outputs", [1, 15, 16, 17, 50])
def test_unpack_gives_the_weights_back(form: BlockFormat, outputs: int) -> None:
    q, d, m = random_blocks(np.random.default_rng(outputs), form, outputs, 96)
    codes, scales = pack_codes(q, form), pack_scales(d, m, form)
    assert codes.dtype == np.uint8
    assert scales.dtype == np.float16
    assert codes.nbytes == form.code_bytes(outputs, 96)
    assert scales.nbytes == form.scale_bytes(outputs, 96)
    offset = np.float32(-128) * d.astype(np.float32) if m is None else m.astype(np.float32)
    expected = d.astype(np.float32)[..., None] * q + offset[..., None]
    np.testing.assert_array_equal(unpack(codes, scales, form, outputs, 96), expected.reshape(outputs, 96))


@formats
def test_every_code_stands_where_the_layout_says(form: BlockFormat) -> None:
    q, d, m = random_blocks(np.random.default_rng(0), form, 40, 64)
    codes, scales = pack_codes(q, form), pack_scales(d, m, form).view(np.uint16)
    blocks, parts = 64 // form.block, 2 if form.minimum else 1
    for row, block, i in np.ndindex(q.shape):
        group, lane = divmod(row, 16)
        start = (group * blocks + block) * form.block_code_bytes
        if form.bits == 4:
            step, half, byte = i // 8, i // 4 % 2, i % 4
            stored = codes[start + 64 * step + 4 * lane + byte] >> (4 * half) & 15
        else:
            stored = codes[start + 64 * (i // 4) + 4 * lane + i % 4]
        assert stored == q[row, block, i]
        at = (group * blocks + block) * 16 * parts + lane
        assert scales[at] == d.view(np.uint16)[row, block]
        if m is not None:
            assert scales[at + 16] == m.view(np.uint16)[row, block]


@formats
def test_rows_are_padded_with_zeros(form: BlockFormat) -> None:
    q, d, m = random_blocks(np.random.default_rng(0), form, 17, 32)
    padded = unpack(pack_codes(q, form), pack_scales(d, m, form), form, 32, 32)
    assert not padded[17:].any()


def test_sizes() -> None:
    form = BlockFormat(4, 32, True)
    assert (form.block_code_bytes, form.block_scale_bytes) == (256, 64)
    assert form.code_bytes(33, 576) == 3 * 18 * 256
    assert BlockFormat(8, 32, False).scale_bytes(16, 32) == 32
    assert [group_count(n) for n in (1, 16, 17, 49152)] == [1, 1, 2, 3072]


@pytest.mark.parametrize(
    ("bits", "block", "minimum"), [(4, 32, False), (4, 64, True), (8, 16, True), (5, 32, True), (0, 0, False)]
)
def test_unknown_formats_are_refused(bits: int, block: int, minimum: bool) -> None:
    with pytest.raises(UnsupportedModelError, match="no kernel reads"):
        BlockFormat(bits, block, minimum)


@pytest.mark.parametrize(("outputs", "inputs"), [(0, 32), (-1, 32), (16, 0), (16, 33), (16, -32), (16, 16)])
def test_shapes_that_cannot_be_stored_are_refused(outputs: int, inputs: int) -> None:
    for form in FORMS:
        with pytest.raises(ModelFormatError, match="multiple of 32"):
            form.code_bytes(outputs, inputs)


def test_bad_codes_and_scales_are_refused() -> None:
    form = BlockFormat(4, 32, True)
    codes, d = np.zeros((2, 1, 32), np.uint8), np.ones((2, 1))
    for bad in (codes + 16, codes.astype(np.int8), codes[0], codes[..., :16]):
        with pytest.raises(ParameterError):
            pack_codes(bad, form)
    for scales in ((d, None), (d[0], d[0]), (d, d[:, :0])):
        with pytest.raises(ParameterError):
            pack_scales(*scales, form)
    with pytest.raises(ModelFormatError):
        pack_codes(np.zeros((2, 1, 16), np.uint8), BlockFormat(4, 16, True))
    for value in (np.nan, np.inf, 1e6):
        with pytest.raises(ModelFormatError, match="not a finite number"):
            pack_scales(d * value, d, form)


def test_arrays_of_the_wrong_size_are_refused() -> None:
    form = BlockFormat(8, 32, False)
    q, d, _ = random_blocks(np.random.default_rng(0), form, 16, 64)
    codes, scales = pack_codes(q, form), pack_scales(d, None, form)
    for bad in ((codes[:-1], scales), (codes, scales[:-1]), (codes, scales, 32, 64), (codes, scales, 16, 32)):
        with pytest.raises(ModelFormatError, match="bytes"):
            unpack(bad[0], bad[1], form, *(bad[2:] or (16, 64)))


def test_the_exporter_needs_no_compiler() -> None:
    command = "import sys, edge_llm.kernels.block_format; print('numba' in sys.modules or 'llvmlite' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True).stdout.strip()
        == "False"
    )
