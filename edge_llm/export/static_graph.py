"""The static layout's graph: a model folder's ring graph rewritten into stock ONNX ops that any execution provider has.

Keys and values come in as inputs and only the new ones go out; rotary tables and masks are the host's. `rows` (S) is how
many tokens a run takes, `past.*` (C) how many rows of the cache it sees: both are symbolic, and pinned by whoever opens the
graph for a provider that wants that. docs/providers.md lists inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from edge_llm.errors import ModelFormatError
from edge_llm.export.device_rules import MICROSOFT, RULES, check_rules
from edge_llm.export.graph_rewriter import Rewrite
from edge_llm.export.static_matrices import StaticMatrices
from edge_llm.kernels.layout import UNBOUNDED, Activation
from edge_llm.model.static_folder import STATIC_GRAPH, STATIC_WEIGHTS, BlockMatrix, StaticForm

_OPSET = 21
_IR_VERSION = 10


def write_static(folder: Path, target: Path, form: StaticForm = StaticForm.BLOCKS) -> BlockMatrix:
    """Write graph and weights of the model in `folder` into the folder `target`; gives where its embeddings are.

    Raises `ModelFormatError` for a folder or graph that is none of ours, `UnsupportedModelError` for a model of which there
    is no graph that this form's target takes.
    """
    with (target / STATIC_WEIGHTS).open("wb") as weights:
        graph = _StaticGraph(folder, form, weights)
        model = graph.model()
    if form in RULES:
        check_rules(model, form)
    (target / STATIC_GRAPH).write_bytes(model.SerializeToString(deterministic=True))
    if graph.embedding is None:
        raise ModelFormatError("the graph has no embedding")
    return graph.embedding


class _StaticGraph(StaticMatrices):
    def __init__(self, folder: Path, form: StaticForm, weights: BinaryIO) -> None:
        super().__init__(folder, form, weights)
        self.embedding: BlockMatrix | None = None
        self._keys: list[str] = []
        self._values: list[str] = []
        self._masks: dict[int, str] = {}

    def model(self) -> Any:
        """The ModelProto."""
        from onnx import TensorProto, helper

        self.rewrite()
        size, info = self._manifest.dimensions, helper.make_tensor_value_info
        self._op("Concat", self._keys, out="new_k", axis=0)
        self._op("Concat", self._values, out="new_v", axis=0)
        new = [len(self._keys), size.kv_heads, "rows", size.head_dim]
        inputs = [
            info("embedded", TensorProto.FLOAT, ["rows", size.hidden]),
            *([] if self._all_logits else [info("logit_rows", TensorProto.INT32, ["logit_rows"])]),
            *(
                info(f"{name}.{table}", TensorProto.FLOAT, ["rows", size.head_dim])
                for table in range(len(self._manifest.rope))
                for name in ("cos", "sin")
            ),
            *(info(name, TensorProto.FLOAT, ["rows", f"total.{name}"]) for name in self._masks.values()),
            *(
                info(f"past_{part}.{layer}", TensorProto.FLOAT, [1, size.kv_heads, f"past.{layer}", size.head_dim])
                for layer in range(len(self._keys))
                for part in "kv"
            ),
        ]
        outputs = [
            info("logits", TensorProto.FLOAT, ["rows" if self._all_logits else "logit_rows", size.vocab]),
            info("hidden", TensorProto.FLOAT, ["rows", size.hidden]),
            info("new_k", TensorProto.FLOAT, new),
            info("new_v", TensorProto.FLOAT, new),
        ]
        graph = helper.make_graph(self.nodes, "static", inputs, outputs, list(self.initializers.values()))
        domains = {"": _OPSET, **({MICROSOFT: 1} if self._form is StaticForm.QNN else {})}
        opsets = [helper.make_opsetid(domain, version) for domain, version in domains.items()]
        return helper.make_model(graph, producer_name="edge_llm", opset_imports=opsets, ir_version=_IR_VERSION)

    def rewrites(self) -> Mapping[str, Rewrite]:
        return {
            "BlockEmbedding": self._embedding,
            "BlockLinear": self._linear,
            "RmsNorm": self._rms_norm,
            "AddRmsNorm": self._add_rms_norm,
            "GatedActivation": self._activation,
            "RingAttention": self._attention,
            "Gather": self.keep,
            "Concat": self.keep,
        }

    def keep(self, node: Any, attributes: dict[str, Any]) -> None:
        if node.domain or node.op_type not in ("Concat", "Gather"):
            raise ModelFormatError(f"the graph holds {node.op_type}, which has no static form")
        if node.op_type == "Gather" and self._all_logits:
            self._same[node.output[0]] = node.input[0]
            return
        super().keep(node, attributes)

    # --- matrices ---

    def _embedding(self, node: Any, attributes: dict[str, Any]) -> None:
        """The host takes rows from the ring layout's own weights: no table in the graph, and no ids."""
        codes, scales = (self._place(name) for name in node.input[1:3])
        names = ("outputs", "inputs", "bits", "block")
        self.embedding = BlockMatrix(
            **{name: attributes[name] for name in names},
            minimum=bool(attributes["minimum"]),
            codes=codes,
            scales=scales,
            scale=attributes["scale"],
        )
        assert node.output[0] == "embedded"

    def _place(self, name: str) -> tuple[int, int]:
        """Where an initialiser of the ring graph lies in its file: (offset, length)."""
        where = {entry.key: entry.value for entry in self._tensors[name].external_data}
        return int(where["offset"]), int(where["length"])

    # --- the rest of a block ---

    def _norm(self, x: str, gamma: str, eps: float, out: str | None = None) -> str:
        """x / sqrt(mean(x^2) + eps) * gamma (RMSNorm, arXiv:1910.07467) over the last axis."""
        mean = self._op("ReduceMean", [self._op("Mul", [x, x]), self._const([-1], np.int64)])
        root = self._op("Sqrt", [self._op("Add", [mean, self._const(eps)])])
        return self._op("Mul", [self._op("Div", [x, root]), self._initializer(gamma, self._stored(gamma))], out=out)

    def _rms_norm(self, node: Any, attributes: dict[str, Any]) -> None:
        self._norm(node.input[0], node.input[1], attributes["eps"], node.output[0])

    def _add_rms_norm(self, node: Any, attributes: dict[str, Any]) -> None:
        total = self._op("Add", [node.input[0], node.input[1]], out=node.output[1])
        self._norm(total, node.input[2], attributes["eps"], node.output[0])

    def _activation(self, node: Any, attributes: dict[str, Any]) -> None:
        width = attributes["width"]
        gate, up = self._split(node.input[0], [width, width], axis=1)
        if attributes["kind"] == Activation.SILU:
            active = self._op("Mul", [gate, self._op("Sigmoid", [gate])])
        else:
            active = self._op("Gelu", [gate], approximate="tanh")
        self._op("Mul", [active, up], out=node.output[0])

    # --- attention ---

    def _attention(self, node: Any, attributes: dict[str, Any]) -> None:
        heads, kv_heads, dim = attributes["heads"], attributes["kv_heads"], attributes["head_dim"]
        layer = len(self._keys)
        assert attributes["layer"] == layer
        by_head = self._op("Transpose", [self._reshape(node.input[0], [-1, heads + 2 * kv_heads, dim])], perm=[1, 0, 2])
        q, k, v = self._split(by_head, [heads, kv_heads, kv_heads], axis=0)
        if len(node.input) > 4:
            q, k = (self._norm(x, node.input[i], attributes["eps"]) for x, i in ((q, 4), (k, 5)))
        if attributes["rope_table"] >= 0:
            turned = self._rotate(self._op("Concat", [q, k], axis=0), attributes)
            q, k = self._split(turned, [heads, kv_heads], axis=0)
        q = self._op("Mul", [q, self._const(attributes["scale"])])
        q, k, v = (self._reshape(x, [1, kv_heads, -1, dim]) for x in (q, k, v))  # the queries of a group as rows
        self._keys.append(k)
        self._values.append(v)
        k, v = (self._op("Concat", [f"past_{part}.{layer}", x], axis=2) for part, x in (("k", k), ("v", v)))
        scores = self._op("MatMul", [q, self._op("Transpose", [k], perm=[0, 1, 3, 2])])
        if cap := attributes.get("softcap", 0.0):
            capped = self._op("Tanh", [self._op("Div", [scores, self._const(cap)])])
            scores = self._op("Mul", [capped, self._const(cap)])
        scores = self._op("Add", [self._reshape(scores, [1, heads, -1, 0]), self._mask(attributes["window"])])
        weights = self._reshape(self._op("Softmax", [scores], axis=-1), [1, kv_heads, -1, 0])
        mixed = self._reshape(self._op("MatMul", [weights, v]), [heads, -1, dim])
        self._reshape(self._op("Transpose", [mixed], perm=[1, 0, 2]), [-1, heads * dim], out=node.output[0])

    def _rotate(self, x: str, attributes: dict[str, Any]) -> str:
        """x * cos + swapped(x) * sin, whose tables are as wide as a head and hold the signs: the form that OpenVINO's
        compiled graphs keep right (docs/experiments.md)."""
        width, dim, table = attributes["rotary_dim"], attributes["head_dim"], attributes["rope_table"]
        sizes = [width // 2, width // 2, *([dim - width] if width < dim else [])]
        first, second, *rest = self._split(x, sizes, axis=2)
        swapped = self._op("Concat", [second, first, *rest], axis=2)
        parts = (self._op("Mul", [part, f"{name}.{table}"]) for part, name in ((x, "cos"), (swapped, "sin")))
        return self._op("Add", list(parts))

    def _mask(self, window: int) -> str:
        """The input with what rows of layers with this window attend to: 0, or a number that softmax makes 0."""
        return self._masks.setdefault(window, "mask" if window >= UNBOUNDED else f"mask.{window}")
