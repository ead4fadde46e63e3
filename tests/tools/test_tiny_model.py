"""The tiny model: the same bytes for a seed, sound for every reader, and the network that llama.cpp sees in it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from edge_llm.export.gguf import read_gguf
from edge_llm.export.gguf_tokenizer import export_tokenizer
from edge_llm.export.gguf_types import dequantise
from tools.random_blocks import random_blocks
from tools.tiny_model import SMALLEST_VOCAB, encode, write_tiny_gguf

GOLDEN = Path(__file__).parent.parent / "golden" / "tiny_logits.json"


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_same_seed_gives_the_same_file(tmp_path: Path) -> None:
    files = [write_tiny_gguf(tmp_path / f"{i}.gguf", seed=seed) for i, seed in enumerate((0, 0, 1))]
    assert digest(files[0]) == digest(files[1]) != digest(files[2])


@pytest.mark.parametrize("matrix_type", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_kind_is_read_alike_by_us_and_the_gguf_package(tmp_path: Path, matrix_type: str, tied: bool) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", matrix_type=matrix_type, head_type="F16", tied=tied)
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    with read_gguf(path) as file:
        assert [*file.tensors] == [*theirs]
        assert ("output.weight" in file.tensors) is not tied
        assert file.tensor("blk.1.ffn_down.weight").shape == (64, 96)
        assert file.tensor("blk.1.ffn_down.weight").type == matrix_type
        assert file.tensor("token_embd.weight").type == "F16"
        for name, tensor in file.tensors.items():
            ours = dequantise(file.tensor_bytes(tensor), tensor.type, tensor.shape, name)
            assert np.array_equal(ours, dequantize(theirs[name].data, theirs[name].tensor_type))


@pytest.mark.parametrize("kind", ["Q5_0", "Q5_1", "IQ4_NL", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_types_without_an_encoder_are_random_with_the_spread_that_was_asked_for(kind: str) -> None:
    random = np.random.Generator(np.random.PCG64(6))
    raw = np.frombuffer(random_blocks(random, kind, 40, 512, 0.25), np.uint8)
    values = dequantise(raw, kind, (40, 512), "w")
    assert 0.24 < values.std() < 0.26
    assert abs(values.mean()) < 0.02
    assert len(np.unique(raw)) == 256


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "BF16"])
def test_encoders_lose_no_more_than_half_a_step(kind: str) -> None:
    values = np.random.Generator(np.random.PCG64(5)).standard_normal((8, 64)).astype(np.float32)
    stored = dequantise(np.frombuffer(encode(values, kind), np.uint8), kind, values.shape, "w")
    blocks = values.reshape(-1, 32)
    steps = {"Q4_0": 7.0, "Q4_1": 7.5, "Q8_0": 127.0, "BF16": 128.0}
    allowed = np.abs(blocks).max(axis=1, keepdims=True) / steps[kind] * 0.51 + 0.002
    assert (np.abs(stored.reshape(blocks.shape) - blocks) <= allowed).all()


def test_sizes_and_metadata_are_the_callers(tmp_path: Path) -> None:
    path = write_tiny_gguf(
        tmp_path / "tiny.gguf",
        layers=3,
        hidden=96,
        heads=6,
        kv_heads=3,
        head_dim=32,
        intermediate=160,
        vocab=300,
        chat_template=None,
        metadata={"llama.block_count": 3, "llama.vocab_size": None, "tokenizer.ggml.pre": "gpt-2"},
    )
    with read_gguf(path) as file:
        assert file.tensor("blk.2.attn_q.weight").shape == (192, 96)
        assert file.tensor("blk.2.attn_k.weight").shape == (96, 96)
        assert file.tensor("token_embd.weight").shape == (300, 96)
        assert "llama.vocab_size" not in file.metadata
        assert "tokenizer.chat_template" not in file.metadata
        assert file.text("tokenizer.ggml.pre") == "gpt-2"


@pytest.mark.parametrize("vocab", [SMALLEST_VOCAB, 331, 2000])
def test_any_vocabulary_size_makes_a_tokenizer(tmp_path: Path, vocab: int) -> None:
    with read_gguf(write_tiny_gguf(tmp_path / "tiny.gguf", vocab=vocab)) as file:
        assert export_tokenizer(file).vocab == vocab


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_tensors_are_those_that_the_gguf_package_lists(tmp_path: Path, architecture: str) -> None:
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    listed = {gguf.TENSOR_NAMES[tensor].format(bid=1) for tensor in gguf.MODEL_TENSORS[kind]}
    with read_gguf(write_tiny_gguf(tmp_path / "tiny.gguf", architecture=architecture)) as file:
        names = {name.removesuffix(".weight") for name in file.tensors if not name.startswith("blk.0.")}
    assert names <= listed
    if architecture == "gemma3":
        assert listed - names <= {"output"}  # the head is tied


def test_impossible_sizes_are_refused(tmp_path: Path) -> None:
    for wrong in ({"vocab": SMALLEST_VOCAB - 1}, {"hidden": 48}, {"intermediate": 40}, {"head_dim": 12}):
        with pytest.raises(ValueError, match=r"vocab|blocks"):
            write_tiny_gguf(tmp_path / "tiny.gguf", **wrong)
    with pytest.raises(ValueError, match="blocks of 256"):
        write_tiny_gguf(tmp_path / "tiny.gguf", matrix_type="Q4_K")


def llama_logits(weights: dict[str, np.ndarray], tokens: list[int]) -> np.ndarray:
    """A plain float64 llama with the tiny model's default sizes; pairs of neighbouring rows of q and k rotate."""
    heads, kv_heads, size = 4, 2, 16
    angles = np.arange(len(tokens))[:, None] * 10000.0 ** (-np.arange(0, size, 2) / size)
    turn = np.exp(1j * angles)[:, None, :]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + 1e-5) * weights[f"{name}.weight"]

    def rotate(x: np.ndarray, count: int) -> np.ndarray:
        pairs = x.reshape(len(tokens), count, size // 2, 2)
        turned = (pairs[..., 0] + 1j * pairs[..., 1]) * turn
        return np.stack([turned.real, turned.imag], axis=-1).reshape(len(tokens), count, size)

    h = weights["token_embd.weight"][tokens]
    for layer in range(2):
        w = {name.removeprefix(f"blk.{layer}.").removesuffix(".weight"): value for name, value in weights.items()}
        x = norm(h, f"blk.{layer}.attn_norm")
        q = rotate(x @ w["attn_q"].T, heads)
        k = np.repeat(rotate(x @ w["attn_k"].T, kv_heads), heads // kv_heads, axis=1)
        v = np.repeat((x @ w["attn_v"].T).reshape(len(tokens), kv_heads, size), heads // kv_heads, axis=1)
        scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(size) + np.triu(np.full((len(tokens),) * 2, -1e30), 1)
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        attended = np.einsum("hij,jhd->ihd", p / p.sum(axis=-1, keepdims=True), v).reshape(len(tokens), -1)
        h = h + attended @ w["attn_output"].T
        x = norm(h, f"blk.{layer}.ffn_norm")
        gate = x @ w["ffn_gate"].T
        h = h + (gate / (1 + np.exp(-gate)) * (x @ w["ffn_up"].T)) @ w["ffn_down"].T
    return norm(h, "output_norm") @ weights["token_embd.weight"].T


def test_llama_cpp_sees_the_network_that_is_described(tmp_path: Path) -> None:
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    with read_gguf(write_tiny_gguf(tmp_path / "tiny.gguf", matrix_type="F32", head_type="F32")) as file:
        weights = {
            name: dequantise(file.tensor_bytes(tensor), tensor.type, tensor.shape, name).astype(np.float64)
            for name, tensor in file.tensors.items()
        }
    logits = llama_logits(weights, golden["tokens"])[golden["rows"]]
    assert np.abs(logits - np.array(golden["logits"])).max() < 2e-4
    assert 1.5 < logits.std() < 3
