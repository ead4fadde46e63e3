"""The fp32 reference of a model folder: its own graph rewritten, op by op, into stock ONNX ops over dequantised weights.

Quality is measured against it (`edge-llm eval --reference f32`). It takes a whole window of tokens at once, keeps no
cache, and runs on ONNX Runtime's CPU provider as any exported model would.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from edge_llm.errors import ModelFormatError
from edge_llm.export.graph_rewriter import GraphRewriter, Rewrite
from edge_llm.kernels.layout import UNBOUNDED, Activation
from edge_llm.model.rope import rope_rows
from edge_llm.model.stock_session import BODY_NAME, HEAD_NAME

_OPSET = 21
_MASKED = -1e30
_WEIGHTS = "reference.bin"
_ALIGNMENT = 4096  # of a memory map


def write_reference(folder: Path, target: Path, *, window: int) -> Path:
    """Write the graphs that a StockSession runs into the folder `target`, which it gives back, with their weights.

    The first maps input_ids int64 [rows], at positions 0, 1, ... to hidden float32 [rows, hidden], for up to `window` rows;
    the second, the output matrix, maps such rows to logits float32 [rows, vocab], as many at a time as one has room for.
    """
    with (target / _WEIGHTS).open("wb") as weights:
        body, head = _Reference(folder, window, weights).models()
    for name, model in ((BODY_NAME, body), (HEAD_NAME, head)):
        (target / name).write_bytes(model.SerializeToString())
    return target


class _Reference(GraphRewriter):
    def __init__(self, folder: Path, window: int, weights: BinaryIO) -> None:
        super().__init__(folder)
        self._window, self._file = window, weights
        self._head_starts, self._hidden, self._wanted = 0, "", ""

    def models(self) -> tuple[Any, Any]:
        """Two ModelProtos: all up to the hidden rows, and the output matrix."""
        from onnx import TensorProto, helper

        self._rows_of_window = self._op("Shape", ["input_ids"])
        self.rewrite()
        info, size = helper.make_tensor_value_info, self._manifest.dimensions
        ids = info("input_ids", TensorProto.INT64, ["rows"])
        hidden, wanted = (info(name, TensorProto.FLOAT, ["rows", size.hidden]) for name in (self._hidden, self._wanted))
        logits = info("logits", TensorProto.FLOAT, ["rows", size.vocab])
        return (
            self._model(self.nodes[: self._head_starts], ids, hidden),
            self._model(self.nodes[self._head_starts :], wanted, logits),
        )

    def _model(self, nodes: list[Any], source: Any, result: Any) -> Any:
        from onnx import helper

        used = dict.fromkeys(name for node in nodes for name in node.input if name in self.initializers)
        graph = helper.make_graph(nodes, "reference", [source], [result], [self.initializers[name] for name in used])
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=10)

    def rewrites(self) -> Mapping[str, Rewrite]:
        return {
            **super().rewrites(),
            "RmsNorm": self._rms_norm,
            "AddRmsNorm": self._add_rms_norm,
            "GatedActivation": self._activation,
            "RingAttention": self._attention,
            "Gather": self._cut,
        }

    def keep(self, node: Any, attributes: dict[str, Any]) -> None:
        if node.domain or node.op_type != "Concat":
            raise ModelFormatError(f"the graph holds {node.op_type}, which has no reference form")
        super().keep(node, attributes)

    def _cut(self, node: Any, attributes: dict[str, Any]) -> None:
        """Where the ring graph takes the wanted rows, one graph ends and the other begins."""
        self._head_starts = len(self.nodes)
        self._hidden, self._wanted = node.input[0], node.output[0]

    def _add_matrix(self, name: str, shape: tuple[int, int], parts: Iterable[np.ndarray]) -> None:
        """Straight to the file: ONNX Runtime maps it, and the two graphs share what they both use."""
        from onnx import TensorProto

        self._file.write(bytes(-self._file.tell() % _ALIGNMENT))
        tensor = TensorProto(name=name, dims=shape, data_type=TensorProto.FLOAT)
        tensor.data_location = TensorProto.EXTERNAL
        place = {"location": _WEIGHTS, "offset": self._file.tell(), "length": 4 * shape[0] * shape[1]}
        for part in parts:
            self._file.write(part.data)
        for key, value in place.items():
            tensor.external_data.add(key=key, value=str(value))
        self.initializers[name] = tensor

    def _norm(self, x: str, gamma: str, attributes: dict[str, Any], out: str | None = None) -> str:
        """x / sqrt(mean(x^2) + eps) * gamma (RMSNorm, arXiv:1910.07467) over groups of the last axis."""
        grouped = self._op("Reshape", [x, self._const([0, -1, attributes["group"]], np.int64)])
        mean = self._op("ReduceMean", [self._op("Mul", [grouped, grouped]), self._const([2], np.int64)])
        root = self._op("Sqrt", [self._op("Add", [mean, self._const(attributes["eps"])])])
        scaled = self._op("Mul", [self._op("Div", [grouped, root]), self._initializer(gamma, self._stored(gamma))])
        return self._op("Reshape", [scaled, self._op("Shape", [x])], out=out)

    def _rms_norm(self, node: Any, attributes: dict[str, Any]) -> None:
        self._norm(node.input[0], node.input[1], attributes, node.output[0])

    def _add_rms_norm(self, node: Any, attributes: dict[str, Any]) -> None:
        total = self._op("Add", [node.input[0], node.input[1]], out=node.output[1])
        self._norm(total, node.input[2], attributes, node.output[0])

    def _activation(self, node: Any, attributes: dict[str, Any]) -> None:
        width = attributes["width"]
        gate = self._slice(node.input[0], 0, width, axis=1)
        up = self._slice(node.input[0], width, 2 * width, axis=1)
        if attributes["kind"] == Activation.SILU:
            active = self._op("Mul", [gate, self._op("Sigmoid", [gate])])
        else:
            active = self._op("Gelu", [gate], approximate="tanh")
        self._op("Mul", [active, up], out=node.output[0])

    def _slice(self, x: str, start: int, end: int, axis: int) -> str:
        return self._op("Slice", [x, *(self._const([value], np.int64) for value in (start, end, axis))])

    def _attention(self, node: Any, attributes: dict[str, Any]) -> None:
        heads, kv_heads, dim = attributes["heads"], attributes["kv_heads"], attributes["head_dim"]
        parts, start = [], 0
        for count in (heads, kv_heads, kv_heads):
            part = self._slice(node.input[0], start * dim, (start + count) * dim, axis=1)
            parts.append(self._op("Reshape", [part, self._const([-1, count, dim], np.int64)]))
            start += count
        q, k, v = parts
        for i, name in enumerate(("q", "k")):
            if len(node.input) > 4 + i:
                gamma = node.input[4 + i]
                normed = self._norm(q if name == "q" else k, gamma, {"group": dim, "eps": attributes.get("eps", 1e-6)})
                q, k = (normed, k) if name == "q" else (q, normed)
        if attributes["rope_table"] >= 0:
            q, k = (self._rotate(x, attributes) for x in (q, k))
        repeats = heads // kv_heads
        q = self._op("Transpose", [q], perm=[1, 0, 2])
        k, v = (self._repeat(self._op("Transpose", [x], perm=[1, 0, 2]), repeats) for x in (k, v))
        scores = self._op("MatMul", [q, self._op("Transpose", [k], perm=[0, 2, 1])])
        scores = self._op("Mul", [scores, self._const(attributes["scale"])])
        if attributes.get("softcap", 0.0):
            cap = self._const(attributes["softcap"])
            scores = self._op("Mul", [self._op("Tanh", [self._op("Div", [scores, cap])]), cap])
        scores = self._op("Add", [scores, self._mask(attributes["window"])])
        mixed = self._op("MatMul", [self._op("Softmax", [scores], axis=-1), v])
        mixed = self._op("Transpose", [mixed], perm=[1, 0, 2])
        self._op("Reshape", [mixed, self._const([-1, heads * dim], np.int64)], out=node.output[0])

    def _repeat(self, x: str, times: int) -> str:
        """Each kv head `times` times in a row: [kv_heads, rows, dim] -> [heads, rows, dim]."""
        kv_heads = self._manifest.dimensions.kv_heads
        order = np.repeat(np.arange(kv_heads), times)
        return self._op("Gather", [x, self._const(order, np.int64)], axis=0)

    def _rotate(self, x: str, attributes: dict[str, Any]) -> str:
        """Rotary embedding of the first rotary_dim dimensions, halves against halves."""
        width, dim = attributes["rotary_dim"], attributes["head_dim"]
        table = self._manifest.rope[attributes["rope_table"]]
        rows = np.empty((1, self._window, width), np.float32)
        rope_rows([table], np.arange(self._window), out=rows)
        half = width // 2
        cos, sin = (
            self._slice_rows(self._initializer(f"rope.{attributes['rope_table']}.{name}", values[:, None, :]))
            for name, values in (("cos", rows[0, :, :half]), ("sin", rows[0, :, half:]))
        )
        a, b = self._slice(x, 0, half, axis=2), self._slice(x, half, width, axis=2)
        first = self._op("Sub", [self._op("Mul", [a, cos]), self._op("Mul", [b, sin])])
        second = self._op("Add", [self._op("Mul", [b, cos]), self._op("Mul", [a, sin])])
        rest = [self._slice(x, width, dim, axis=2)] if width < dim else []
        return self._op("Concat", [first, second, *rest], axis=2)

    def _slice_rows(self, table: str) -> str:
        """The first `rows` rows of a table of the whole window."""
        return self._op("Slice", [table, self._const([0], np.int64), self._rows_of_window, self._const([0], np.int64)])

    def _mask(self, window: int) -> str:
        i = np.arange(self._window)
        visible = i[None, :] <= i[:, None]
        if window < UNBOUNDED:
            visible &= i[None, :] > i[:, None] - window
        name = self._initializer(f"mask.{window}", np.where(visible, 0, _MASKED).astype(np.float32))
        both = self._op("Concat", [self._rows_of_window, self._rows_of_window], axis=0)
        return self._op("Slice", [name, self._const([0, 0], np.int64), both, self._const([0, 1], np.int64)])
