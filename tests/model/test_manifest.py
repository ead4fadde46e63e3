"""The manifest survives a round trip, and refuses what later sizes could not rely on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from edge_llm.errors import ModelFormatError, UnsupportedModelError
from edge_llm.model.manifest import (
    GRAPH_NAME,
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    TOKENIZER_NAME,
    WEIGHTS_NAME,
    FileSpec,
    LayerSpec,
    ModelDimensions,
    ModelManifest,
    RopeTable,
    SourceSpec,
    TokenSpec,
)


def manifest(**changes: Any) -> ModelManifest:
    fields: dict[str, Any] = {
        "name": "tiny",
        "architecture": "llama",
        "layout": "ring",
        "dimensions": ModelDimensions(
            vocab=300, hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=16, context=512
        ),
        "layers": (LayerSpec(rope=0), LayerSpec(rope=0, window=128)),
        "rope": (RopeTable(base=1e4, rotary_dim=16, frequency_factors=(1.0,) * 8),),
        "tokens": TokenSpec(bos=1, eos=(2, 0), add_bos=False),
        "source": SourceSpec(file="tiny.gguf", sha256="0" * 64, size=10, format="gguf", fidelity={"Q4_1": "bit-exact"}),
        "files": {name: FileSpec(1, "a" * 64) for name in (GRAPH_NAME, WEIGHTS_NAME, TOKENIZER_NAME)},
        "sampling": {"temperature": 0.2},
    }
    return ModelManifest(**{**fields, **changes})


def test_round_trip() -> None:
    assert ModelManifest.from_json(manifest().to_json()) == manifest()


@pytest.mark.parametrize("heads", [1, 2])
def test_parameters_are_those_of_the_matrices(heads: int) -> None:
    """A second embedding matrix is one that the output does not share."""
    layer = 64 * (4 * 16 + 2 * 16 * 2) + 64 * 64 + 3 * 64 * 96
    types = {"Q4_1": 13, "Q8_0": 1 + heads}
    source = SourceSpec(file="tiny.gguf", sha256="0" * 64, size=10, format="gguf", tensor_types=types)
    assert manifest(source=source).parameters == 2 * layer + heads * 300 * 64


def changed(path: list[Any], value: Any) -> str:
    raw = json.loads(manifest().to_json())
    place = raw
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(raw)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["name"], "../etc"),
        (["name"], ""),
        (["name"], 3),
        (["dimensions", "vocab"], 0),
        (["dimensions", "vocab"], True),
        (["dimensions", "vocab"], 2**40),
        (["dimensions", "hidden"], 65),
        (["dimensions", "hidden"], "64"),
        (["dimensions", "heads"], 3),
        (["dimensions", "kv_heads"], 0),
        (["dimensions", "head_dim"], 12),
        (["dimensions", "context"], -1),
        (["layers"], []),
        (["layers", 0, "rope"], 1),
        (["layers", 1, "window"], 0),
        (["rope", 0, "rotary_dim"], 18),
        (["rope", 0, "rotary_dim"], 3),
        (["rope", 0, "base"], -1.0),
        (["rope", 0, "base"], "x"),
        (["rope", 0, "frequency_factors"], [1.0]),
        (["rope", 0, "frequency_factors"], [0.0] * 8),
        (["tokens", "eos"], [300]),
        (["tokens", "bos"], -1),
        (["kv_type"], "int2"),
        (["files"], {}),
        (["files", WEIGHTS_NAME, "size"], -1),
        (["files", WEIGHTS_NAME, "sha256"], "short"),
        (["files", "../weights.bin"], {"size": 1, "sha256": "a" * 64}),
        (["unknown"], 1),
        (["source"], None),
        (["source", "tensor_types"], []),
        (["source", "tensor_types"], {"Q4_1": "7"}),
        (["sampling"], None),
        (["sampling"], []),
        (["sampling"], {"top_k": "x"}),
        (["sampling"], {"top_k": float("inf")}),
        (["sampling"], {"temperature": float("nan")}),
        (["sampling"], {"top_k": True}),
        (["quality"], []),
        (["template_kwargs"], 5),
        (["license"], ["x"]),
        (["system_prompt"], 5),
        (["system_prompt"], "x" * 5000),
        (["rope", 0, "base"], 10**400),
    ],
)
def test_unsound_manifests_are_refused(path: list[Any], value: Any) -> None:
    with pytest.raises(ModelFormatError, match=r"manifest\.json"):
        ModelManifest.from_json(changed(path, value))


@pytest.mark.parametrize(("path", "value"), [(["format_version"], 1), (["layout"], "static")])
def test_other_versions_are_named(path: list[Any], value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=str(value)):
        ModelManifest.from_json(changed(path, value))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format_version": 2}', "[" * 100_000])
def test_text_that_is_no_manifest(text: str) -> None:
    with pytest.raises(ModelFormatError, match="sound manifest"):
        ModelManifest.from_json(text)


def test_reading_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match="no readable"):
        ModelManifest.read(tmp_path)
    os.mkfifo(tmp_path / MANIFEST_NAME)
    with pytest.raises(ModelFormatError, match="not a regular file"):
        ModelManifest.read(tmp_path)
    (tmp_path / MANIFEST_NAME).unlink()
    path = tmp_path / MANIFEST_NAME
    path.write_text(manifest().to_json())
    assert ModelManifest.read(tmp_path).name == "tiny"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ModelFormatError, match="UTF-8"):
        ModelManifest.read(tmp_path)
    path.write_bytes(b" " * (MAX_MANIFEST_BYTES + 1))
    with pytest.raises(ModelFormatError, match="larger"):
        ModelManifest.read(tmp_path)
