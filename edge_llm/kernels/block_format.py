"""How weight matrices are stored: blocks of 4- or 8-bit codes with fp16 scales, 16 output rows interleaved. NumPy only.

A block is `block` neighbouring inputs of one output row:  w = d * q + m  (q 0..15 or 0..255), and without a minimum,
8 bits only,  w = d * (q - 128). Two arrays hold a matrix of `outputs` rows, padded with zeros to whole groups of 16:

    codes   uint8, for each group and block:
            4 bits  [block / 8][16 rows][4]   byte i of step t: input 8t + i in its low half, 8t + 4 + i in its high
            8 bits  [block / 4][16 rows][4]   byte i of step t: input 4t + i
    scales  fp16, for each group and block: d[16 rows], then m[16 rows] if there is a minimum

So one load gives four inputs of each of 4, 8 or 16 rows, whatever the width of a vector.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edge_llm.errors import ModelFormatError, ParameterError, UnsupportedModelError
from edge_llm.kernels.layout import ACTIVATION_BLOCK, GROUP_ROWS

_KNOWN = frozenset({(4, 16, True), (4, 32, True), (8, 16, False), (8, 32, False), (8, 32, True)})


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Bits of a code (4 or 8), inputs of a block (16 or 32), and whether blocks have a minimum (4 bits: always).

    Raises `UnsupportedModelError` for any other combination.
    """

    bits: int
    block: int
    minimum: bool

    def __post_init__(self) -> None:
        if (self.bits, self.block, self.minimum) not in _KNOWN:
            what = f"{self.bits}-bit codes in blocks of {self.block} {'with' if self.minimum else 'without'} a minimum"
            raise UnsupportedModelError(f"no kernel reads {what}")

    @property
    def block_code_bytes(self) -> int:
        """Bytes of codes of one block of one group."""
        return GROUP_ROWS * self.block * self.bits // 8

    @property
    def block_scale_bytes(self) -> int:
        """Bytes of scales (and minima) of one block of one group."""
        return GROUP_ROWS * (4 if self.minimum else 2)

    def code_bytes(self, outputs: int, inputs: int) -> int:
        """Bytes of the codes of a matrix. Raises `ModelFormatError` for a shape that cannot be stored."""
        return self._blocks(outputs, inputs) * self.block_code_bytes

    def scale_bytes(self, outputs: int, inputs: int) -> int:
        """Bytes of the scales of a matrix. Raises `ModelFormatError` for a shape that cannot be stored."""
        return self._blocks(outputs, inputs) * self.block_scale_bytes

    def _blocks(self, outputs: int, inputs: int) -> int:
        if outputs < 1 or inputs < ACTIVATION_BLOCK or inputs % ACTIVATION_BLOCK:
            raise ModelFormatError(
                f"a matrix of {outputs} x {inputs} cannot be stored: inputs must be a multiple of {ACTIVATION_BLOCK}"
            )
        return group_count(outputs) * (inputs // self.block)


def group_count(outputs: int) -> int:
    """Groups of interleaved rows that hold `outputs` rows."""
    return -(-outputs // GROUP_ROWS)


def pack_codes(codes: np.ndarray, form: BlockFormat) -> np.ndarray:
    """uint8 [form.code_bytes(...)] from codes uint8 [outputs, blocks, block].

    Raises `ParameterError` on a code or shape that is not the form's, `ModelFormatError` on one that cannot be stored.
    """
    _check(codes, (None, None, form.block), "codes")
    outputs, blocks, block = codes.shape
    form.code_bytes(outputs, blocks * block)
    if codes.dtype != np.uint8 or (form.bits == 4 and codes.max(initial=0) > 15):
        raise ParameterError(f"codes of {form.bits} bits expected, as uint8")
    grouped = _in_groups(codes)
    if form.bits == 8:
        steps = grouped.reshape(-1, GROUP_ROWS, blocks, block // 4, 4)
    else:
        halves = grouped.reshape(-1, GROUP_ROWS, blocks, block // 8, 2, 4)
        steps = halves[..., 0, :] | (halves[..., 1, :] << 4)
    return np.ascontiguousarray(steps.transpose(0, 2, 3, 1, 4)).reshape(-1)


def pack_scales(d: np.ndarray, m: np.ndarray | None, form: BlockFormat) -> np.ndarray:
    """float16 [form.scale_bytes(...) / 2] from d (and m, if the form has a minimum), each [outputs, blocks].

    Values are rounded to fp16. Raises `ParameterError` on a bad shape, `ModelFormatError` if one is not finite in fp16.
    """
    if (m is not None) != form.minimum:
        raise ParameterError("minima are given if and only if the format has them")
    parts = [d] if m is None else [d, m]
    for part in parts:
        _check(part, (None, d.shape[1] if d.ndim == 2 else None), "scales")
    with np.errstate(over="ignore"):
        halves = np.stack([_in_groups(part.astype(np.float16)) for part in parts])
    if not np.isfinite(halves).all():
        raise ModelFormatError("a scale is not a finite number in fp16")
    grouped = halves.reshape(len(parts), -1, GROUP_ROWS, d.shape[1])
    return np.ascontiguousarray(grouped.transpose(1, 3, 0, 2)).reshape(-1)


def unpack(codes: np.ndarray, scales: np.ndarray, form: BlockFormat, outputs: int, inputs: int) -> np.ndarray:
    """float32 [outputs, inputs], the matrix that packed codes and scales stand for (one rounding a weight).

    Raises `ModelFormatError` if the arrays are not as large as the shape needs.
    """
    q, d, m = unpack_parts(codes, scales, form, outputs, inputs)
    # A product of 11 and 8 bits is exact in float32, so only the sum rounds.
    if m is None:
        weights = d[..., None] * (q.astype(np.float32) - np.float32(128))
    else:
        weights = d[..., None] * q.astype(np.float32) + m[..., None]
    return weights.reshape(outputs, inputs)


def unpack_parts(
    codes: np.ndarray, scales: np.ndarray, form: BlockFormat, outputs: int, inputs: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """(codes uint8 [outputs, blocks, block], d float32 [outputs, blocks], m as d or None) of a packed matrix.

    Raises `ModelFormatError` if the arrays are not as large as the shape needs.
    """
    sizes = (form.code_bytes(outputs, inputs), form.scale_bytes(outputs, inputs))
    if (codes.nbytes, scales.nbytes) != sizes:
        raise ModelFormatError(
            f"codes and scales have {codes.nbytes} and {scales.nbytes} bytes, {sizes[0]} and {sizes[1]} are needed"
        )
    groups, blocks, block = group_count(outputs), inputs // form.block, form.block
    steps = codes.reshape(-1).view(np.uint8).reshape(groups, blocks, -1, GROUP_ROWS, 4).transpose(0, 3, 1, 2, 4)
    if form.bits == 4:
        steps = np.stack([steps & 15, steps >> 4], axis=-2)
    q = steps.reshape(groups * GROUP_ROWS, blocks, block)[:outputs]
    parts = scales.reshape(-1).view(np.float16).reshape(groups, blocks, -1, GROUP_ROWS).transpose(2, 0, 3, 1)
    parts = parts.reshape(-1, groups * GROUP_ROWS, blocks)[:, :outputs].astype(np.float32)
    return q, parts[0], parts[1] if form.minimum else None


def _in_groups(rows: np.ndarray) -> np.ndarray:
    """The rows, and zeros up to a whole group."""
    missing = -len(rows) % GROUP_ROWS
    return np.pad(rows, [(0, missing)] + [(0, 0)] * (rows.ndim - 1)) if missing else rows


def _check(array: np.ndarray, shape: tuple[int | None, ...], what: str) -> None:
    if array.ndim != len(shape) or any(want not in (None, have) for have, want in zip(array.shape, shape, strict=True)):
        raise ParameterError(f"{what} have shape {array.shape}, {len(shape)} axes {shape} are needed")
