"""weights.bin: every constant of a graph, aligned, in the very layout the kernels read: loading is a memory map."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edge_llm.export.gguf import GgufFile
from edge_llm.export.gguf_types import BlockCodes, block_codes, dequantise
from edge_llm.kernels.block_format import BlockFormat, pack_codes, pack_scales, unpack
from edge_llm.model.graph_check import ALIGNMENT

BIT_EXACT = "bit-exact"


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


def format_of(codes: BlockCodes) -> BlockFormat:
    """The form in which the kernels read these codes."""
    return BlockFormat(bits=codes.bits, block=codes.codes.shape[2], minimum=codes.m is not None)


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
        self._append(bytes(-self._size % ALIGNMENT))
        constant = Constant(name, values.dtype, values.shape, self._size, values.nbytes)
        self._append(np.ascontiguousarray(values).data.cast("B"))
        self.constants.append(constant)
        return constant

    def matrix(self, name: str, codes: BlockCodes) -> PackedMatrix:
        """Append a matrix of block codes in the kernels' layout."""
        form = format_of(codes)
        outputs, blocks, block = codes.codes.shape
        return PackedMatrix(
            form=form,
            outputs=outputs,
            inputs=blocks * block,
            codes=self.array(f"{name}.codes", pack_codes(codes.codes, form)),
            scales=self.array(f"{name}.scales", pack_scales(codes.d, codes.m, form)),
        )

    def _append(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._digest.update(data)
        self._size += len(data)


def read_matrix(gguf: GgufFile, name: str, writer: WeightsWriter) -> BlockCodes:
    """The block codes of a matrix, and in `writer.fidelity` how far they are from the source's own values."""
    tensor = gguf.tensor(name)
    raw = gguf.tensor_bytes(tensor)
    codes = block_codes(raw, tensor.type, tensor.shape, name)
    error = _relative_error(dequantise(raw, tensor.type, tensor.shape, name), codes)
    writer.fidelity[tensor.type] = max(writer.fidelity.get(tensor.type, 0.0), error)
    writer.tensor_types[tensor.type] = writer.tensor_types.get(tensor.type, 0) + 1
    return codes


def _relative_error(values: np.ndarray, codes: BlockCodes) -> float:
    """|stored - source| / |source| (2-norms) of what the kernels will see, packed and unpacked again; 0: bit-exact."""
    form = format_of(codes)
    stored = unpack(pack_codes(codes.codes, form), pack_scales(codes.d, codes.m, form), form, *values.shape)
    if np.array_equal(stored, values):
        return 0.0
    return float(np.linalg.norm(stored - values) / np.linalg.norm(values))


def read_vector(gguf: GgufFile, name: str) -> np.ndarray:
    """A norm's vector as float32. Raises `ModelFormatError` if it holds anything but finite numbers."""
    tensor = gguf.tensor(name)
    return np.ascontiguousarray(dequantise(gguf.tensor_bytes(tensor), tensor.type, tensor.shape, name).reshape(-1))


def rotate_halves(codes: BlockCodes, heads: int, rotary_dim: int) -> BlockCodes:
    """Rows of q or k, stored for rotation of pairs (2i, 2i + 1), reordered for rotation of halves (i, i + rotary_dim / 2)."""
    head_dim = codes.codes.shape[0] // heads
    within = np.arange(head_dim)
    within[:rotary_dim] = np.concatenate([np.arange(0, rotary_dim, 2), np.arange(1, rotary_dim, 2)])
    order = (np.arange(heads)[:, None] * head_dim + within).reshape(-1)
    minima = None if codes.m is None else codes.m[order]
    return BlockCodes(codes=codes.codes[order], d=codes.d[order], m=minima, bits=codes.bits)
