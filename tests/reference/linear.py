"""Products with blocks of weights in float64: what `edge_llm.kernels.linear` computes. Written from the contract."""

from __future__ import annotations

import numpy as np

from edge_llm.kernels.block_format import BlockFormat

BLOCK = 32


def quantise(x: np.ndarray, *, fused: bool) -> tuple[np.ndarray, np.ndarray]:
    """Codes [rows, inputs / 32, 32] and scales [rows, inputs / 32], both float64, of finite float32 rows.

    The scale is the largest magnitude / 127 with two bits of precision cut off, or 0 where that is subnormal. `fused`:
    x / scale is rounded once, not twice.
    """
    blocks = x.reshape(len(x), -1, BLOCK)
    scales = np.abs(blocks).max(-1) * np.float32(1 / 127)
    scales = (scales.view(np.uint32) & ~np.uint32(3)).view(np.float32)
    scales = np.where(scales < np.finfo(np.float32).tiny, np.float32(0), scales)
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)[..., None]
    exact = blocks.astype(np.float64) * inverse if fused else blocks * inverse
    return np.rint(exact.astype(np.float64)), scales.astype(np.float64)


def product(
    x: np.ndarray, q: np.ndarray, d: np.ndarray, m: np.ndarray | None, *, fused: bool
) -> tuple[np.ndarray, np.ndarray]:
    """x quantised @ weights.T, and the sum of the magnitudes of its terms, both float64 [rows, outputs].

    Weights as codes q [outputs, blocks, block], d and m [outputs, blocks].
    """
    codes, scales = quantise(x, fused=fused)
    parts = BLOCK // q.shape[2]
    codes = codes.reshape(len(x), -1, q.shape[2])
    scales = np.repeat(scales, parts, axis=1)
    centred = q.astype(np.float64) - (128 if m is None else 0)
    terms = np.einsum("rbi,nbi->rnb", codes, centred) * scales[:, None] * d.astype(np.float64)
    size = np.abs(terms).sum(-1)
    total = terms.sum(-1)
    if m is not None:
        offsets = (codes.sum(-1) * scales)[:, None] * m.astype(np.float64)
        total, size = total + offsets.sum(-1), size + np.abs(offsets).sum(-1)
    return total, size


def random_blocks(
    rng: np.random.Generator, form: BlockFormat, outputs: int, inputs: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Codes, d and m of a random matrix, the extremes of the codes included."""
    shape = (outputs, inputs // form.block)
    q = rng.integers(0, 2**form.bits, (*shape, form.block), dtype=np.uint8)
    q[:, 0] = np.where(rng.random((outputs, form.block)) < 0.5, 0, 2**form.bits - 1)
    d = (rng.standard_normal(shape) * 0.01).astype(np.float16)
    return q, d, (rng.standard_normal(shape) * 0.05).astype(np.float16) if form.minimum else None
