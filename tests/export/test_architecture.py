"""What the exporter knows of gemma3: layers, windows, rotations and scales reach the manifest and the graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from edge_llm.errors import EdgeLLMError, ModelFormatError, UnsupportedModelError
from edge_llm.export.reference_graph import write_reference
from edge_llm.model.graph_check import check_graph
from edge_llm.model.manifest import GRAPH_NAME, LayerSpec, ModelManifest, RopeTable, TokenSpec
from edge_llm.model.stock_session import StockSession
from tests.conftest import export
from tests.reference.gemma3 import Facts, logits_of, weights_of
from tools.tiny_gemma import WINDOW, write_tiny_gemma3


def exported(tmp_path: Path, **options: Any) -> Path:
    return export(write_tiny_gemma3(tmp_path / "tiny.gguf", **options), tmp_path / "exported")


def test_a_gemma3_explains_itself(tmp_path: Path) -> None:
    manifest = ModelManifest.read(exported(tmp_path))
    local = LayerSpec(rope=1, window=WINDOW)
    assert manifest.architecture == "gemma3"
    assert manifest.layers == (local, local, local, local, local, LayerSpec(rope=0), local)
    assert manifest.rope == (RopeTable(base=1e6, rotary_dim=32), RopeTable(base=1e4, rotary_dim=32))
    assert manifest.tokens == TokenSpec(bos=2, eos=(1,), add_bos=True, padding=0)
    assert not manifest.has_chat_template


def test_scales_and_norms_stand_in_the_graph(tmp_path: Path) -> None:
    folder = exported(tmp_path)
    check_graph(folder, ModelManifest.read(folder))
    nodes = onnx.load(str(folder / GRAPH_NAME), load_external_data=False).graph.node
    attributes = {node.name: {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute} for node in nodes}
    assert attributes["embedded"]["scale"] == 8
    assert attributes["layers.0.activation"]["kind"] == 1
    attention = [node for node in nodes if node.op_type == "RingAttention"]
    assert [attributes[node.name]["window"] < 1 << 20 for node in attention] == [True] * 5 + [False, True]
    assert all(len(node.input) == 6 for node in attention)
    assert attributes[attention[0].name]["scale"] == pytest.approx(32**-0.5)
    assert attributes[attention[0].name]["eps"] == pytest.approx(1e-5)
    assert sum(node.op_type == "RmsNorm" for node in nodes) == 1 + 2 * 7


@pytest.mark.parametrize(
    ("metadata", "layers"),
    [
        ({"gemma3.attention.sliding_window": None}, (LayerSpec(rope=0),) * 7),
        ({"gemma3.attention.sliding_window": 0}, (LayerSpec(rope=0),) * 7),
        ({"gemma3.attention.sliding_window_pattern": 1}, (LayerSpec(rope=0),) * 7),
        (
            {"gemma3.attention.sliding_window_pattern": 3, "gemma3.attention.sliding_window": 7},
            (LayerSpec(1, 7), LayerSpec(1, 7), LayerSpec(0)) * 2 + (LayerSpec(1, 7),),
        ),
    ],
)
def test_layers_follow_the_metadata(tmp_path: Path, metadata: dict[str, Any], layers: tuple[LayerSpec, ...]) -> None:
    manifest = ModelManifest.read(exported(tmp_path, metadata=metadata))
    assert manifest.layers == layers
    assert len(manifest.rope) == 1 + any(layer.window for layer in layers)


def test_long_contexts_stretch_the_global_rotation_only(tmp_path: Path) -> None:
    scaling = {
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": 8.0,
        "gemma3.rope.freq_base_swa": 5e4,
    }
    first, second = ModelManifest.read(exported(tmp_path, metadata=scaling)).rope
    assert (first.base, first.factor) == (1e6, 8)
    assert (second.base, second.factor) == (5e4, 1)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], type[EdgeLLMError], str]] = {
    "soft cap": ({}, {"gemma3.final_logit_softcapping": 30.0}, UnsupportedModelError, "soft cap"),
    "27B": ({"layers": 62}, {}, UnsupportedModelError, "27B"),
    "window": ({}, {"gemma3.attention.sliding_window": -1}, ModelFormatError, "sliding_window"),
    "period": ({}, {"gemma3.attention.sliding_window_pattern": 0}, ModelFormatError, "sliding_window_pattern"),
    "pattern": ({}, {"gemma3.attention.sliding_window_pattern": np.ones(7, np.bool_)}, ModelFormatError, "pattern"),
    "local base": ({}, {"gemma3.rope.freq_base_swa": 0.0}, ModelFormatError, "rope"),
    "gemma2": ({}, {"general.architecture": "gemma2"}, UnsupportedModelError, "gemma2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_run_is_named(tmp_path: Path, case: str) -> None:
    options, metadata, error, words = REFUSED[case]
    with pytest.raises(error, match=words):
        exported(tmp_path, metadata=metadata, **options)


def test_the_fp32_reference_is_the_network(tmp_path: Path) -> None:
    """So that `edge-llm eval --reference f32` measures against the truth; llama.cpp confirms it in test_tiny_gemma.py."""
    tokens = np.random.default_rng(2).integers(4, 400, 4 * WINDOW)
    source = write_tiny_gemma3(tmp_path / "tiny.gguf", matrix_type="Q8_0", head_type="Q8_0")
    folder = write_reference(export(source, tmp_path / "exported"), tmp_path, window=len(tokens))
    logits = StockSession(folder, threads=2).logits(tokens)
    assert np.abs(logits - logits_of(weights_of(source), tokens, Facts())).max() < 1e-4
