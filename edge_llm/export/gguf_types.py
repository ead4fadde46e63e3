"""What the bytes of a GGUF tensor mean: block codes exactly as the source holds them, and their float32 values.

The block formats are those of ggml (ggml-common.h and ggml-quants.c). `_DECODERS` and `_FLOATS` list the types that can
be run; a new one is a row there. A quantised source is not rounded: d, m and codes are the file's own bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edge_llm.errors import ModelFormatError, UnsupportedModelError, quoted


class TensorType(NamedTuple):
    """`block` values of a tensor are stored in `nbytes` bytes."""

    name: str
    block: int
    nbytes: int


TENSOR_TYPES: dict[int, TensorType] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    9: TensorType("Q8_1", 32, 36),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    15: TensorType("Q8_K", 256, 292),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    24: TensorType("I8", 1, 1),
    25: TensorType("I16", 1, 2),
    26: TensorType("I32", 1, 4),
    27: TensorType("I64", 1, 8),
    28: TensorType("F64", 1, 8),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
    40: TensorType("NVFP4", 64, 36),
    41: TensorType("Q1_0", 128, 18),
    42: TensorType("Q2_0", 64, 18),
}
"""ggml's tensor types by their number in a file; the gaps are types that GGUF files may no longer hold"""

Bytes: TypeAlias = NDArray[np.uint8]
Floats: TypeAlias = NDArray[np.float32]
Halfs: TypeAlias = NDArray[np.float16]

_BLOCK = 32
_HALF_MAX = np.float32(65504)
_CHUNK_VALUES = 1 << 20
"""values of a float matrix that are quantised at a time, to bound the memory"""


@dataclass(frozen=True, slots=True)
class BlockCodes:
    """A matrix as affine blocks of its rows: w = d * code + m, or w = d * (code - 128) where there is no minimum `m`.

    codes uint8 [rows, blocks, block], below 2 ** bits; d and m float16 [rows, blocks], finite. `bits` is 4 or 8; blocks
    of 4 bits always have a minimum.
    """

    codes: NDArray[np.uint8]
    d: Halfs
    m: Halfs | None
    bits: int

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) of the matrix."""
        rows, blocks, block = self.codes.shape
        return rows, blocks * block

    def values(self) -> Floats:
        """The matrix, float32 [rows, columns]; every product is exact, so only the sum with `m` rounds."""
        d = self.d.astype(np.float32)[..., None]
        codes = self.codes.astype(np.float32)
        if self.m is None:
            return (d * (codes - np.float32(128))).reshape(self.shape)
        return (d * codes + self.m.astype(np.float32)[..., None]).reshape(self.shape)


def dequantise(raw: Bytes, kind: str, shape: tuple[int, ...], name: str = "") -> Floats:
    """The values of a tensor of any shape, float32 [shape], from its bytes `raw`, uint8 [nbytes].

    `name` is the tensor's, for messages. Raises `UnsupportedModelError` for a type that is not decoded here, and
    `ModelFormatError` if a value or a scale is not finite.
    """
    if kind in _FLOATS:
        values = _FLOATS[kind](raw)
        if not np.isfinite(values).all():
            raise ModelFormatError(f"tensor {quoted(name)} holds values that are not finite numbers")
        return values.reshape(shape)
    return _decode(raw, kind, (math.prod(shape[:-1]), shape[-1]), name).values().reshape(shape)


def block_codes(raw: Bytes, kind: str, shape: tuple[int, ...], name: str = "") -> BlockCodes:
    """The block codes of a matrix: a quantised source's own, or 8-bit codes made here from floats (`quantise_8bit`).

    Raises as `dequantise`, and `ModelFormatError` for a tensor that is no matrix of whole blocks.
    """
    if len(shape) != 2 or shape[1] % _BLOCK:
        raise ModelFormatError(f"tensor {quoted(name)} is no matrix of blocks of {_BLOCK}: its shape is {list(shape)}")
    rows, columns = shape
    if kind not in _FLOATS:
        return _decode(raw, kind, (rows, columns), name)
    codes = np.empty((rows, columns // _BLOCK, _BLOCK), np.uint8)
    d, m = np.empty((2, *codes.shape[:2]), np.float16)
    step = max(1, _CHUNK_VALUES // columns)
    for first in range(0, rows, step):
        chunk = slice(first, min(first + step, rows))
        part = raw.reshape(rows, -1)[chunk].reshape(-1)
        part_codes = quantise_8bit(dequantise(part, kind, (chunk.stop - first, columns), name), name)
        codes[chunk], d[chunk], m[chunk] = part_codes.codes, part_codes.d, part_codes.m
    return BlockCodes(codes, d, m, 8)


def quantise_8bit(values: Floats, name: str = "") -> BlockCodes:
    """`values`, float32 [rows, columns], as blocks of 32 inputs with 8-bit codes, a scale and a real-valued minimum.

    Scale and minimum start at the block's range and are fitted once to the codes by least squares; each block keeps the
    better pair. Raises `ModelFormatError` for values beyond float16.
    """
    if not np.abs(values).max() <= _HALF_MAX:
        raise ModelFormatError(f"tensor {quoted(name)} holds values beyond {_HALF_MAX:.0f}, which float16 cannot hold")
    rows, columns = values.shape
    blocks = values.reshape(rows, columns // _BLOCK, _BLOCK)
    low = blocks.min(axis=-1)
    d, m = _half((blocks.max(axis=-1) - low) / 255), _half(low)
    codes, error = _encode(blocks, d, m)
    fitted_d, fitted_m = (_half(part) for part in _fit(blocks, codes))
    fitted_codes, fitted_error = _encode(blocks, fitted_d, fitted_m)
    better = fitted_error < error
    return BlockCodes(
        np.where(better[..., None], fitted_codes, codes),
        np.where(better, fitted_d, d),
        np.where(better, fitted_m, m),
        8,
    )


def _half(values: Floats) -> Halfs:
    return np.clip(values, -_HALF_MAX, _HALF_MAX).astype(np.float16)


def _encode(blocks: Floats, d: Halfs, m: Halfs) -> tuple[Bytes, Floats]:
    """The nearest codes for these scales and minima, and each block's squared error."""
    scale, minimum = d.astype(np.float32)[..., None], m.astype(np.float32)[..., None]
    steps = np.divide(blocks - minimum, scale, out=np.zeros_like(blocks), where=scale != 0)
    codes = np.clip(np.rint(steps), 0, 255)
    return codes.astype(np.uint8), np.square(codes * scale + minimum - blocks).sum(axis=-1)


