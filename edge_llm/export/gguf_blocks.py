"""ggml's block formats: the codes, scales and minima that the bytes of a quantised matrix hold.

The formats are those of ggml (ggml-common.h, ggml-quants.c). The older types have blocks of 32 values with an fp16 scale.
The K types have super-blocks of 256 values, whose blocks of 16 or 32 have a whole-numbered scale (and minimum) each, times
an fp16 number of the super-block. That product fits float32 exactly and is rounded once, to fp16, when it is stored: it
is a multiple of 2^-24, as every fp16 number is, so it never underflows; where it overflows, the matrix is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edge_llm.kernels.block_format import BlockFormat

Bytes: TypeAlias = NDArray[np.uint8]
Floats: TypeAlias = NDArray[np.float32]
Scales: TypeAlias = NDArray[np.float16] | Floats

_IQ4_NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8).view(np.uint8)
"""ggml's table of the values that IQ4_NL's codes stand for"""


@dataclass(frozen=True, slots=True)
class BlockCodes:
    """A matrix as affine blocks of its rows: w = d * code + m, or w = d * (code - 128) where there is no minimum `m`.

    codes uint8 [rows, blocks, block], below 2 ** form.bits; d and m float16 or float32 [rows, blocks], as exact as the
    source has them, and finite in fp16.
    """

    form: BlockFormat
    codes: Bytes
    d: Scales
    m: Scales | None

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) of the matrix."""
        rows, blocks, block = self.codes.shape
        return rows, blocks * block

    def values(self) -> Floats:
        """The source's matrix, float32 [rows, columns]; every product is exact, so only the sum with `m` rounds."""
        d = self.d.astype(np.float32)[..., None]
        codes = self.codes.astype(np.float32)
        if self.m is None:
            return (d * (codes - np.float32(128))).reshape(self.shape)
        return (d * codes + self.m.astype(np.float32)[..., None]).reshape(self.shape)


class Decoder(NamedTuple):
    """The form in which a type is stored, and (codes, d, m) of the bytes uint8 [rows, ggml's blocks, bytes of a block].

    Codes come in any shape that has the rows first; d and m are [rows, stored blocks].
    """

    form: BlockFormat
    decode: Callable[[Bytes], tuple[Bytes, Scales, Scales | None]]


def _half(raw: Bytes, start: int) -> NDArray[np.float16]:
    return np.ascontiguousarray(raw[..., start : start + 2]).view("<f2")[..., 0]


def _fields(raw: Bytes, run: int, bits: int) -> Bytes:
    """Fields of `bits` bits: those lowest in each byte of a run of `run` bytes, then the next higher ones; run by run."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    runs = raw.reshape(*raw.shape[:-1], -1, 1, run)
    return ((runs >> shifts) & np.uint8((1 << bits) - 1)).reshape(*raw.shape[:-1], -1)


def _product(raw: Bytes, start: int, factors: NDArray[Any]) -> Floats:
    """The fp16 number at byte `start` of each super-block times its blocks' factors, exact: float32 [rows, blocks]."""
    products: Floats = _half(raw, start).astype(np.float32)[..., None] * factors.astype(np.float32)
    return products.reshape(len(raw), -1)


def _q4_0(raw: Bytes) -> tuple[Bytes, Scales, Scales]:
    """d, 16 bytes of codes: w = d * (code - 8), and -8 d is exact in float16."""
    d = _half(raw, 0)
    return _fields(raw[..., 2:], 16, 4), d, d * np.float16(-8)


def _q4_1(raw: Bytes) -> tuple[Bytes, Scales, Scales]:
    """d, m, 16 bytes of codes: w = d * code + m."""
    return _fields(raw[..., 4:], 16, 4), _half(raw, 0), _half(raw, 2)


def _five_bits(raw: Bytes, start: int) -> Bytes:
    """32 codes: a bit of each in 4 bytes from `start` on, then 16 bytes of the lower four."""
    high = np.unpackbits(raw[..., start : start + 4], axis=-1, bitorder="little")
    return _fields(raw[..., start + 4 :], 16, 4) | high << np.uint8(4)


def _q5_0(raw: Bytes) -> tuple[Bytes, Scales, None]:
    """d, 32 codes of 5 bits: w = d * (code - 16)."""
    return _five_bits(raw, 2) + np.uint8(128 - 16), _half(raw, 0), None


