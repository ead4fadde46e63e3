"""Block codes and values against the `gguf` package's quantisers."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize, quantize

from edge_llm.errors import ModelFormatError, UnsupportedModelError
from edge_llm.export import gguf_types
from edge_llm.export.gguf_types import TENSOR_TYPES, BlockCodes, block_codes, dequantise, quantise_8bit

FLOATS = ("F32", "F16", "BF16")
QUANTISED = ("Q4_0", "Q4_1", "Q8_0")


def matrix(rows: int = 24, columns: int = 96, seed: int = 0) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(seed)).standard_normal((rows, columns)).astype(np.float32)


def raw_of(values: np.ndarray, kind: str) -> np.ndarray:
    return np.frombuffer(quantize(values, gguf.GGMLQuantizationType[kind]).tobytes(), np.uint8)


def relative_error(stored: np.ndarray, values: np.ndarray) -> float:
    return float(np.linalg.norm(stored - values) / np.linalg.norm(values))


@pytest.mark.parametrize("kind", [*FLOATS, *QUANTISED])
def test_values_equal_the_oracles_bit_for_bit(kind: str) -> None:
    values = matrix()
    raw = raw_of(values, kind)
    number = gguf.GGMLQuantizationType[kind]
    expected = dequantize(quantize(values, number), number).astype(np.float32)
    assert np.array_equal(dequantise(raw, kind, values.shape, "w"), expected)
    assert dequantise(raw, kind, (2, 12, 96), "w").shape == (2, 12, 96)


@pytest.mark.parametrize("kind", QUANTISED)
def test_codes_of_a_quantised_source_are_its_own(kind: str) -> None:
    values = matrix()
    raw = raw_of(values, kind)
    codes = block_codes(raw, kind, values.shape, "w")
    assert codes.shape == values.shape
    assert codes.codes.shape == (24, 3, 32)
    assert codes.bits == (8 if kind == "Q8_0" else 4)
    assert (codes.m is None) == (kind == "Q8_0")
    assert codes.codes.max() < 1 << codes.bits
    assert np.array_equal(codes.values(), dequantise(raw, kind, values.shape, "w"))
    blocks = raw.reshape(24, 3, -1)
    assert np.array_equal(codes.d, np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0])
    if kind == "Q4_0":
        assert np.array_equal(codes.m, codes.d * np.float16(-8))
    if kind == "Q8_0":
        assert np.array_equal(codes.codes.astype(int) - 128, blocks[..., 2:].view(np.int8))


def test_every_bit_pattern_of_a_half_keeps_its_value() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves) & (np.abs(halves) <= 8188)]  # eight times more still fits
    random = np.random.Generator(np.random.PCG64(1))
    for kind, nbytes in (("Q4_0", 18), ("Q8_0", 34)):
        raw = random.integers(0, 256, (halves.size, nbytes), np.uint8)
        raw[:, :2] = halves.view(np.uint8).reshape(-1, 2)
        expected = dequantize(raw, gguf.GGMLQuantizationType[kind])
        assert np.array_equal(block_codes(raw.reshape(-1), kind, (halves.size, 32), "w").values(), expected)


@pytest.mark.parametrize("kind", FLOATS)
def test_a_matrix_of_floats_becomes_8_bit_codes(kind: str) -> None:
    values = matrix()
    codes = block_codes(raw_of(values, kind), kind, values.shape, "w")
    assert codes.bits == 8
    assert codes.m is not None
    source = dequantise(raw_of(values, kind), kind, values.shape, "w")
    symmetric = dequantize(quantize(source, gguf.GGMLQuantizationType.Q8_0), gguf.GGMLQuantizationType.Q8_0)
    assert relative_error(codes.values(), source) < min(0.006, relative_error(symmetric, source))


@pytest.mark.parametrize(
    "values",
    [
        np.zeros((2, 32)),
        np.full((2, 64), 0.3),
        np.full((1, 32), -65504.0),
        np.tile([65504.0, -65504.0], (2, 32)),
        np.linspace(5, 6, 64).reshape(2, 32),
        np.linspace(-6e-8, 6e-8, 64).reshape(2, 32),
        np.where(np.arange(64) == 5, 100.0, 0.001).reshape(2, 32),
        np.random.Generator(np.random.PCG64(2)).standard_cauchy((16, 64)),
    ],
)
def test_8_bit_codes_stay_within_a_step(values: np.ndarray) -> None:
    values = values.astype(np.float32)
    codes = quantise_8bit(values, "w")
    blocks = values.reshape(*codes.codes.shape)
    low, high = blocks.min(axis=-1, keepdims=True), blocks.max(axis=-1, keepdims=True)
    # Half a step, the rounding of the minimum and of 255 scales to float16, and its smallest number.
    allowed = (high - low) / 255 + np.maximum(abs(low), abs(high)) / 1024 + 255 * 2.0**-24
    assert (abs(codes.values().reshape(blocks.shape) - blocks) <= allowed).all()


def test_fitting_never_makes_a_block_worse() -> None:
    values = matrix(64, 64)
    blocks = values.reshape(64, 2, 32)
    low, high = blocks.min(axis=-1, keepdims=True), blocks.max(axis=-1, keepdims=True)
    d, m = ((high - low) / 255).astype(np.float16).astype(np.float32), low.astype(np.float16).astype(np.float32)
    plain = np.clip(np.rint((blocks - m) / d), 0, 255) * d + m
    fitted = quantise_8bit(values, "w").values().reshape(blocks.shape)
    errors = [np.square(part - blocks).sum(axis=-1) for part in (fitted, plain)]
    assert (errors[0] <= errors[1] * (1 + 1e-5)).all()
    assert errors[0].sum() < errors[1].sum()


def test_chunks_do_not_change_the_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = raw_of(matrix(), "F16")
    whole = block_codes(raw, "F16", (24, 96), "w")
    monkeypatch.setattr(gguf_types, "_CHUNK_VALUES", 96 * 7)
    parts = block_codes(raw, "F16", (24, 96), "w")
    assert np.array_equal(whole.codes, parts.codes)
    assert np.array_equal(whole.values(), parts.values())


@pytest.mark.parametrize("kind", [t.name for t in TENSOR_TYPES.values() if t.name not in (*FLOATS, *QUANTISED)])
def test_other_types_are_refused_by_name(kind: str) -> None:
    for function in (block_codes, dequantise):
        with pytest.raises(UnsupportedModelError, match=f"tensor 'blk.0.x' has type '{kind}'") as caught:
            function(np.zeros(4096, np.uint8), kind, (4, 256), "blk.0.x")
        assert "Q4_1" in str(caught.value.hint)


@pytest.mark.parametrize("pattern", [0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFFFF])
@pytest.mark.parametrize(
    ("kind", "nbytes", "places"), [("Q4_0", 18, (0,)), ("Q4_1", 20, (0, 2)), ("Q8_0", 34, (0,)), ("F16", 64, (62,))]
)
def test_numbers_that_are_not_finite_name_the_tensor(
    kind: str, nbytes: int, places: tuple[int, ...], pattern: int
) -> None:
    for place in places:
        raw = np.zeros((2, 3, nbytes), np.uint8)
        raw[1, 2, place : place + 2] = pattern & 255, pattern >> 8
        for function in (block_codes, dequantise):
            with pytest.raises(ModelFormatError, match=r"tensor 'w\\x1b' holds .* not finite"):
                function(raw.reshape(-1), kind, (2, 96), "w\x1b")


@pytest.mark.parametrize(
    ("kind", "value"), [("F32", np.inf), ("F32", np.nan), ("BF16", -np.inf), ("F32", 65505.0), ("F32", -1e30)]
)
def test_floats_that_no_code_can_hold_are_refused(kind: str, value: float) -> None:
    values = matrix(2, 64)
    values[1, 40] = value
    with pytest.raises(ModelFormatError, match="tensor 'w'"):
        block_codes(raw_of(values, kind), kind, values.shape, "w")


def test_a_scale_whose_minimum_overflows_is_refused() -> None:
    raw = np.zeros(18, np.uint8)
    raw[:2] = np.array([9000], np.float16).view(np.uint8)
    with pytest.raises(ModelFormatError, match="tensor 'w'"):
        block_codes(raw, "Q4_0", (1, 32), "w")


@pytest.mark.parametrize("shape", [(64,), (2, 2, 32), (2, 48), (32, 3)])
def test_only_matrices_of_whole_blocks_have_codes(shape: tuple[int, ...]) -> None:
    with pytest.raises(ModelFormatError, match="no matrix of blocks of 32"):
        block_codes(np.zeros(4 * int(np.prod(shape)), np.uint8), "F32", shape, "w")


def test_values_without_a_minimum_are_centred_at_128() -> None:
    codes = BlockCodes(np.full((1, 1, 32), 130, np.uint8), np.full((1, 1), 0.5, np.float16), None, 8)
    assert (codes.values() == 1).all()
