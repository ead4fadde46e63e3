"""How matrices of a GGUF file get into weights.bin: in chunks, joined, reordered, and always what the source says."""

from __future__ import annotations

import hashlib
import math
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from edge_llm.errors import ModelFormatError, UnsupportedModelError
from edge_llm.export import weights
from edge_llm.export.gguf import read_gguf
from edge_llm.export.gguf_blocks import DECODERS
from edge_llm.export.gguf_types import dequantise
from edge_llm.export.weights import PackedMatrix, WeightsWriter, read_matrix, rotate_halves
from edge_llm.kernels.block_format import unpack
from tools.random_blocks import random_blocks
from tools.tiny_model import encode, write_gguf

SHAPES = {"a": (40, 512), "b": (7, 512), "c": (83, 512)}


def write(path: Path, kinds: dict[str, str], values: dict[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
    """A file with a matrix of each name and type; gives the values that it holds."""
    random = np.random.Generator(np.random.PCG64(1))
    tensors = {}
    for name, kind in kinds.items():
        rows, columns = SHAPES[name]
        if values is not None:
            raw = encode(values[name].astype(np.float32), kind)
        else:
            raw = random_blocks(random, kind, rows, columns, 1.0)
        tensors[name] = (kind, SHAPES[name], raw)
    write_gguf(path, {"general.architecture": "none"}, tensors)
    return {name: dequantise(np.frombuffer(raw, np.uint8), kind, shape) for name, (kind, shape, raw) in tensors.items()}


def stored(path: Path, matrix: PackedMatrix) -> np.ndarray:
    """float32 [outputs, inputs] that the kernels will see."""
    data = np.fromfile(path, np.uint8)
    codes, scales = (
        data[part.offset : part.offset + part.nbytes].view(part.dtype) for part in (matrix.codes, matrix.scales)
    )
    return unpack(codes, scales, matrix.form, matrix.outputs, matrix.inputs)


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("values_at_a_time", [1, 1 << 14, 1 << 30])
def test_chunks_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, values_at_a_time: int
) -> None:
    source = write(tmp_path / "x.gguf", dict.fromkeys(SHAPES, kind))
    digests = set()
    for chunk in (1 << 18, values_at_a_time):
        monkeypatch.setattr(weights, "_CHUNK_VALUES", chunk)
        with read_gguf(tmp_path / "x.gguf") as gguf, WeightsWriter(tmp_path / "w") as writer:
            joined = writer.matrix("m", *(read_matrix(gguf, name, writer) for name in SHAPES))
            alone = writer.matrix("alone", read_matrix(gguf, "c", writer))
        digests.add((writer.sha256, writer.fidelity[kind]))
        assert writer.sha256 == hashlib.sha256((tmp_path / "w").read_bytes()).hexdigest()
    assert len(digests) == 1
    assert writer.tensor_types == {kind: 4}
    assert all(constant.offset % 64 == 0 for constant in writer.constants)
    for matrix, expected in ((joined, np.concatenate([*source.values()])), (alone, source["c"])):
        error = np.linalg.norm(stored(tmp_path / "w", matrix) - expected) / np.linalg.norm(expected)
        assert error <= (2e-3 if kind.endswith("_K") else 0)
        assert (error == 0) == (writer.fidelity[kind] == 0)
    assert writer.fidelity[kind] < 2e-3


def test_types_of_one_form_are_joined_and_each_says_what_it_lost(tmp_path: Path) -> None:
    source = write(tmp_path / "x.gguf", {"a": "Q4_K", "b": "Q4_0", "c": "Q4_1"})
    with read_gguf(tmp_path / "x.gguf") as gguf, WeightsWriter(tmp_path / "w") as writer:
        matrix = writer.matrix("m", *(read_matrix(gguf, name, writer) for name in SHAPES))
    rows = stored(tmp_path / "w", matrix)
    assert np.array_equal(rows[40:], np.concatenate([source["b"], source["c"]]))
    error = np.linalg.norm(rows[:40] - source["a"]) / np.linalg.norm(source["a"])
    assert writer.fidelity == {"Q4_K": pytest.approx(error, rel=1e-6), "Q4_0": 0, "Q4_1": 0}
    assert 1e-5 < error < 2e-3
    assert writer.tensor_types == {"Q4_K": 1, "Q4_0": 1, "Q4_1": 1}


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_floats_are_quantised_alike_in_any_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    random = np.random.Generator(np.random.PCG64(2))
    values = {name: random.standard_normal(shape) for name, shape in SHAPES.items()}
    source = write(tmp_path / "x.gguf", dict.fromkeys(SHAPES, kind), values)
    digests = set()
    for chunk in (1, 1 << 30):
        monkeypatch.setattr(weights, "_CHUNK_VALUES", chunk)
        with read_gguf(tmp_path / "x.gguf") as gguf, WeightsWriter(tmp_path / "w") as writer:
            matrix = writer.matrix("m", read_matrix(gguf, "c", writer))
        digests.add(writer.sha256)
    assert len(digests) == 1
    error = np.linalg.norm(stored(tmp_path / "w", matrix) - source["c"]) / np.linalg.norm(source["c"])
    assert writer.fidelity[kind] == pytest.approx(error, rel=1e-5)
    assert 0 < error < 0.006


@pytest.mark.parametrize("kind", ["Q6_K", "F16"])
def test_a_large_matrix_needs_no_more_memory_than_its_packed_scales_and_a_chunk(tmp_path: Path, kind: str) -> None:
    shape = 8192, 1024
    random = np.random.Generator(np.random.PCG64(3))
    raw = bytes(2 * math.prod(shape)) if kind == "F16" else random_blocks(random, kind, *shape, 1.0)
    write_gguf(tmp_path / "x.gguf", {}, {"w": (kind, shape, raw)})
    with read_gguf(tmp_path / "x.gguf") as gguf, WeightsWriter(tmp_path / "w") as writer:
        tracemalloc.start()
        try:
            matrix = writer.matrix("m", read_matrix(gguf, "w", writer))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 2 * matrix.scales.nbytes + 12_000_000


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K"])
def test_rows_for_pairs_become_rows_for_halves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Turning pairs of the stored rows is turning halves of the reordered ones; rows beyond the rotated ones stay."""
    monkeypatch.setattr(weights, "_CHUNK_VALUES", 1)
    write(tmp_path / "x.gguf", {"a": kind})
    with read_gguf(tmp_path / "x.gguf") as gguf, WeightsWriter(tmp_path / "w") as writer:
        plain = writer.matrix("plain", read_matrix(gguf, "a", writer))
        turned = writer.matrix("turned", rotate_halves(read_matrix(gguf, "a", writer), 4, 8))
    before, after = (stored(tmp_path / "w", matrix).reshape(4, 10, 512) for matrix in (plain, turned))
    assert np.array_equal(after[:, :4], before[:, 0:8:2])
    assert np.array_equal(after[:, 4:8], before[:, 1:8:2])
    assert np.array_equal(after[:, 8:], before[:, 8:])


def test_a_matrix_that_cancels_out_does_not_divide_by_zero(tmp_path: Path) -> None:
    """d * scale * 3 = dmin * minimum makes every value 0, but not what is left of it after the rounding of both."""
    block = np.zeros(144, np.uint8)
    block[:4] = np.array([1023 / 1024, 1023 / 1024], np.float16).view(np.uint8)
    block[4:8], block[8:12] = 21 | 1 << 6, 63 | 3 << 6  # the last four blocks' upper bits above the first four's
    block[12:16] = 5 | 15 << 4
    block[16:] = 0x33  # codes of 3
    raw = np.tile(block, SHAPES["a"][0] * 2).tobytes()
    write_gguf(tmp_path / "x.gguf", {"general.architecture": "none"}, {"a": ("Q4_K", SHAPES["a"], raw)})
    with read_gguf(tmp_path / "x.gguf") as gguf, WeightsWriter(tmp_path / "w") as writer:
        assert not dequantise(np.frombuffer(raw, np.uint8), "Q4_K", SHAPES["a"]).any()
        matrix = writer.matrix("m", read_matrix(gguf, "a", writer))
    assert stored(tmp_path / "w", matrix).any()
    assert writer.fidelity == {"Q4_K": math.inf}


def test_what_cannot_be_stored_is_named(tmp_path: Path) -> None:
    infinite = np.full(SHAPES["b"][0] * 2 * 210, 0xFF, np.uint8).tobytes()
    tensors = {"b": ("Q6_K", SHAPES["b"], infinite), "c": ("Q8_K", SHAPES["c"], bytes(83 * 2 * 292))}
    write_gguf(tmp_path / "x.gguf", {"general.architecture": "none"}, tensors)
    with read_gguf(tmp_path / "x.gguf") as gguf, WeightsWriter(tmp_path / "w") as writer:
        with pytest.raises(ModelFormatError, match="tensor 'b' holds scales that are not finite"):
            writer.matrix("m", read_matrix(gguf, "b", writer))
        with pytest.raises(UnsupportedModelError, match="tensor 'c' has type 'Q8_K'"):
            read_matrix(gguf, "c", writer)
