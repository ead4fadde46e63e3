"""The ring with exact matrix products: BlockLinear and BlockEmbedding become stock float32 ops, all else stays ours.

BlockLinear rounds activations to int8 by design, which hides everything smaller. Without it, RingAttention, the norms and
the activation can be held to what float32 promises.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Container
from pathlib import Path

from onnx import helper

from edge_llm.export.graph_rewriter import GraphRewriter
from edge_llm.model.manifest import GRAPH_NAME, MANIFEST_NAME, FileSpec, ModelManifest


class _EveryName:
    def __contains__(self, name: object) -> bool:
        return True


def unchecked_graph(folder: Path, manifest: ModelManifest) -> Container[str]:
    """In place of `check_graph`: stock ops read everything."""
    return _EveryName()


def write_exact_ring(folder: Path, target: Path) -> Path:
    """Make `target` a copy of the model folder `folder` with exact products; gives it back. `check_graph` refuses it."""
    rewriter = GraphRewriter(folder)
    rewriter.rewrite()
    source = rewriter.source
    graph = helper.make_graph(
        rewriter.nodes, "exact", source.graph.input, source.graph.output, list(rewriter.initializers.values())
    )
    model = helper.make_model(graph, opset_imports=source.opset_import, ir_version=source.ir_version)
    shutil.copytree(folder, target)
    data = model.SerializeToString()
    (target / GRAPH_NAME).write_bytes(data)
    manifest = ModelManifest.read(target)
    files = {**manifest.files, GRAPH_NAME: FileSpec(len(data), hashlib.sha256(data).hexdigest())}
    (target / MANIFEST_NAME).write_text(dataclasses.replace(manifest, files=files).to_json(), "utf-8")
    return target
