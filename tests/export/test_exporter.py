"""Export: the weights stay what they were, and what cannot be run is named before anything is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from edge_llm.errors import EdgeLLMError, ModelFormatError, UnsupportedModelError
from edge_llm.export.exporter import export_gguf
from edge_llm.export.gguf import read_gguf
from edge_llm.model.graph_check import check_graph
from edge_llm.model.manifest import (
    GRAPH_NAME,
    MANIFEST_NAME,
    TEMPLATE_NAME,
    TOKENIZER_NAME,
    WEIGHTS_NAME,
    ModelManifest,
)
from tools.random_blocks import random_blocks
from tools.tiny_model import write_gguf, write_tiny_gguf


def export(tmp_path: Path, name: str = "out", **options: Any) -> tuple[Path, ModelManifest]:
    source = write_tiny_gguf(tmp_path / "tiny.gguf", **options)
    folder = tmp_path / name
    folder.mkdir()
    return folder, export_gguf(source, folder, name="tiny", source_sha256="0" * 64)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_quantised_weights_are_kept_bit_for_bit(tmp_path: Path, kind: str) -> None:
    _, manifest = export(tmp_path, matrix_type=kind, head_type="Q8_0")
    assert set(manifest.source.fidelity) == {kind, "Q8_0"}
    assert set(manifest.source.fidelity.values()) == {"bit-exact"}
    assert sum(manifest.source.tensor_types.values()) == 2 * 7 + 1


@pytest.mark.parametrize("kind", ["Q5_0", "Q5_1", "IQ4_NL"])
def test_five_bits_are_kept_bit_for_bit_in_eight(tmp_path: Path, kind: str) -> None:
    _, manifest = export(tmp_path, matrix_type=kind, head_type=kind)
    assert manifest.source.fidelity == {kind: "bit-exact"}


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_say_what_the_rounding_of_their_scales_lost(tmp_path: Path, kind: str) -> None:
    sizes = {"hidden": 256, "intermediate": 512, "head_dim": 64}
    _, manifest = export(tmp_path, matrix_type=kind, head_type=kind, **sizes)
    (text,) = manifest.source.fidelity.values()
    assert text.startswith("relative error ")
    assert 1e-5 < float(text.split()[-1]) < 1e-3


def test_matrices_over_one_input_are_joined_as_far_as_their_forms_allow(tmp_path: Path) -> None:
    """As a mixed file (Q4_K_M) has them: q and k in one type, v in another."""
    source = write_tiny_gguf(tmp_path / "tiny.gguf", matrix_type="Q8_0")
    kinds = {"attn_q": "Q4_0", "attn_k": "Q4_1", "attn_v": "Q5_0", "ffn_gate": "Q5_1", "ffn_up": "Q8_0"}
    random = np.random.Generator(np.random.PCG64(4))
    with read_gguf(source) as gguf:
        tensors = {}
        for name, tensor in gguf.tensors.items():
            kind = kinds.get(name.split(".")[-2], tensor.type)
            data = gguf.tensor_bytes(tensor).tobytes()
            if kind != tensor.type:
                data = random_blocks(random, kind, *tensor.shape, 0.1)
            tensors[name] = kind, tensor.shape, data
        write_gguf(tmp_path / "mixed.gguf", gguf.metadata, tensors)
    folder = tmp_path / "out"
    folder.mkdir()
    manifest = export_gguf(tmp_path / "mixed.gguf", folder, name="mixed", source_sha256="0" * 64)
    assert set(manifest.source.fidelity.values()) == {"bit-exact"}
    graph = onnx.load(str(folder / GRAPH_NAME), load_external_data=False).graph
    products = [node.name for node in graph.node if node.op_type == "BlockLinear" and "layers.0" in node.name]
    assert products == [f"layers.0.{part}" for part in ("qkv.0", "qkv.1", "output", "gate_up.0", "gate_up.1", "down")]
    sizes = {node.name: {a.name: a.i for a in node.attribute} for node in graph.node}
    assert sizes["layers.0.qkv.0"]["outputs"] == 64 + 32
    assert sizes["layers.0.qkv.1"]["outputs"] == 32
    check_graph(folder, manifest)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_float_weights_say_what_they_lost(tmp_path: Path, kind: str) -> None:
    _, manifest = export(tmp_path, matrix_type=kind, head_type=kind)
    (text,) = manifest.source.fidelity.values()
    assert text.startswith("relative error ")
    assert 0 < float(text.split()[-1]) < 0.02


def test_a_folder_explains_itself(tmp_path: Path) -> None:
    folder, manifest = export(tmp_path)
    assert ModelManifest.read(folder) == manifest
    names = {MANIFEST_NAME, GRAPH_NAME, WEIGHTS_NAME, TOKENIZER_NAME, TEMPLATE_NAME}
    assert {path.name for path in folder.iterdir()} == names
    assert all((folder / name).stat().st_size == spec.size for name, spec in manifest.files.items())
    assert manifest.dimensions.hidden == 64
    assert manifest.tokens.eos


def test_two_exports_are_equal(tmp_path: Path) -> None:
    first, _ = export(tmp_path, "first")
    second, _ = export(tmp_path, "second")
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes(), path.name


def test_a_tied_head_is_stored_once(tmp_path: Path) -> None:
    _, tied = export(tmp_path, "tied")
    _, untied = export(tmp_path, "untied", tied=False)
    assert tied.weight_bytes < untied.weight_bytes


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_norm_that_is_no_number_is_refused(tmp_path: Path, value: float) -> None:
    source = write_tiny_gguf(tmp_path / "tiny.gguf")
    with read_gguf(source) as gguf:
        offset = gguf.tensor("output_norm.weight").offset
    data = bytearray(source.read_bytes())
    data[offset : offset + 4] = np.float32(value).tobytes()
    source.write_bytes(data)
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelFormatError, match="output_norm"):
        export_gguf(source, tmp_path / "out", name="tiny", source_sha256="0" * 64)


REFUSED: dict[str, tuple[dict[str, Any], type[EdgeLLMError], str]] = {
    "architecture": ({"general.architecture": "mamba"}, UnsupportedModelError, "mamba"),
    "experts": ({"llama.expert_count": 8}, UnsupportedModelError, "experts"),
    "rope scaling": ({"llama.rope.scaling.type": "yarn"}, UnsupportedModelError, "yarn"),
    "split file": ({"split.count": 3}, UnsupportedModelError, "split"),
    "value size": ({"llama.attention.value_length": 32}, UnsupportedModelError, "values"),
    "head count": ({"llama.attention.head_count_kv": 3}, UnsupportedModelError, "heads"),
    "missing size": ({"llama.embedding_length": None}, ModelFormatError, "embedding_length"),
    "odd size": ({"llama.feed_forward_length": 100}, UnsupportedModelError, "multiple of 32"),
    "wrong size": ({"llama.feed_forward_length": 128}, ModelFormatError, "shape"),
    "too many layers": ({"llama.block_count": 3}, ModelFormatError, r"blk\.2"),
    "too few layers": ({"llama.block_count": 1}, UnsupportedModelError, r"blk\.1"),
    "rope base": ({"llama.rope.freq_base": -1.0}, ModelFormatError, "rope"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_run_is_named(tmp_path: Path, case: str) -> None:
    metadata, error, words = REFUSED[case]
    source = write_tiny_gguf(tmp_path / "tiny.gguf", metadata=metadata)
    folder = tmp_path / "out"
    folder.mkdir()
    with pytest.raises(error, match=words):
        export_gguf(source, folder, name="tiny", source_sha256="0" * 64)
    assert not list(folder.iterdir())


def test_the_manifest_says_how_the_template_writes_calls_and_reasoning(tmp_path: Path) -> None:
    template = "{{ messages[0].content }}{% if tools %}<tool_call>\n</tool_call>{% endif %}<think></think>"
    folder, manifest = export(tmp_path, chat_template=template)
    assert manifest.tool_calls == {
        "form": "json",
        "begin": "<tool_call>",
        "end": "</tool_call>",
        "arguments": "arguments",
    }
    assert manifest.reasoning == {"begin": "<think>", "end": "</think>"}
    assert ModelManifest.read(folder) == manifest
    _, plain = export(tmp_path, "plain")
    assert (plain.tool_calls, plain.reasoning) == ({}, {})


def test_a_manifest_from_before_has_neither(tmp_path: Path) -> None:
    folder, _ = export(tmp_path)
    old = json.loads((folder / MANIFEST_NAME).read_text())
    del old["tool_calls"], old["reasoning"]
    manifest = ModelManifest.from_json(json.dumps(old))
    assert (manifest.tool_calls, manifest.reasoning) == ({}, {})
    with pytest.raises(ModelFormatError, match="must hold texts"):
        ModelManifest.from_json(json.dumps(old | {"tool_calls": {"form": 1}}))
