"""An op is not made from attributes or weights whose sizes do not belong together."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest

from edge_llm.errors import EdgeLLMError
from edge_llm.kernels.warmup import KernelLibrary
from edge_llm.model.manifest import GRAPH_NAME, MANIFEST_NAME, FileSpec, ModelManifest
from edge_llm.model.step import Segment, Step
from tests.model.test_session import opened

CHANGES = [
    (op, name, value)
    for op, names in {
        "BlockLinear": ("inputs", "outputs", "bits", "block", "minimum"),
        "BlockEmbedding": ("inputs", "outputs", "bits", "block", "minimum"),
        "RmsNorm": ("width", "group"),
        "AddRmsNorm": ("width", "group"),
        "GatedActivation": ("width", "kind"),
        "RingAttention": (
            "layer",
            "heads",
            "kv_heads",
            "head_dim",
            "rotary_dim",
            "rope_tables",
            "rope_table",
            "window",
        ),
    }.items()
    for name in names
    for value in ("+1", "-1", "x2", "0", str(1 << 31), str((1 << 63) - 1), "-9223372036854775808")
]

# Another table, another activation, a row of padding that is stored anyway: wrong perhaps, never unsafe.
HARMLESS = {
    ("RingAttention", "rope_table", "-1"),
    ("GatedActivation", "kind", "+1"),
    ("BlockEmbedding", "outputs", "+1"),
    ("BlockEmbedding", "outputs", "-1"),
}


def altered(old: int, value: str) -> int:
    return {"+1": old + 1, "-1": old - 1, "x2": old * 2}.get(value, 0) if value in ("+1", "-1", "x2") else int(value)


@pytest.mark.parametrize(("op", "name", "value"), CHANGES)
def test_altered_attributes(
    tiny_folder: Path, tmp_path: Path, kernels: KernelLibrary, op: str, name: str, value: str
) -> None:
    """The session refuses to load, or refuses every step: memory is never read by a wrong size."""
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "model"))
    model: Any = onnx.load(str(folder / GRAPH_NAME), load_external_data=False)
    node = next(node for node in model.graph.node if node.op_type == op)
    attribute = next(a for a in node.attribute if a.name == name)
    new = altered(attribute.i, value)
    if new == attribute.i:
        pytest.skip("no change")
    attribute.i = max(min(new, (1 << 63) - 1), -(1 << 63))
    data = model.SerializeToString()
    (folder / GRAPH_NAME).write_bytes(data)
    manifest = ModelManifest.read(folder)
    files = {**manifest.files, GRAPH_NAME: FileSpec(len(data), hashlib.sha256(data).hexdigest())}
    (folder / MANIFEST_NAME).write_text(dataclasses.replace(manifest, files=files).to_json())
    if (op, name, value) in HARMLESS:
        with opened(folder, kernels) as (session, _):
            assert session.vocab == manifest.dimensions.vocab
        return
    with pytest.raises(EdgeLLMError), opened(folder, kernels) as (session, _):
        session.forward(Step((Segment(0, 0, [5, 6, 7], 1),)))
