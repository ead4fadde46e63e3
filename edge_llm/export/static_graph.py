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
from edge_llm.export.graph_rewriter import GraphRewriter, Rewrite
from edge_llm.kernels.block_format import BlockFormat, group_count, unpack_parts
from edge_llm.kernels.layout import UNBOUNDED, Activation
from edge_llm.model.static_folder import STATIC_GRAPH, STATIC_WEIGHTS, BlockMatrix, StaticForm

_OPSET = 21
_IR_VERSION = 10
_ALIGNMENT = 4096  # of a memory map


def write_static(folder: Path, target: Path, form: StaticForm = StaticForm.BLOCKS) -> BlockMatrix:
    """Write graph and weights of the model in `folder` into the folder `target`; gives where its embeddings are.

    Raises `ModelFormatError` for a folder or graph that is none of ours.
    """
    with (target / STATIC_WEIGHTS).open("wb") as weights:
        graph = _StaticGraph(folder, form, weights)
        model = graph.model()
    (target / STATIC_GRAPH).write_bytes(model.SerializeToString(deterministic=True))
    if graph.embedding is None:
        raise ModelFormatError("the graph has no embedding")
    return graph.embedding


class _StaticGraph(GraphRewriter):
    def __init__(self, folder: Path, form: StaticForm, weights: BinaryIO) -> None:
        super().__init__(folder)
        self._form, self._file = form, weights
        self.embedding: BlockMatrix | None = None
        self._keys: list[str] = []
        self._values: list[str] = []
        self._sums: dict[tuple[str, int], str] = {}
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
            info("logit_rows", TensorProto.INT32, ["logit_rows"]),
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
            info("logits", TensorProto.FLOAT, ["logit_rows", size.vocab]),
            info("hidden", TensorProto.FLOAT, ["rows", size.hidden]),
            info("new_k", TensorProto.FLOAT, new),
            info("new_v", TensorProto.FLOAT, new),
        ]
        graph = helper.make_graph(self.nodes, "static", inputs, outputs, list(self.initializers.values()))
        opset = helper.make_opsetid("", _OPSET)
        return helper.make_model(graph, producer_name="edge_llm", opset_imports=[opset], ir_version=_IR_VERSION)

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

    def _linear(self, node: Any, attributes: dict[str, Any]) -> None:
        x, out = node.input[0], node.output[0]
        terms = [self._op("MatMul", [x, self._dense(node, attributes)])] if self._form is StaticForm.F32 else None
        terms = terms or self._block_terms(node, attributes)
        if len(node.input) > 3:
            terms.append(self._initializer(node.input[3], self._stored(node.input[3])))
        for term in terms[1:-1]:
            terms[0] = self._op("Add", [terms[0], term])
        if len(terms) > 1:
            self._op("Add", [terms[0], terms[-1]], out=out)
        else:
            self.nodes[-1].output[0] = out

    def _dense(self, node: Any, attributes: dict[str, Any]) -> str:
        name = f"{node.input[1]}.dense"
        return self._stream(name, np.concatenate(list(self._parts(node, attributes))).T)

    def _block_terms(self, node: Any, attributes: dict[str, Any]) -> list[str]:
        """x @ W, exact to the blocks w = d * q + m: with c near the middle of the codes, d * (q - c) is what integer
        weights say, and m + d * c meets the sum of the block's inputs.

        Around the middle, so that a provider that rounds x to 8 bits multiplies its errors by small weights."""
        x, name = node.input[0], node.input[1]
        outputs, inputs, block = attributes["outputs"], attributes["inputs"], attributes["block"]
        form = BlockFormat(attributes["bits"], block, bool(attributes["minimum"]))
        codes, scales = (self._stored(stored).reshape(group_count(outputs), -1) for stored in node.input[1:3])
        q, d, m = unpack_parts(codes, scales, form, outputs, inputs)
        used = 8 if m is None else max(1, int(q.max()).bit_length())  # of the bits: some types have 2, 3 or 5
        centre = 1 << (used - 1)
        centred = (q.reshape(outputs, inputs).T.astype(np.int16) - centre).astype(np.int8)
        whole = self._op(
            "DequantizeLinear",
            [self._stream(f"{name}.codes", centred, bits=form.bits), self._stream(f"{name}.d", d.T)],
            axis=0,
            block_size=block,
        )
        product = self._op("MatMul", [x, whole])
        if m is None:
            return [product]
        rest = self._stream(f"{name}.m", (m + d * np.float32(centre)).T)
        return [self._op("MatMul", [self._block_sums(x, inputs, block), rest]), product]

    def _block_sums(self, x: str, inputs: int, block: int) -> str:
        """[rows, inputs / block]."""
        if (x, block) not in self._sums:
            blocks = self._op("Reshape", [x, self._const([-1, inputs // block, block], np.int64)])
            self._sums[x, block] = self._op("ReduceSum", [blocks, self._const([2], np.int64)], keepdims=0)
        return self._sums[x, block]

    def _stream(self, name: str, values: np.ndarray, bits: int = 0) -> str:
        """A constant in the file of weights; int8 values of `bits` 4 lie two to a byte."""
        from onnx import TensorProto, helper

        if name in self.initializers:
            return name
        kind = TensorProto.INT4 if bits == 4 else helper.np_dtype_to_tensor_dtype(values.dtype)
        tensor = TensorProto(name=name, dims=values.shape, data_type=kind)
        data = np.ascontiguousarray(values)
        if bits == 4:
            pairs = data.reshape(-1, 2)  # the first lies in the low half
            data = (pairs[:, 0] & 15 | pairs[:, 1] << 4).view(np.uint8)
        tensor.data_location = TensorProto.EXTERNAL
        self._file.write(bytes(-self._file.tell() % _ALIGNMENT))
        for key, value in (("location", STATIC_WEIGHTS), ("offset", self._file.tell()), ("length", data.nbytes)):
            tensor.external_data.add(key=key, value=str(value))
        self._file.write(data.data)
        self.initializers[name] = tensor
        return name

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

    def _split(self, x: str, sizes: list[int], axis: int) -> list[str]:
        from onnx import helper

        self._count += 1
        outputs = [f"_{self._count}.{part}" for part in range(len(sizes))]
        inputs = [x, self._const(sizes, np.int64)]
        self.nodes.append(helper.make_node("Split", inputs, outputs, axis=axis))
        return outputs

    def _reshape(self, x: str, shape: list[int], out: str | None = None) -> str:
        return self._op("Reshape", [x, self._const(shape, np.int64)], out=out)

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