def _q5_1(raw: Bytes) -> tuple[Bytes, Scales, Scales]:
    """d, m, 32 codes of 5 bits: w = d * code + m."""
    return _five_bits(raw, 4), _half(raw, 0), _half(raw, 2)


def _q8_0(raw: Bytes) -> tuple[Bytes, Scales, None]:
    """d, 32 signed codes: w = d * code; flipping the sign bit adds 128."""
    return raw[..., 2:] ^ np.uint8(128), _half(raw, 0), None


def _q2_k(raw: Bytes) -> tuple[Bytes, Scales, Scales]:
    """16 bytes with scale and minimum of 4 bits of a block of 16, 64 bytes of codes of 2 bits, d, dmin."""
    return (
        _fields(raw[..., 16:80], 32, 2),
        _product(raw, 80, raw[..., :16] & 15),
        -_product(raw, 82, raw[..., :16] >> 4),
    )


def _q3_k(raw: Bytes) -> tuple[Bytes, Scales, Scales]:
    """32 bytes of the codes' third bits, 64 of their lower two, 12 of scales + 32 of 6 bits, d: w = d * scale * (code - 4)."""
    codes = _fields(raw[..., 32:96], 32, 2) | _fields(raw[..., :32], 32, 1) << np.uint8(2)
    factors = _fields(raw[..., 96:104], 8, 4) | _fields(raw[..., 104:108], 4, 2) << np.uint8(4)
    d = _product(raw, 108, factors.astype(np.int8) - np.int8(32))
    return codes, d, d * np.float32(-4)


def _scales_and_minima(raw: Bytes) -> tuple[Floats, Floats]:
    """d, dmin, then 12 bytes with scales and minima of 6 bits of 8 blocks; the last four of each are in two parts."""
    first, second, third = raw[..., 4:8], raw[..., 8:12], raw[..., 12:16]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=-1)
    minima = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=-1)
    return _product(raw, 0, scales), -_product(raw, 2, minima)


def _q4_k(raw: Bytes) -> tuple[Bytes, Scales, Scales]:
    """Scales and minima of 8 blocks of 32, 128 bytes of codes: w = d * scale * code - dmin * minimum."""
    return _fields(raw[..., 16:], 32, 4), *_scales_and_minima(raw)


def _q5_k(raw: Bytes) -> tuple[Bytes, Scales, Scales]:
    """As Q4_K, with 32 bytes of the codes' fifth bits before the lower four."""
    codes = _fields(raw[..., 48:], 32, 4) | _fields(raw[..., 16:48], 32, 1) << np.uint8(4)
    return codes, *_scales_and_minima(raw)


def _q6_k(raw: Bytes) -> tuple[Bytes, Scales, None]:
    """128 bytes of the codes' lower four bits, 64 of their upper two, 16 signed scales, d: w = d * scale * (code - 32)."""
    codes = _fields(raw[..., :128], 64, 4) | _fields(raw[..., 128:192], 32, 2) << np.uint8(4)
    return codes + np.uint8(128 - 32), _product(raw, 208, raw[..., 192:208].view(np.int8)), None


def _iq4_nl(raw: Bytes) -> tuple[Bytes, Scales, None]:
    """d, 16 bytes of codes that choose among 16 signed numbers: w = d * number."""
    return _IQ4_NL[_fields(raw[..., 2:], 16, 4)] + np.uint8(128), _half(raw, 0), None


DECODERS = {
    "Q4_0": Decoder(BlockFormat(4, 32, True), _q4_0),
    "Q4_1": Decoder(BlockFormat(4, 32, True), _q4_1),
    "Q5_0": Decoder(BlockFormat(8, 32, False), _q5_0),
    "Q5_1": Decoder(BlockFormat(8, 32, True), _q5_1),
    "Q8_0": Decoder(BlockFormat(8, 32, False), _q8_0),
    "IQ4_NL": Decoder(BlockFormat(8, 32, False), _iq4_nl),
    "Q2_K": Decoder(BlockFormat(4, 16, True), _q2_k),
    "Q3_K": Decoder(BlockFormat(4, 16, True), _q3_k),
    "Q4_K": Decoder(BlockFormat(4, 32, True), _q4_k),
    "Q5_K": Decoder(BlockFormat(8, 32, True), _q5_k),
    "Q6_K": Decoder(BlockFormat(8, 16, False), _q6_k),
}
"""the quantised types that can be run"""
