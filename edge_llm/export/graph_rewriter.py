"""Rewrites a model folder's ring graph node by node: matrices of block codes become float32 ones under stock ONNX ops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edge_llm.kernels.block_format import BlockFormat, group_count, unpack
from edge_llm.kernels.layout import GROUP_ROWS
from edge_llm.model.manifest import GRAPH_NAME, WEIGHTS_NAME, ModelManifest

Rewrite = Callable[[Any, dict[str, Any]], None]
"""called with a node and its attributes; adds nodes with the same outputs"""

_PART_GROUPS = 1 << 10
"""of interleaved rows, unpacked at a time: all of a large vocabulary would take gigabytes"""


class GraphRewriter:
    """BlockLinear and BlockEmbedding become Gemm and Gather over dequantised weights; every other node stays as it is.

    A subclass rewrites more: see `rewrites` and `keep`. After `rewrite`, `nodes` and `initializers` are those of the new graph.
    """

    def __init__(self, folder: Path) -> None:
        """Raises `ModelFormatError` for a manifest that is not one."""
        import onnx

        self._manifest = ModelManifest.read(folder)
        self.source: Any = onnx.load(str(folder / GRAPH_NAME), load_external_data=False)
        self.nodes: list[Any] = []
        self.initializers: dict[str, Any] = {}
        self._weights = np.memmap(folder / WEIGHTS_NAME, np.uint8, "r")
        self._tensors = {tensor.name: tensor for tensor in self.source.graph.initializer}
        self._count = 0

    def rewrite(self) -> None:
        """Go through the source graph once."""
        from onnx import helper

        rewrites = self.rewrites()
        for node in self.source.graph.node:
            attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
            rewrites.get(node.op_type, self.keep)(node, attributes)

    def rewrites(self) -> Mapping[str, Rewrite]:
        """What is done to the nodes of an op; `keep` is done to the others."""
        return {"BlockEmbedding": self._embedding, "BlockLinear": self._linear}

    def keep(self, node: Any, attributes: dict[str, Any]) -> None:
        """Take a node over, and its constants with it."""
        self.nodes.append(node)
        for name in node.input:
            if name in self._tensors:
                self._initializer(name, self._stored(name))

    # --- building blocks ---

    def _op(self, op_type: str, inputs: list[str], out: str | None = None, **attributes: Any) -> str:
        """Add a stock node; gives its output."""
        from onnx import helper

        self._count += 1
        out = out or f"_{self._count}"
        self.nodes.append(helper.make_node(op_type, inputs, [out], **attributes))
        return out

    def _const(self, values: Any, dtype: Any = np.float32) -> str:
        """Add a constant without a name of its own."""
        self._count += 1
        return self._initializer(f"_{self._count}", np.asarray(values, dtype))

    def _initializer(self, name: str, values: np.ndarray) -> str:
        """Add a constant unless it is there."""
        from onnx import numpy_helper

        if name not in self.initializers:
            self.initializers[name] = numpy_helper.from_array(np.ascontiguousarray(values), name)
        return name

    def _stored(self, name: str) -> np.ndarray:
        """The bytes of an initialiser of the ring graph, as its own type and shape."""
        from onnx import helper

        tensor = self._tensors[name]
        where = {entry.key: entry.value for entry in tensor.external_data}
        start, size = int(where["offset"]), int(where["length"])
        values = self._weights[start : start + size].view(helper.tensor_dtype_to_np_dtype(tensor.data_type))
        return np.asarray(values).reshape(tuple(tensor.dims))

    # --- matrices ---

    def _rows(self, node: Any, attributes: dict[str, Any]) -> str:
        """The constant with a matrix's rows: one, where embedding and output matrix are the same."""
        name = f"{node.input[1]}.rows"
        if name not in self.initializers:
            shape = attributes["outputs"], attributes["inputs"]
            self._add_matrix(name, shape, self._parts(node, attributes))
        return name

    def _parts(self, node: Any, attributes: dict[str, Any]) -> Iterator[np.ndarray]:
        """The rows of a matrix, some at a time: float32 [rows, inputs]."""
        form = BlockFormat(bits=attributes["bits"], block=attributes["block"], minimum=bool(attributes["minimum"]))
        outputs, inputs = attributes["outputs"], attributes["inputs"]
        codes, scales = (self._stored(name).reshape(group_count(outputs), -1) for name in node.input[1:3])
        for group in range(0, len(codes), _PART_GROUPS):
            part = slice(group, group + _PART_GROUPS)
            rows = min(GROUP_ROWS * _PART_GROUPS, outputs - GROUP_ROWS * group)
            yield unpack(codes[part], scales[part], form, rows, inputs)

    def _add_matrix(self, name: str, shape: tuple[int, int], parts: Iterable[np.ndarray]) -> None:
        """Add the constant `name`, float32 of that shape."""
        self._initializer(name, np.concatenate(list(parts)))

    def _embedding(self, node: Any, attributes: dict[str, Any]) -> None:
        rows = self._rows(node, attributes)
        if attributes["scale"] == 1:
            self._op("Gather", [rows, node.input[0]], out=node.output[0], axis=0)
        else:
            taken = self._op("Gather", [rows, node.input[0]], axis=0)
            self._op("Mul", [taken, self._const(attributes["scale"])], out=node.output[0])

    def _linear(self, node: Any, attributes: dict[str, Any]) -> None:
        inputs = [node.input[0], self._rows(node, attributes)]
        if len(node.input) > 3:
            inputs.append(self._initializer(node.input[3], self._stored(node.input[3])))
        self._op("Gemm", inputs, out=node.output[0], transB=1)
