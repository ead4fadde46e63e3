"""What the bytes of a GGUF tensor mean: the block codes in which a matrix is stored, and the source's float32 values.

`gguf_blocks.DECODERS` and `_FLOATS` list the types that can be run; a new one is a row there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge_llm.errors import ModelFormatError, UnsupportedModelError, quoted
from edge_llm.export.gguf_blocks import DECODERS, BlockCodes, Bytes, Floats
from edge_llm.export.quantiser import FORM_OF_FLOATS, quantise_8bit
from edge_llm.kernels.block_format import BlockFormat


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

_BLOCKS = {kind.name: kind for kind in TENSOR_TYPES.values()}
_FLOATS: dict[str, Callable[[Bytes], NDArray[Any]]] = {
    "F32": lambda raw: raw.view("<f4").astype(np.float32),
    "F16": lambda raw: raw.view("<f2").astype(np.float32),
    "BF16": lambda raw: (raw.view("<u2").astype(np.uint32) << 16).view(np.float32),
}

TYPES_HINT = f"use a file whose weights have the types {', '.join((*_FLOATS, *DECODERS))}"


def form_of(kind: str, name: str = "") -> BlockFormat:
    """The form in which a matrix of a type is stored. Raises `UnsupportedModelError` naming tensor and type if in none."""
    if kind in _FLOATS:
        return FORM_OF_FLOATS
    if kind not in DECODERS:
        raise UnsupportedModelError(
            f"tensor {quoted(name)} has type {quoted(kind)}, which cannot be run", hint=TYPES_HINT
        )
    return DECODERS[kind].form


def dequantise(raw: Bytes, kind: str, shape: tuple[int, ...], name: str = "") -> Floats:
    """The values of a tensor of any shape, float32 [shape], from its bytes `raw`, uint8 [nbytes].

    `name` is the tensor's, for messages. Raises `UnsupportedModelError` for a type that is not decoded here, and
    `ModelFormatError` if bytes and shape do not fit, or if a value or a scale is not finite.
    """
    if kind not in _FLOATS:
        return _decode(raw, kind, (math.prod(shape[:-1]), shape[-1]), name).values().reshape(shape)
    _check_size(raw, kind, shape, name)
    values = _FLOATS[kind](raw)
    if not np.isfinite(values).all():
        raise ModelFormatError(f"tensor {quoted(name)} holds values that are not finite numbers")
    return values.reshape(shape)


def block_codes(raw: Bytes, kind: str, shape: tuple[int, ...], name: str = "") -> BlockCodes:
    """The block codes of a matrix: a quantised source's own, or 8-bit codes made here from floats (`quantise_8bit`).

    Raises as `dequantise`, and `ModelFormatError` for a tensor that is no matrix of whole blocks.
    """
    block = max(form_of(kind, name).block, _BLOCKS[kind].block)
    if len(shape) != 2 or shape[1] % block:
        raise ModelFormatError(f"tensor {quoted(name)} is no matrix of blocks of {block}: its shape is {list(shape)}")
    if kind in _FLOATS:
        return quantise_8bit(dequantise(raw, kind, shape, name), name)
    return _decode(raw, kind, (shape[0], shape[1]), name)


def _decode(raw: Bytes, kind: str, shape: tuple[int, int], name: str) -> BlockCodes:
    form = form_of(kind, name)
    _check_size(raw, kind, shape, name)
    rows, columns = shape
    with np.errstate(over="ignore", invalid="ignore"):
        codes, d, m = DECODERS[kind].decode(raw.reshape(rows, columns // _BLOCKS[kind].block, -1))
        if not all(np.isfinite(part.astype(np.float16)).all() for part in (d, m) if part is not None):
            raise ModelFormatError(f"tensor {quoted(name)} holds scales that are not finite numbers in fp16")
    return BlockCodes(form, codes.reshape(rows, -1, form.block), d, m)


def _check_size(raw: Bytes, kind: str, shape: tuple[int, ...], name: str) -> None:
    block = _BLOCKS[kind]
    if shape[-1] % block.block or raw.size != math.prod(shape) // block.block * block.nbytes:
        raise ModelFormatError(
            f"tensor {quoted(name)}: {raw.size} bytes of {kind} are no tensor of shape {list(shape)}"
        )
