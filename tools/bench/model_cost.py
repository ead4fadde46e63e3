"""ModelCost: the bytes that a step must read and the operations that it must do, whoever computes it from this model's files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from edge_llm.config import load_config
from edge_llm.engine.assembly import cache_geometry
from edge_llm.kernels.block_format import BlockFormat
from edge_llm.kernels.layout import KvType
from edge_llm.model.manifest import GRAPH_NAME, ModelManifest


@dataclass(frozen=True)
class Layer:
    """`row_bytes` of keys and values that a token leaves in the layer, of which at most `window` rows are read (None: all).

    `row_operations` are those of one row of attention with one row of keys and values.
    """

    row_bytes: int
    row_operations: int
    window: int | None

    def rows(self, position: int) -> int:
        """Rows that the token at `position` attends to, itself included."""
        return position + 1 if self.window is None else min(position + 1, self.window)


@dataclass(frozen=True)
class ModelCost:
    """Operations count a product and a sum as two. The embedding, norms and activations are left out: they are small."""

    weight_bytes: int
    """codes and scales of every matrix"""
    row_operations: int
    """of the matrices for one row, the output matrix apart"""
    logit_operations: int
    """of the output matrix for one row"""
    layers: tuple[Layer, ...]

    @classmethod
    def of_folder(cls, folder: Path) -> Self:
        """The cost of a model folder, with keys and values as the user's config keeps them."""
        manifest = ModelManifest.read(folder)
        kv_type = KvType[(load_config().kv_type or manifest.kv_type).upper()]
        size, geometry = manifest.dimensions, cache_geometry(manifest)
        row_bytes = geometry.row_bytes(kv_type) // len(geometry.layers)
        layers = tuple(Layer(row_bytes, 4 * size.heads * size.head_dim, layer.window) for layer in manifest.layers)
        weight_bytes = row_operations = logit_operations = 0
        for outputs, inputs, form in _matrices(folder / GRAPH_NAME):
            weight_bytes += form.code_bytes(outputs, inputs) + form.scale_bytes(outputs, inputs)
            if outputs == size.vocab:
                logit_operations += 2 * outputs * inputs
            else:
                row_operations += 2 * outputs * inputs
        return cls(weight_bytes, row_operations, logit_operations, layers)

    def step_bytes(self, position: int, sequences: int = 1) -> int:
        """Read by one decode step of `sequences` conversations, each with its next token at `position`."""
        kept = sum(layer.rows(position) * layer.row_bytes for layer in self.layers)
        return self.weight_bytes + sequences * kept

    def operations(self, depth: int, tokens: int, logits: int = 1) -> int:
        """Of `tokens` tokens of one conversation after `depth` others, the logits of `logits` of them wanted."""
        attention = sum(
            layer.row_operations * sum(layer.rows(position) for position in range(depth, depth + tokens))
            for layer in self.layers
        )
        return tokens * self.row_operations + logits * self.logit_operations + attention


def _matrices(graph: Path) -> list[tuple[int, int, BlockFormat]]:
    """Outputs, inputs and format of every matrix product of a graph."""
    import onnx

    model = onnx.load(graph, load_external_data=False)
    attributes = [
        {attribute.name: attribute.i for attribute in node.attribute}
        for node in model.graph.node
        if node.op_type == "BlockLinear"
    ]
    return [(a["outputs"], a["inputs"], BlockFormat(a["bits"], a["block"], bool(a["minimum"]))) for a in attributes]
