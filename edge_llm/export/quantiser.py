"""The quantiser for matrices that arrive as floats: blocks of 32 inputs with 8-bit codes, a scale and a minimum."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge_llm.errors import ModelFormatError, quoted
from edge_llm.export.gguf_blocks import BlockCodes, Bytes, Floats
from edge_llm.kernels.block_format import BlockFormat

FORM_OF_FLOATS = BlockFormat(8, 32, True)

_HALF_MAX = np.float32(65504)


def quantise_8bit(values: Floats, name: str = "") -> BlockCodes:
    """`values`, float32 [rows, columns], as blocks of 32 inputs with 8-bit codes, a scale and a real-valued minimum.

    Scale and minimum start at the block's range and are fitted once to the codes by least squares; each block keeps the
    better pair. Raises `ModelFormatError` for values beyond float16.
    """
    if not np.abs(values).max() <= _HALF_MAX:
        raise ModelFormatError(f"tensor {quoted(name)} holds values beyond {_HALF_MAX:.0f}, which float16 cannot hold")
    rows, columns = values.shape
    blocks = values.reshape(rows, columns // FORM_OF_FLOATS.block, FORM_OF_FLOATS.block)
    low = blocks.min(axis=-1)
    d, m = _half((blocks.max(axis=-1) - low) / 255), _half(low)
    codes, error = _encode(blocks, d, m)
    fitted_d, fitted_m = (_half(part) for part in _fit(blocks, codes))
    fitted_codes, fitted_error = _encode(blocks, fitted_d, fitted_m)
    better = fitted_error < error
    return BlockCodes(
        FORM_OF_FLOATS,
        np.where(better[..., None], fitted_codes, codes),
        np.where(better, fitted_d, d),
        np.where(better, fitted_m, m),
    )


def _half(values: Floats) -> NDArray[np.float16]:
    return np.clip(values, -_HALF_MAX, _HALF_MAX).astype(np.float16)


def _encode(blocks: Floats, d: NDArray[np.float16], m: NDArray[np.float16]) -> tuple[Bytes, Floats]:
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
