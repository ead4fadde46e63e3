"""weights.bin: every constant of a graph, aligned, in the very layout the kernels read: loading is a memory map."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from edge_llm.export.gguf import GgufFile, GgufTensor
from edge_llm.export.gguf_blocks import BlockCodes
from edge_llm.export.gguf_types import block_codes, dequantise, form_of
from edge_llm.kernels.block_format import BlockFormat, pack_codes, pack_scales, unpack
from edge_llm.kernels.layout import GROUP_ROWS
from edge_llm.model.graph_check import ALIGNMENT

_CHUNK_VALUES = 1 << 18
"""values of a matrix that are decoded, packed and checked at a time, to bound the memory"""


@dataclass(frozen=True, slots=True)
class Constant:
    """One initialiser: where it lies in weights.bin and what it is there."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix [outputs, inputs] in weights.bin: its form and its two constants."""

    form: BlockFormat
    outputs: int
    inputs: int
    codes: Constant
    scales: Constant


@dataclass(frozen=True, slots=True)
class SourceMatrix:
    """A matrix [outputs, inputs] of the file, to be decoded a few rows at a time."""

    tensor: GgufTensor
    raw: np.ndarray
    """uint8 [outputs, bytes of a row], a view of the file"""
    form: BlockFormat
    """the form in which it will be stored"""
    order: np.ndarray | None = None
    """rows of the file in the order in which they are stored; None: as they are"""

    @property
    def outputs(self) -> int:
        return len(self.raw)

    @property
    def inputs(self) -> int:
        return self.tensor.shape[1]

    def rows(self, first: int, last: int) -> tuple[BlockCodes, np.ndarray]:
        """Block codes and source values, float32, of the stored rows first .. last - 1."""
        raw = self.raw[slice(first, last) if self.order is None else self.order[first:last]].reshape(-1)
        arguments = raw, self.tensor.type, (last - first, self.inputs), self.tensor.name
        return block_codes(*arguments), dequantise(*arguments)


class WeightsWriter:
    """Appends constants to weights.bin, hashing as it writes; a context manager."""

    def __init__(self, path: Path) -> None:
        self.constants: list[Constant] = []
        self.fidelity: dict[str, float] = {}
        """largest relative error of storing each GGUF type in this layout; 0 is bit-exact"""
        self.tensor_types: dict[str, int] = {}
        self._file = path.open("wb")
        self._digest = hashlib.sha256()
        self._size = 0

    def __enter__(self) -> WeightsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def size(self) -> int:
        return self._size

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def array(self, name: str, values: np.ndarray) -> Constant:
        """Append an array as it is."""
        constant = self._begin(name, values.dtype, values.shape)
        self._append(values)
        return constant

    def matrix(self, name: str, *sources: SourceMatrix) -> PackedMatrix:
        """Append matrices of one form as one, their rows below each other, in the kernels' layout."""
        form, inputs = sources[0].form, sources[0].inputs
        outputs = sum(source.outputs for source in sources)
        codes = self._begin(f"{name}.codes", np.dtype(np.uint8), (form.code_bytes(outputs, inputs),))
        errors = [_Distance() for _ in sources]
        scales = []
        step = max(1, _CHUNK_VALUES // (inputs * GROUP_ROWS)) * GROUP_ROWS
        for first in range(0, outputs, step):
            pieces = list(_pieces(sources, first, first + step))
            chunk = _joined([piece for _, piece, _ in pieces])
            packed, packed_scales = pack_codes(chunk.codes, form), pack_scales(chunk.d, chunk.m, form)
            self._append(packed)
            scales.append(packed_scales)
            stored = unpack(packed, packed_scales, form, *chunk.shape)  # what the kernels will see
            start = 0
            for number, piece, values in pieces:
                errors[number].add(stored[start : start + piece.shape[0]], values)
                start += piece.shape[0]
        for source, error in zip(sources, errors, strict=True):
            kind = source.tensor.type
            self.fidelity[kind] = max(self.fidelity.get(kind, 0.0), error.relative)
        return PackedMatrix(form, outputs, inputs, codes, self.array(f"{name}.scales", np.concatenate(scales)))

    def _begin(self, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> Constant:
        """A constant that starts here, aligned; its values are appended next."""
        self._append(np.zeros(-self._size % ALIGNMENT, np.uint8))
        constant = Constant(name, dtype, shape, self._size, math.prod(shape) * dtype.itemsize)
        self.constants.append(constant)
        return constant

    def _append(self, values: np.ndarray) -> None:
        data = np.ascontiguousarray(values).data.cast("B")
        self._file.write(data)
        self._digest.update(data)
        self._size += values.nbytes


class _Distance:
    """|stored - source| / |source| (2-norms) of a matrix, from its parts; 0 is bit-exact."""

    def __init__(self) -> None:
        self._difference = self._source = 0.0

    def add(self, stored: np.ndarray, values: np.ndarray) -> None:
        # einsum stays in this thread; a BLAS would start one for each core to add a few numbers
        exact = values.astype(np.float64).reshape(-1)
        self._source += float(np.einsum("i,i", exact, exact))
        exact -= stored.reshape(-1)
        self._difference += float(np.einsum("i,i", exact, exact))

    @property
    def relative(self) -> float:
        if self._difference == 0:
            return 0.0
        return math.sqrt(self._difference / self._source) if self._source else math.inf


def _pieces(sources: Sequence[SourceMatrix], first: int, last: int) -> Iterator[tuple[int, BlockCodes, np.ndarray]]:
    """Rows first .. last - 1 of the matrices below each other: (number of the matrix, codes, source values) of each part."""
    start = 0
    for number, source in enumerate(sources):
        a, b = max(first - start, 0), min(last - start, source.outputs)
        if a < b:
            yield number, *source.rows(a, b)
        start += source.outputs


def _joined(parts: list[BlockCodes]) -> BlockCodes:
    minima: list[np.ndarray] = [part.m for part in parts if part.m is not None]
    return BlockCodes(
        form=parts[0].form,
        codes=np.concatenate([part.codes for part in parts]),
        d=np.concatenate([part.d for part in parts]),
        m=np.concatenate(minima) if minima else None,
    )


def read_matrix(gguf: GgufFile, name: str, writer: WeightsWriter) -> SourceMatrix:
    """A matrix of the file, for `writer.matrix`. Raises `UnsupportedModelError` for a type that cannot be run, by name."""
    tensor = gguf.tensor(name)
    writer.tensor_types[tensor.type] = writer.tensor_types.get(tensor.type, 0) + 1
    raw = gguf.tensor_bytes(tensor).reshape(tensor.shape[0], -1)
    return SourceMatrix(tensor, raw, form_of(tensor.type, name))


def read_vector(gguf: GgufFile, name: str) -> np.ndarray:
    """A norm's vector as float32. Raises `ModelFormatError` if it holds anything but finite numbers."""
    tensor = gguf.tensor(name)
    return np.ascontiguousarray(dequantise(gguf.tensor_bytes(tensor), tensor.type, tensor.shape, name).reshape(-1))


def rotate_halves(matrix: SourceMatrix, heads: int, rotary_dim: int) -> SourceMatrix:
    """Rows of q or k, stored for rotation of pairs (2i, 2i + 1), reordered for rotation of halves (i, i + rotary_dim / 2)."""
    head_dim = matrix.outputs // heads
    within = np.arange(head_dim)
    within[:rotary_dim] = np.concatenate([np.arange(0, rotary_dim, 2), np.arange(1, rotary_dim, 2)])
    return replace(matrix, order=(np.arange(heads)[:, None] * head_dim + within).reshape(-1))
