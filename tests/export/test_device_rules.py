"""The forms for NPUs keep the rules of what their compilers take, and each kind of fault is seen and named."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from edge_llm.errors import UnsupportedModelError
from edge_llm.export import static_graph
from edge_llm.export.device_rules import RULES, check_rules, pinned, violations
from edge_llm.export.static_graph import write_static
from edge_llm.model.providers import fixed_sizes
from edge_llm.model.static_folder import STATIC_GRAPH, StaticForm
from tests.conftest import export
from tests.model.mixed import write_mixed
from tools.tiny_gemma import write_tiny_gemma3

DEVICES = list(RULES)
HELD = {**{f"past.{layer}": 64 for layer in range(3)}, "total.mask": 64, "total.mask.40": 64, "total.mask.23": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixed(tmp_path_factory.mktemp("mixed") / "model")


def graph(folder: Path, target: Path, form: StaticForm) -> Any:
    target.mkdir()
    write_static(folder, target, form)
    return onnx.load(target / STATIC_GRAPH, load_external_data=False)


@pytest.mark.parametrize("form", DEVICES)
@pytest.mark.parametrize("rows", [1, 32])
def test_forms_for_devices_keep_the_rules(folder: Path, tmp_path: Path, form: StaticForm, rows: int) -> None:
    model = graph(folder, tmp_path / "static", form)
    assert list(violations(model, RULES[form], fixed_sizes(rows, HELD))) == []
    fixed = pinned(model, fixed_sizes(rows, HELD))
    sizes = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in fixed.graph.input}
    assert sizes["mask.40"] == [rows, 64 + rows]
    assert all(all(size) for size in sizes.values())


@pytest.mark.parametrize("form", DEVICES)
def test_other_families_keep_them_too(tmp_path: Path, form: StaticForm) -> None:
    """Gelu, norms of heads, windows and soft caps."""
    (tmp_path / "gemma").mkdir()
    source = write_tiny_gemma3(tmp_path / "gemma" / "tiny.gguf")
    check_rules(graph(export(source, tmp_path / "gemma" / "exported"), tmp_path / "static", form), form)


def test_the_master_form_is_none_for_devices(folder: Path, tmp_path: Path) -> None:
    model = graph(folder, tmp_path / "static", StaticForm.BLOCKS)
    with pytest.raises(UnsupportedModelError, match=r"no graph for coreml: _\d+ is a DequantizeLinear; .* more\)"):
        check_rules(model, StaticForm.COREML)


def node(model: Any, op_type: str) -> Any:
    return next(node for node in model.graph.node if node.op_type == op_type)


def attribute(model: Any, op_type: str, name: str) -> Any:
    return next(attribute for attribute in node(model, op_type).attribute if attribute.name == name)


def rename(model: Any) -> None:
    node(model, "Sigmoid").op_type = "Erf"


def move(model: Any) -> None:
    node(model, "Softmax").domain = "com.microsoft"


def feed_axes(model: Any) -> None:
    node(model, "ReduceMean").input[1] = "embedded"


def odd_bits(model: Any) -> None:
    attribute(model, "MatMulNBits", "bits").i = 3


def odd_block(model: Any) -> None:
    attribute(model, "MatMulNBits", "block_size").i = 24


def flat_input(model: Any) -> None:
    product = node(model, "MatMulNBits")
    product.input[0] = next(reshape for reshape in model.graph.node if product.input[0] in reshape.output).input[0]


def many_axes(model: Any) -> None:
    shape = numpy_helper.from_array(np.array([1, 1, 1, 1, -1, 1]), "deep_shape")
    model.graph.initializer.append(shape)
    model.graph.node.append(helper.make_node("Reshape", ["hidden", "deep_shape"], ["deep"]))


def halves(model: Any) -> None:
    model.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT16


def unknown(model: Any) -> None:
    node(model, "Transpose").input[0] = "nobody"


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (rename, "is a Erf"),
        (move, "is a Softmax"),
        (feed_axes, r"input 1 of \S+ \(ReduceMean\) is no constant"),
        (odd_bits, r"\(MatMulNBits\) has bits 3"),
        (odd_block, r"\(MatMulNBits\) has block_size 24"),
        (odd_block, "has 64 inputs in blocks of 24"),
        (flat_input, r"\(MatMulNBits\) has an input of 2 axes"),
        (many_axes, "deep has 6 axes"),
        (halves, "embedded is not of float32"),
        (unknown, "nobody has no fixed shape"),
    ],
)
def test_each_fault_is_named(folder: Path, tmp_path: Path, spoil: Callable[[Any], None], found: str) -> None:
    model = graph(folder, tmp_path / "static", StaticForm.QNN)
    spoil(model)
    told = "\n".join(violations(model, RULES[StaticForm.QNN], fixed_sizes(1, HELD)))
    assert re.search(found, told), told


def test_a_size_that_stays_open_is_named(folder: Path, tmp_path: Path) -> None:
    model = graph(folder, tmp_path / "static", StaticForm.QNN)
    with pytest.raises(UnsupportedModelError, match=r"the size past\.2 is not fixed"):
        pinned(model, fixed_sizes(1, {name: size for name, size in HELD.items() if name != "past.2"}))


def test_a_model_that_a_device_cannot_take_is_refused_when_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(static_graph.RULES[StaticForm.QNN], "Softmax")
    with pytest.raises(UnsupportedModelError, match=r"no graph for qnn: .* is a Softmax"):
        write_static(folder, tmp_path, StaticForm.QNN)
    assert not (tmp_path / STATIC_GRAPH).exists()
