"""Block codes and values against the `gguf` package, which is ggml's own in Python."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize, quantize

from edge_llm.errors import ModelFormatError, UnsupportedModelError
from edge_llm.export.gguf_blocks import DECODERS, BlockCodes
from edge_llm.export.gguf_types import TENSOR_TYPES, block_codes, dequantise, form_of
from edge_llm.export.quantiser import FORM_OF_FLOATS, quantise_8bit
from edge_llm.kernels.block_format import BlockFormat, pack_scales, unpack
from edge_llm.kernels.block_format import pack_codes as pack

FLOATS = ("F32", "F16", "BF16")
ENCODED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
"""types that the package also writes"""
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "IQ4_NL": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
"""where the fp16 numbers of a block stand"""
LARGEST_FACTOR = {"Q4_0": 8, "Q2_K": 15, "Q3_K": 128, "Q4_K": 63, "Q5_K": 63, "Q6_K": 128}
"""by which a type multiplies them (1 where nothing is said)"""
K_TYPES = tuple(kind for kind in HALVES if kind.endswith("_K"))
BLOCKS = {kind.name: kind for kind in TENSOR_TYPES.values()}


def matrix(rows: int = 24, columns: int = 96, seed: int = 0) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(seed)).standard_normal((rows, columns)).astype(np.float32)


def random_raw(kind: str, blocks: int, halves: np.ndarray, seed: int = 0) -> np.ndarray:
    """Random bytes, uint8 [blocks, bytes of a block], whose fp16 numbers are drawn from `halves`."""
    random = np.random.Generator(np.random.PCG64(seed))
    raw = random.integers(0, 256, (blocks, BLOCKS[kind].nbytes), np.uint8)
    for at in HALVES[kind]:
        raw[:, at : at + 2] = random.choice(halves.astype(np.float16), blocks).view(np.uint8).reshape(-1, 2)
    return raw


def oracle(raw: np.ndarray, kind: str) -> np.ndarray:
    """float32 [blocks, values of a block]."""
    return dequantize(raw, gguf.GGMLQuantizationType[kind]).astype(np.float32)


def raw_of(values: np.ndarray, kind: str) -> np.ndarray:
    return np.frombuffer(quantize(values, gguf.GGMLQuantizationType[kind]).tobytes(), np.uint8)


def relative_error(stored: np.ndarray, values: np.ndarray) -> float:
    return float(np.linalg.norm(stored - values) / np.linalg.norm(values))


@pytest.mark.parametrize("kind", [*FLOATS, *ENCODED])
def test_values_equal_the_oracles_bit_for_bit(kind: str) -> None:
    values = matrix()
    raw = raw_of(values, kind)
    assert np.array_equal(dequantise(raw, kind, values.shape, "w"), oracle(raw, kind).reshape(values.shape))
    assert dequantise(raw, kind, (2, 12, 96), "w").shape == (2, 12, 96)


@pytest.mark.parametrize("kind", HALVES)
def test_every_bit_of_a_block_is_read_as_the_oracle_reads_it(kind: str) -> None:
    """Random bytes, and every fp16 number that does not overflow, subnormal ones and zeros of both signs included."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves) & (np.abs(halves) <= 65504 // LARGEST_FACTOR.get(kind, 1))]
    raw = random_raw(kind, 30_000 * 32 // BLOCKS[kind].block, halves)
    if len(HALVES[kind]) == 1:
        halves = halves[: len(raw)]
        raw[: len(halves), HALVES[kind][0] : HALVES[kind][0] + 2] = halves.view(np.uint8).reshape(-1, 2)
    expected = oracle(raw, kind)
    shape = (len(raw), BLOCKS[kind].block)
    assert np.array_equal(dequantise(raw.reshape(-1), kind, shape, "w"), expected)
    codes = block_codes(raw.reshape(-1), kind, shape, "w")
    assert codes.shape == shape
    assert np.array_equal(codes.values(), expected)


@pytest.mark.parametrize(
    ("kinds", "form"),
    [
        (("Q4_0", "Q4_1", "Q4_K"), BlockFormat(4, 32, True)),
        (("Q2_K", "Q3_K"), BlockFormat(4, 16, True)),
        (("Q5_0", "Q8_0", "IQ4_NL"), BlockFormat(8, 32, False)),
        (("Q5_1", "Q5_K", *FLOATS), BlockFormat(8, 32, True)),
        (("Q6_K",), BlockFormat(8, 16, False)),
    ],
)
def test_every_type_has_a_form_that_holds_it(kinds: tuple[str, ...], form: BlockFormat) -> None:
    for kind in kinds:
        assert form_of(kind) == form
        if kind in HALVES:
            raw = random_raw(kind, 40, np.array([0.25, -1.5]))
            codes = block_codes(raw.reshape(-1), kind, (20, 2 * BLOCKS[kind].block), "w")
            assert codes.form == form
            assert codes.codes.shape == (20, 2 * BLOCKS[kind].block // form.block, form.block)
            assert codes.codes.max() < 1 << form.bits
            assert (codes.m is not None) == form.minimum


@pytest.mark.parametrize("kind", [kind for kind in HALVES if kind not in K_TYPES])
def test_codes_and_scales_of_a_simple_block_are_its_own_bits(kind: str) -> None:
    raw = random_raw(kind, 50, np.array([0.5, -3e-7, 7000, 0]))
    codes = block_codes(raw.reshape(-1), kind, (50, 32), "w")
    assert np.array_equal(codes.d[:, 0], np.ascontiguousarray(raw[:, :2]).view(np.float16)[:, 0])
    stored = unpack(pack(codes.codes, codes.form), pack_scales(codes.d, codes.m, codes.form), codes.form, 50, 32)
    assert np.array_equal(stored, oracle(raw, kind))


def test_a_scale_times_a_whole_number_loses_half_a_bit_at_most_however_small() -> None:
    """So nothing underflows: products of fp16 numbers with whole ones are multiples of its smallest number."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)  # every finite one from 0 on
    for factor in range(129):
        exact = halves * np.float32(factor)
        exact = exact[exact <= 65504]
        assert (np.abs(exact.astype(np.float16).astype(np.float32) - exact) <= exact * np.float32(2**-11)).all()


@pytest.mark.parametrize("kind", K_TYPES)
@pytest.mark.parametrize("scale", [2.0**-24, 2.0**-20, 1e-6, 1e-4, 0.01, 100.0])
def test_stored_k_blocks_are_off_by_the_rounding_of_their_scales_only(kind: str, scale: float) -> None:
    raw = random_raw(kind, 200, np.array([scale, -scale]))
    codes = block_codes(raw.reshape(-1), kind, (200, 256), "w")
    stored = unpack(pack(codes.codes, codes.form), pack_scales(codes.d, codes.m, codes.form), codes.form, 200, 256)
    blocks = codes.codes.astype(np.float64) - (0 if codes.form.minimum else 128)
    largest = np.abs(blocks) * np.abs(codes.d)[..., None] + (0 if codes.m is None else np.abs(codes.m)[..., None])
    assert (np.abs(stored - oracle(raw, kind)) <= largest.reshape(200, 256) * 2.0**-11).all()
    if scale == 2.0**-24:  # all scales are subnormal there, where every multiple of the smallest number is exact
        assert np.array_equal(stored, oracle(raw, kind))


@pytest.mark.parametrize("kind", FLOATS)
def test_a_matrix_of_floats_becomes_8_bit_codes(kind: str) -> None:
    values = matrix()
    codes = block_codes(raw_of(values, kind), kind, values.shape, "w")
    assert codes.form == FORM_OF_FLOATS
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


@pytest.mark.parametrize("kind", [t.name for t in TENSOR_TYPES.values() if t.name not in (*FLOATS, *DECODERS)])
def test_other_types_are_refused_by_name(kind: str) -> None:
    for function in (block_codes, dequantise):
        with pytest.raises(UnsupportedModelError, match=f"tensor 'blk.0.x' has type '{kind}'") as caught:
            function(np.zeros(4096, np.uint8), kind, (4, 256), "blk.0.x")
        assert "Q4_1" in str(caught.value.hint)


@pytest.mark.parametrize("pattern", [0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFFFF])
@pytest.mark.parametrize("kind", [*HALVES, "F16"])
def test_numbers_that_are_not_finite_name_the_tensor(kind: str, pattern: int) -> None:
    block, nbytes = (32, 64) if kind == "F16" else BLOCKS[kind][1:]
    for place in HALVES.get(kind, (62,)):
        raw = np.full((2, 3, nbytes), 1, np.uint8)
        raw[1, 2, place : place + 2] = pattern & 255, pattern >> 8
        for function in (block_codes, dequantise):
            with pytest.raises(ModelFormatError, match=r"tensor 'w\\x1b' holds .* not finite"):
                function(raw.reshape(-1), kind, (2, 3 * block), "w\x1b")


@pytest.mark.parametrize(
    ("kind", "value"), [("F32", np.inf), ("F32", np.nan), ("BF16", -np.inf), ("F32", 65505.0), ("F32", -1e30)]
)
def test_floats_that_no_code_can_hold_are_refused(kind: str, value: float) -> None:
    values = matrix(2, 64)
    values[1, 40] = value
    with pytest.raises(ModelFormatError, match="tensor 'w'"):
        block_codes(raw_of(values, kind), kind, values.shape, "w")


@pytest.mark.parametrize("kind", LARGEST_FACTOR)
def test_a_product_that_overflows_is_refused(kind: str) -> None:
    """What fits a half times its block's scale may not: then the matrix is refused, and nothing becomes infinite."""
    factor = LARGEST_FACTOR[kind]
    for at in HALVES[kind]:
        raw = np.full((1, BLOCKS[kind].nbytes), 255, np.uint8)  # the largest scales
        if kind in ("Q3_K", "Q6_K"):
            raw[0, :-2] = 128 if kind == "Q6_K" else 0  # the smallest of signed ones
        for other in HALVES[kind]:
            raw[0, other : other + 2] = 0
        for value, good in ((65400 / factor, True), (65700 / factor, False), (-65700 / factor, False)):
            raw[0, at : at + 2] = np.array([value], np.float16).view(np.uint8)
            if good:
                assert np.isfinite(block_codes(raw.reshape(-1), kind, (1, BLOCKS[kind].block), "w").values()).all()
                continue
            for function in (block_codes, dequantise):
                with pytest.raises(ModelFormatError, match="tensor 'w' holds scales that are not finite"):
                    function(raw.reshape(-1), kind, (1, BLOCKS[kind].block), "w")


@pytest.mark.parametrize("kind", [*HALVES, *FLOATS])
def test_bytes_that_do_not_fill_the_shape_are_refused(kind: str) -> None:
    block, nbytes = BLOCKS[kind][1:]
    columns = max(block, 32)
    size = 3 * columns // block * nbytes
    for raw in (np.zeros(size - 1, np.uint8), np.zeros(size + nbytes, np.uint8), np.zeros(0, np.uint8)):
        for function in (block_codes, dequantise):
            with pytest.raises(ModelFormatError, match=f"tensor 'w': {raw.size} bytes of {kind} are no tensor"):
                function(raw, kind, (3, columns), "w")


@pytest.mark.parametrize("kind", K_TYPES)
def test_rows_that_do_not_fill_super_blocks_are_refused(kind: str) -> None:
    raw = np.zeros(3 * BLOCKS[kind].nbytes, np.uint8)  # as many bytes as 4 rows of 192 values would take
    with pytest.raises(ModelFormatError, match=r"tensor 'w' is no matrix of blocks of 256: its shape is \[4, 192\]"):
        block_codes(raw, kind, (4, 192), "w")
    with pytest.raises(ModelFormatError, match="tensor 'w'"):
        dequantise(raw, kind, (4, 192), "w")


@pytest.mark.parametrize("shape", [(64,), (2, 2, 32), (2, 48), (32, 3)])
def test_only_matrices_of_whole_blocks_have_codes(shape: tuple[int, ...]) -> None:
    with pytest.raises(ModelFormatError, match="no matrix of blocks of 32"):
        block_codes(np.zeros(4 * int(np.prod(shape)), np.uint8), "F32", shape, "w")


def test_values_without_a_minimum_are_centred_at_128() -> None:
    codes = BlockCodes(
        BlockFormat(8, 32, False), np.full((1, 1, 32), 130, np.uint8), np.full((1, 1), 0.5, np.float16), None
    )
    assert (codes.values() == 1).all()
