"""A static folder: what is derived from a model folder to run it by stock ops. It can be made again at any time.

static.json   what it was made from and how, the places of the embeddings, sizes and digests of the other files
static.onnx   the graph
static.bin    its weights
golden.bin    float32 logits that every provider must reach before it is used
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from edge_llm.errors import ModelFormatError
from edge_llm.kernels.block_format import BlockFormat
from edge_llm.kernels.layout import GROUP_ROWS
from edge_llm.model.manifest import WEIGHTS_NAME, FileSpec, ModelManifest

STATIC_VERSION = 3
STATIC_NAME = "static.json"
STATIC_GRAPH = "static.onnx"
STATIC_WEIGHTS = "static.bin"
GOLDEN_NAME = "golden.bin"
_MOST_BYTES = 1 << 20


class StaticForm(StrEnum):
    """How matrices are written: the source's blocks under DequantizeLinear, float32, or as a kind of device takes them."""

    BLOCKS = "blocks"
    F32 = "f32"
    QNN = "qnn"
    """the blocks under MatMulNBits, norms as one op, and the logits of all rows"""
    COREML = "coreml"
    """float32, and the logits of all rows"""


@dataclass(frozen=True, slots=True)
class BlockMatrix:
    """Where a matrix [outputs, inputs] of block codes lies in weights.bin: (offset, length) of codes and of scales.

    `scale` is what its rows are multiplied by.
    """

    outputs: int
    inputs: int
    bits: int
    block: int
    minimum: bool
    codes: tuple[int, int]
    scales: tuple[int, int]
    scale: float


@dataclass(frozen=True, slots=True)
class StaticManifest:
    """The content of static.json."""

    form: str
    embedding: BlockMatrix
    files: dict[str, FileSpec]
    version: int = STATIC_VERSION

    def to_json(self) -> str:
        """The text; `read` gives an equal one back."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @classmethod
    def read(cls, folder: Path) -> StaticManifest:
        """Raises `ModelFormatError` unless the folder is of this version and whole, by the sizes of its files."""
        try:
            with (folder / STATIC_NAME).open("rb") as file:
                raw: Any = json.loads(file.read(_MOST_BYTES))
            places = {name: tuple(raw["embedding"][name]) for name in ("codes", "scales")}
            files = {name: FileSpec(**spec) for name, spec in raw["files"].items()}
            manifest = cls(**{**raw, "embedding": BlockMatrix(**{**raw["embedding"], **places}), "files": files})
            sizes = {name: (folder / name).stat().st_size for name in (STATIC_GRAPH, STATIC_WEIGHTS, GOLDEN_NAME)}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise ModelFormatError("the static form of the model is not whole") from None
        if manifest.version != STATIC_VERSION or {name: spec.size for name, spec in files.items()} != sizes:
            raise ModelFormatError("the static form of the model is of another version, or damaged")
        return manifest


class EmbeddingTable:
    """Rows of a matrix in weights.bin, as float32: what BlockEmbedding does, by the host."""

    def __init__(self, folder: Path, manifest: ModelManifest, matrix: BlockMatrix) -> None:
        """Raises `ModelFormatError` for places that the file does not have."""
        size, form = manifest.dimensions, BlockFormat(matrix.bits, matrix.block, matrix.minimum)
        lengths = form.code_bytes(size.vocab, size.hidden), form.scale_bytes(size.vocab, size.hidden)
        weights = np.memmap(folder / WEIGHTS_NAME, np.uint8, "r")
        for (offset, length), expected in zip((matrix.codes, matrix.scales), lengths, strict=True):
            if length != expected or not 0 <= offset <= len(weights) - length:
                raise ModelFormatError("the static form of the model is not this model's")
        self._form, self._scale = form, np.float32(matrix.scale)
        blocks = size.hidden // form.block
        codes, scales = (weights[offset : offset + length] for offset, length in (matrix.codes, matrix.scales))
        self._codes = codes.reshape(-1, blocks, form.block_code_bytes // (4 * GROUP_ROWS), GROUP_ROWS, 4)
        self._scales = scales.view(np.float16).reshape(-1, blocks, 2 if form.minimum else 1, GROUP_ROWS)

    def rows(self, token_ids: np.ndarray) -> np.ndarray:
        """float32 [ids, hidden]."""
        group, lane = token_ids // GROUP_ROWS, token_ids % GROUP_ROWS
        q = self._codes[group, :, :, lane]  # [ids, blocks, steps, 4]
        if self._form.bits == 4:
            q = np.stack([q & 15, q >> 4], axis=-2)
        q = q.reshape(*q.shape[:2], -1).astype(np.float32)
        scales = self._scales[group, :, :, lane].astype(np.float32)  # [ids, blocks, 1 or 2]
        d = scales[:, :, :1]
        rows: np.ndarray = d * q + scales[:, :, 1:] if self._form.minimum else d * (q - np.float32(128))
        return (rows * self._scale).reshape(len(token_ids), -1)