def _fit(blocks: Floats, codes: Bytes) -> tuple[Floats, Floats]:
    """The d and m that bring d * code + m nearest to `blocks` in each block (linear regression)."""
    centre = codes.mean(axis=-1, dtype=np.float32)
    mean = blocks.mean(axis=-1)
    offsets = codes - centre[..., None]
    spread = np.square(offsets).sum(axis=-1)
    slope = np.divide(
        (offsets * (blocks - mean[..., None])).sum(axis=-1), spread, out=np.zeros_like(mean), where=spread > 0
    )
    return slope, mean - slope * centre


def _decode(raw: Bytes, kind: str, shape: tuple[int, int], name: str) -> BlockCodes:
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise UnsupportedModelError(
            f"tensor {quoted(name)} has type {quoted(kind)}, which cannot be run", hint=TYPES_HINT
        )
    rows, columns = shape
    with np.errstate(over="ignore", invalid="ignore"):
        codes = decoder(raw.reshape(rows, columns // _BLOCK, -1))
    if not np.isfinite(codes.d).all() or not (codes.m is None or np.isfinite(codes.m).all()):
        raise ModelFormatError(f"tensor {quoted(name)} holds scales that are not finite numbers")
    return codes


def _halfs_at(raw: Bytes, start: int) -> Halfs:
    return np.ascontiguousarray(raw[..., start : start + 2]).view("<f2")[..., 0]


def _nibbles(raw: Bytes) -> Bytes:
    """Codes 0..15 of a block are the low halves of its bytes, 16..31 the high ones."""
    return np.concatenate([raw & 15, raw >> 4], axis=-1)


def _q4_0(raw: Bytes) -> BlockCodes:
    """d, 16 bytes of codes: w = d * (code - 8), and -8 d is exact in float16."""
    d = _halfs_at(raw, 0)
    return BlockCodes(_nibbles(raw[..., 2:]), d, d * np.float16(-8), 4)


def _q4_1(raw: Bytes) -> BlockCodes:
    """d, m, 16 bytes of codes: w = d * code + m."""
    return BlockCodes(_nibbles(raw[..., 4:]), _halfs_at(raw, 0), _halfs_at(raw, 2), 4)


def _q8_0(raw: Bytes) -> BlockCodes:
    """d, 32 signed codes: w = d * code; flipping the sign bit adds 128."""
    return BlockCodes(raw[..., 2:] ^ np.uint8(128), _halfs_at(raw, 0), None, 8)


_DECODERS: dict[str, Callable[[Bytes], BlockCodes]] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0}
"""from the bytes of a matrix, uint8 [rows, blocks, bytes of a block]"""

_FLOATS: dict[str, Callable[[Bytes], NDArray[Any]]] = {
    "F32": lambda raw: raw.view("<f4").astype(np.float32),
    "F16": lambda raw: raw.view("<f2").astype(np.float32),
    "BF16": lambda raw: (raw.view("<u2").astype(np.uint32) << 16).view(np.float32),
}

TYPES_HINT = f"use a file whose weights have the types {', '.join((*_FLOATS, *_DECODERS))}"
