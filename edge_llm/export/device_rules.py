"""What compilers for NPUs take, as tables, and the check of a static graph against them.

The tables are what is public: docs/providers.md names the pages. A graph that keeps the rules may still be refused by a
compiler; one that breaks them would be, or would be computed in part by the CPU.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from edge_llm.errors import UnsupportedModelError
from edge_llm.model.providers import fixed_sizes
from edge_llm.model.static_folder import StaticForm

MICROSOFT = "com.microsoft"
"""the domain of MatMulNBits"""
_MOST_AXES = 5
_MOST_TOLD = 3
_ROWS = 64
"""any size will do"""


@dataclass(frozen=True, slots=True)
class OpRule:
    """How an op may be used: axes of its first input, inputs that must be constants, values of its attributes."""

    axes: Collection[int] = range(1, _MOST_AXES + 1)
    constants: tuple[int, ...] = ()
    attributes: Mapping[str, Collection[Any]] = field(default_factory=dict)
    domain: str = ""


_FREE = OpRule()
_COMMON = {
    **dict.fromkeys(
        ("Add", "Concat", "Div", "MatMul", "Mul", "Sigmoid", "Softmax", "Sqrt", "Tanh", "Transpose"), _FREE
    ),
    "Gelu": OpRule(attributes={"approximate": (b"tanh", b"none")}),
    "ReduceMean": OpRule(constants=(1,)),
    "ReduceSum": OpRule(constants=(1,)),
    "Reshape": OpRule(constants=(1,)),
    "Split": OpRule(constants=(1,)),
}
RULES: Mapping[StaticForm, Mapping[str, OpRule]] = {
    StaticForm.QNN: {
        **_COMMON,
        "MatMulNBits": OpRule(
            axes=(3,),
            constants=(1, 2),
            attributes={"bits": (2, 4, 8), "block_size": range(16, 1 << 16, 16)},
            domain=MICROSOFT,
        ),
    },
    StaticForm.COREML: _COMMON,
}
"""the ops that each of these forms may hold"""


def check_rules(model: Any, form: StaticForm) -> None:
    """Raises `UnsupportedModelError` unless a ModelProto of this form is what its target takes, whatever sizes are fixed."""
    held = {dim: _ROWS for dim in _open_sizes(model) if dim != "rows"}
    faults = list(violations(model, RULES[form], fixed_sizes(_ROWS, held)))
    if faults:
        more = f" (and {len(faults) - _MOST_TOLD} more)" if len(faults) > _MOST_TOLD else ""
        raise UnsupportedModelError(f"no graph for {form.value}: {'; '.join(faults[:_MOST_TOLD])}{more}")


def violations(model: Any, rules: Mapping[str, OpRule], sizes: Mapping[str, int]) -> Iterator[str]:
    """What of a ModelProto breaks the rules, in words: every node's op, domain, attributes, constants, types and shapes."""
    from onnx import TensorProto, helper

    shapes, types = _inferred(pinned(model, sizes))
    constants = {tensor.name for tensor in model.graph.initializer}
    for node in model.graph.node:
        name, rule = node.name or node.output[0], rules.get(node.op_type)
        if rule is None or rule.domain != node.domain:
            yield f"{name} is a {node.op_type}"
            continue
        for index in rule.constants:
            if index >= len(node.input) or node.input[index] not in constants:
                yield f"input {index} of {name} ({node.op_type}) is no constant"
        given = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        for attribute, allowed in rule.attributes.items():
            if attribute in given and given[attribute] not in allowed:
                yield f"{name} ({node.op_type}) has {attribute} {given[attribute]}"
        for value in [node.input[0], *node.output]:
            shape = shapes.get(value)
            if shape is None or not all(shape):
                yield f"{value} has no fixed shape"
            elif len(shape) > _MOST_AXES:
                yield f"{value} has {len(shape)} axes"
            if types.get(value) != TensorProto.FLOAT:
                yield f"{value} is not of float32"
        axes = len(shapes.get(node.input[0]) or (1,))
        if axes not in rule.axes:
            yield f"{name} ({node.op_type}) has an input of {axes} axes"
        if node.op_type == "MatMulNBits" and given["K"] % given["block_size"]:
            yield f"{name} has {given['K']} inputs in blocks of {given['block_size']}"


def pinned(model: Any, sizes: Mapping[str, int]) -> Any:
    """A copy of a ModelProto with these sizes in place of their names. Raises `UnsupportedModelError` if one stays open."""
    from onnx import ModelProto

    copy = ModelProto()
    copy.CopyFrom(model)
    for name, dims in _open_sizes(copy).items():
        if name not in sizes:
            raise UnsupportedModelError(f"the size {name} is not fixed")
        for dim in dims:
            dim.dim_value = sizes[name]
    return copy


def _open_sizes(model: Any) -> dict[str, list[Any]]:
    """The sizes of inputs and outputs that have names, and where they stand."""
    found: dict[str, list[Any]] = {}
    for value in [*model.graph.input, *model.graph.output]:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                found.setdefault(dim.dim_param, []).append(dim)
    return found


def _inferred(model: Any) -> tuple[dict[str, tuple[int, ...] | None], dict[str, int]]:
    """Shapes (0: unknown) and types of all values of a ModelProto that may be changed."""
    from onnx import TensorProto, helper, shape_inference

    for node in model.graph.node:
        if node.op_type == "MatMulNBits":  # none of ONNX's own ops: as if it were a MatMul with a matrix that is given
            size = {attribute.name: attribute.i for attribute in node.attribute}
            matrix = helper.make_tensor_value_info(
                f"{node.output[0]}.matrix", TensorProto.FLOAT, [size["K"], size["N"]]
            )
            model.graph.input.append(matrix)
            node.CopyFrom(helper.make_node("MatMul", [node.input[0], matrix.name], node.output))
    graph = shape_inference.infer_shapes(model, data_prop=True).graph
    shapes: dict[str, tuple[int, ...] | None] = {
        tensor.name: tuple(tensor.dims) or (1,) for tensor in graph.initializer
    }
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    for value in [*graph.input, *graph.value_info, *graph.output]:
        kind = value.type.tensor_type
        types[value.name] = kind.elem_type
        shapes[value.name] = tuple(dim.dim_value for dim in kind.shape.dim) if kind.HasField("shape") else None
    return shapes, types
