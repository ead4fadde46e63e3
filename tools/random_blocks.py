"""Matrices of random bytes in ggml's block types, for tests: no quantiser is needed where the weights are random anyway."""

from __future__ import annotations

import numpy as np

from edge_llm.export.gguf_types import TENSOR_TYPES, dequantise

_SCALES = {
    "Q4_0": {0: 1.0},
    "Q4_1": {0: 1.0, 2: -7.5},
    "Q5_0": {0: 1.0},
    "Q5_1": {0: 1.0, 2: -15.5},
    "Q8_0": {0: 1.0},
    "IQ4_NL": {0: 1.0},
    "Q2_K": {80: 1.0, 82: 1.5},
    "Q3_K": {108: 1.0},
    "Q4_K": {0: 1.0, 2: 7.5},
    "Q5_K": {0: 1.0, 2: 15.5},
    "Q6_K": {208: 1.0},
}
"""byte of each fp16 number of a block, and what it is for a scale of 1: minima bring the mean to 0"""
_BLOCKS = {kind.name: kind for kind in TENSOR_TYPES.values()}


def random_blocks(random: np.random.Generator, kind: str, rows: int, columns: int, spread: float) -> bytes:
    """A matrix of the type `kind` whose values have a mean near 0 and about the standard deviation `spread`."""
    block = _BLOCKS[kind]
    if columns % block.block:
        raise ValueError(f"rows of {columns} values are not whole blocks of {block.block}")
    raw = random.integers(0, 256, (rows * columns // block.block, block.nbytes), np.uint8)

    def scale_by(d: float) -> None:
        for at, factor in _SCALES[kind].items():
            raw[:, at : at + 2] = np.array([d * factor], "<f2").view(np.uint8)

    scale_by(1 / 8)
    scale_by(spread / 8 / float(dequantise(raw.reshape(-1), kind, (rows, columns)).std()))
    return raw.tobytes()
