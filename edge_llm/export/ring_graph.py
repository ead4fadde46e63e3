"""The ring layout's graph: a few standard nodes and our own ops, built from a ModelSpec for any architecture of the table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from edge_llm.export.architecture import ModelSpec
from edge_llm.export.weights import Constant, PackedMatrix, WeightsWriter
from edge_llm.kernels.layout import UNBOUNDED
from edge_llm.model.custom_ops import DOMAIN
from edge_llm.model.manifest import WEIGHTS_NAME

_OPSET = 21
_IR_VERSION = 10


class RingGraph:
    """Collects nodes; names in the graph are stable, so that two exports of one file are equal."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.nodes: list[Any] = []

    def op(self, op_type: str, inputs: Sequence[str], outputs: Sequence[str], /, **attributes: Any) -> str:
        """Add one of our own ops; gives its first output."""
        return self._add(DOMAIN, op_type, inputs, outputs, attributes)

    def node(self, op_type: str, inputs: Sequence[str], outputs: Sequence[str], /, **attributes: Any) -> str:
        """Add a standard node; gives its first output."""
        return self._add("", op_type, inputs, outputs, attributes)

    def _add(
        self, domain: str, op_type: str, inputs: Sequence[str], outputs: Sequence[str], attributes: dict[str, Any]
    ) -> str:
        from onnx import helper

        node = helper.make_node(op_type, list(inputs), list(outputs), name=outputs[0], domain=domain)
        node.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
        self.nodes.append(node)
        return outputs[0]

    # --- the ops with their attributes ---

    def embedding(self, ids: str, matrix: PackedMatrix, out: str, scale: float = 1.0) -> str:
        return self.op(
            "BlockEmbedding",
            [ids, matrix.codes.name, matrix.scales.name],
            [out],
            scale=scale,
            **_matrix_attributes(matrix),
        )

    def linear(self, x: str, matrix: PackedMatrix, out: str) -> str:
        return self.op("BlockLinear", [x, matrix.codes.name, matrix.scales.name], [out], **_matrix_attributes(matrix))

    def fused_linear(self, x: str, parts: Sequence[PackedMatrix], out: str) -> str:
        """One product, or several side by side where matrices could not be stored as one (their types differ)."""
        if len(parts) == 1:
            return self.linear(x, parts[0], out)
        return self.node("Concat", [self.linear(x, part, f"{out}.{i}") for i, part in enumerate(parts)], [out], axis=1)

    def add_norm(self, residual: str, delta: str, gamma: Constant, out: str) -> tuple[str, str]:
        """(normed, sum)."""
        attributes = {
            "eps": self.spec.norm_eps,
            "width": self.spec.dimensions.hidden,
            "group": self.spec.dimensions.hidden,
        }
        normed = self.op("AddRmsNorm", [residual, delta, gamma.name], [out, f"{out}.sum"], **attributes)
        return normed, f"{out}.sum"

    def norm(self, x: str, gamma: Constant, out: str) -> str:
        width = self.spec.dimensions.hidden
        return self.op("RmsNorm", [x, gamma.name], [out], eps=self.spec.norm_eps, width=width, group=width)

    def attention(self, qkv: str, layer: int, out: str) -> str:
        size, spec = self.spec.dimensions, self.spec.layers[layer]
        attributes = {
            "layer": layer,
            "heads": size.heads,
            "kv_heads": size.kv_heads,
            "head_dim": size.head_dim,
            "rotary_dim": self.spec.rope[0].rotary_dim if self.spec.rope else 0,
            "rope_tables": len(self.spec.rope),
            "rope_table": -1 if spec.rope is None else spec.rope,
            "window": spec.window or UNBOUNDED,
            "scale": float(size.head_dim) ** -0.5,
        }
        return self.op("RingAttention", [qkv, "segments", "rope", "kv"], [out], **attributes)

    def activation(self, gate_up: str, out: str) -> str:
        kind = int(self.spec.architecture.activation)
        return self.op("GatedActivation", [gate_up], [out], width=self.spec.dimensions.intermediate, kind=kind)

    def model(self, weights: WeightsWriter) -> bytes:
        """The serialised ModelProto over the constants in `weights`."""
        from onnx import TensorProto, helper

        size = self.spec.dimensions
        info = helper.make_tensor_value_info
        inputs = [
            info("input_ids", TensorProto.INT64, ["rows"]),
            info("segments", TensorProto.INT32, ["segments", 4]),
            info(
                "rope",
                TensorProto.FLOAT,
                [2 * len(self.spec.rope), "rows", self.spec.rope[0].rotary_dim if self.spec.rope else 0],
            ),
            info("logit_rows", TensorProto.INT64, ["logit_rows"]),
            info("kv", TensorProto.INT64, []),
        ]
        outputs = [
            info("logits", TensorProto.FLOAT, ["logit_rows", size.vocab]),
            info("hidden", TensorProto.FLOAT, ["rows", size.hidden]),
        ]
        graph = helper.make_graph(
            self.nodes, "ring", inputs, outputs, [_external(constant) for constant in weights.constants]
        )
        model = helper.make_model(
            graph,
            producer_name="edge_llm",
            opset_imports=[helper.make_opsetid("", _OPSET), helper.make_opsetid(DOMAIN, 1)],
            ir_version=_IR_VERSION,
        )
        return bytes(model.SerializeToString(deterministic=True))


def _matrix_attributes(matrix: PackedMatrix) -> dict[str, int]:
    form = matrix.form
    return {
        "inputs": matrix.inputs,
        "outputs": matrix.outputs,
        "bits": form.bits,
        "block": form.block,
        "minimum": int(form.minimum),
    }


def _external(constant: Constant) -> Any:
    from onnx import TensorProto, helper

    tensor = TensorProto(
        name=constant.name, dims=constant.shape, data_type=helper.np_dtype_to_tensor_dtype(np.dtype(constant.dtype))
    )
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", WEIGHTS_NAME), ("offset", str(constant.offset)), ("length", str(constant.nbytes))):
        tensor.external_data.add(key=key, value=value)
    return tensor
