"""A graph that our exporter did not write never reaches ONNX Runtime."""

from __future__ import annotations

import dataclasses
import hashlib
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from edge_llm.errors import ModelFormatError
from edge_llm.model.graph_check import check_graph
from edge_llm.model.manifest import GRAPH_NAME, WEIGHTS_NAME, FileSpec, ModelManifest


def check(folder: Path, data: bytes) -> None:
    """Check `data` as the folder's graph, with a manifest that lists it: a crafted folder is consistent."""
    manifest = ModelManifest.read(folder)
    (folder / GRAPH_NAME).write_bytes(data)
    spec = FileSpec(len(data), hashlib.sha256(data).hexdigest())
    check_graph(folder, dataclasses.replace(manifest, files={**manifest.files, GRAPH_NAME: spec}))


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """A private copy of an exported tiny model."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


@pytest.fixture
def model(folder: Path) -> Any:
    return onnx.load(str(folder / GRAPH_NAME), load_external_data=False)


def test_our_own_graph_is_accepted(folder: Path, model: Any) -> None:
    check_graph(folder, ModelManifest.read(folder))
    check(folder, model.SerializeToString())


def set_external(model: Any, **entries: str) -> None:
    for entry in model.graph.initializer[0].external_data:
        entry.value = entries.get(entry.key, entry.value)


def add_external(model: Any, key: str, value: str) -> None:
    model.graph.initializer[0].external_data.add(key=key, value=value)


def store_inside(model: Any) -> None:
    tensor = model.graph.initializer[0]
    tensor.CopyFrom(helper.make_tensor(tensor.name, TensorProto.UINT8, [4], b"abcd", raw=True))


def add_subgraph(model: Any) -> None:
    body = helper.make_graph([], "body", [], [])
    model.graph.node[0].attribute.append(helper.make_attribute("body", body))


def add_nodes(model: Any, count: int, **options: Any) -> None:
    """`count` Concat nodes before the last, each over what the last one reads."""
    head = model.graph.node[-1]
    source = head.input[0]
    nodes = [helper.make_node("Concat", [source, source], [f"b{i}"], **options) for i in range(count)]
    del model.graph.node[-1]
    model.graph.node.extend([*nodes, head])


def linear_outputs(model: Any) -> list[str]:
    return [node.output[0] for node in model.graph.node if node.op_type == "BlockLinear"]


def node_of(model: Any, op: str, index: int = 0) -> Any:
    return [node for node in model.graph.node if node.op_type == op][index]


def rewire(model: Any, op: str, place: int, name: str, index: int = 0) -> None:
    node_of(model, op, index).input[place] = name


def gather_ids(model: Any) -> None:
    """Ids that ONNX Runtime gives back, and something else then has, before they are used."""
    first = helper.make_node("Gather", ["input_ids", "logit_rows"], ["g"], axis=0)
    rewire(model, "BlockEmbedding", 0, "g")
    nodes = [first, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def swap(model: Any) -> None:
    """The last node first: ONNX Runtime would find the order by itself."""
    nodes = [model.graph.node[-1], *model.graph.node[:-1]]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def set_number(model: Any, op: str, name: str, value: int, index: int = 0) -> None:
    next(a for a in node_of(model, op, index).attribute if a.name == name).i = value


CHANGES: dict[str, Callable[[Any], object]] = {
    "ids that are computed": gather_ids,
    "ids of something else": lambda m: rewire(m, "BlockEmbedding", 0, "logit_rows"),
    "segments of something else": lambda m: rewire(m, "RingAttention", 1, "input_ids"),
    "rope that is computed": lambda m: rewire(m, "RingAttention", 2, "embedded"),
    "another cache": lambda m: rewire(m, "RingAttention", 3, "input_ids"),
    "norms that are computed": lambda m: node_of(m, "RingAttention").input.extend(["embedded", "embedded"]),
    "computed weights": lambda m: rewire(m, "BlockLinear", 1, "embedded"),
    "rows of a constant": lambda m: rewire(m, "Gather", 0, m.graph.initializer[0].name),
    "a graph input as x": lambda m: rewire(m, "BlockLinear", 0, "rope"),
    "too few inputs": lambda m: node_of(m, "BlockLinear").input.pop(),
    "too many inputs": lambda m: node_of(m, "GatedActivation").input.append("embedded"),
    "too many outputs": lambda m: node_of(m, "BlockLinear").output.append("more"),
    "an output twice": lambda m: node_of(m, "BlockLinear").output.__setitem__(0, "embedded"),
    "an output that is a constant": lambda m: node_of(m, "BlockLinear").output.__setitem__(
        0, m.graph.initializer[0].name
    ),
    "an output without a name": lambda m: node_of(m, "BlockLinear").output.__setitem__(0, ""),
    "used before it is there": swap,
    "two attentions of one layer": lambda m: set_number(m, "RingAttention", "layer", 0, 1),
    "heads of another model": lambda m: set_number(m, "RingAttention", "heads", 64),
    "logits that nobody computes": lambda m: node_of(m, "BlockLinear", -1).output.__setitem__(0, "x"),
    "foreign op": lambda m: m.graph.node.append(helper.make_node("MatMulNBits", ["x"], ["y"], domain="com.microsoft")),
    "standard op we do not use": lambda m: m.graph.node.append(helper.make_node("Loop", ["x"], ["y"])),
    "subgraph": add_subgraph,
    "tensor attribute": lambda m: m.graph.node[0].attribute.append(
        helper.make_attribute("value", helper.make_tensor("t", TensorProto.FLOAT, [1], [0.0]))
    ),
    "string attribute": lambda m: m.graph.node[0].attribute.append(helper.make_attribute("s", "x")),
    "function": lambda m: m.functions.append(helper.make_function("d", "F", [], [], [], [helper.make_opsetid("", 21)])),
    "metadata": lambda m: m.metadata_props.add(key="k", value="v"),
    "rows doubled": lambda m: add_nodes(m, 1, axis=0),
    "columns doubled": lambda m: add_nodes(m, 1, axis=1),
    "a product twice": lambda m: m.graph.node.append(
        helper.make_node("Concat", linear_outputs(m)[:1] * 2, ["twice"], axis=1)
    ),
    "products one below the other": lambda m: m.graph.node.append(
        helper.make_node("Concat", linear_outputs(m)[:2], ["rows"], axis=0)
    ),
    "rows of somebody else": lambda m: m.graph.node.append(
        helper.make_node("Gather", ["hidden", "input_ids"], ["g"], axis=0)
    ),
    "columns gathered": lambda m: m.graph.node.append(
        helper.make_node("Gather", ["hidden", "logit_rows"], ["g"], axis=1)
    ),
    "too many nodes": lambda m: m.graph.node.extend([m.graph.node[0]] * 100),
    "sparse initializer": lambda m: m.graph.sparse_initializer.add(),
    "weights inside the graph": store_inside,
    "other file": lambda m: set_external(m, location="/etc/passwd"),
    "parent folder": lambda m: set_external(m, location="../weights.bin"),
    "in-memory marker": lambda m: set_external(m, location="*/_ORT_MEM_ADDR_/*"),
    "unaligned offset": lambda m: set_external(m, offset="1"),
    "negative offset": lambda m: set_external(m, offset="-64"),
    "offset beyond the file": lambda m: set_external(m, offset=str(1 << 62)),
    "offset no number": lambda m: set_external(m, offset="٣"),
    "length beyond the file": lambda m: set_external(m, length=str(1 << 40)),
    "length too short": lambda m: set_external(m, length="64"),
    "unknown key": lambda m: add_external(m, "checksum", "x"),
    "key twice": lambda m: add_external(m, "offset", "0"),
    "other element type": lambda m: setattr(m.graph.initializer[0], "data_type", TensorProto.INT64),
    "dimension of zero": lambda m: m.graph.initializer[0].dims.append(0),
    "overflowing dimensions": lambda m: m.graph.initializer[0].dims.extend([1 << 39, 1 << 39]),
    "no outputs": lambda m: m.graph.ClearField("output"),
    "renamed input": lambda m: setattr(m.graph.input[0], "name", "ids"),
}


def test_products_may_stand_side_by_side(folder: Path, model: Any) -> None:
    """As exported where the matrices of one layer have different types."""
    model.graph.node.append(helper.make_node("Concat", linear_outputs(model)[:2], ["both"], axis=1))
    check(folder, model.SerializeToString())


@pytest.mark.parametrize("change", CHANGES)
def test_anything_else_is_refused(folder: Path, model: Any, change: str) -> None:
    CHANGES[change](model)
    with pytest.raises(ModelFormatError, match=r"model\.onnx"):
        check(folder, model.SerializeToString())


def test_a_graph_with_another_digest(folder: Path) -> None:
    with (folder / GRAPH_NAME).open("ab") as file:
        file.write(b"\x08\x0a")
    with pytest.raises(ModelFormatError, match="digest"):
        check_graph(folder, ModelManifest.read(folder))


@pytest.mark.parametrize("size", [0, 64, -1])
def test_weights_of_another_size(folder: Path, size: int) -> None:
    path = folder / WEIGHTS_NAME
    data = path.read_bytes()
    path.write_bytes(data[:size] if size >= 0 else data + b"x")
    with pytest.raises(ModelFormatError, match="bytes"):
        check_graph(folder, ModelManifest.read(folder))


@pytest.mark.parametrize("name", [GRAPH_NAME, WEIGHTS_NAME])
def test_links_are_not_followed(folder: Path, name: str) -> None:
    (folder / name).rename(folder / "elsewhere")
    (folder / name).symlink_to(folder / "elsewhere")
    with pytest.raises(ModelFormatError, match="regular file"):
        check_graph(folder, ModelManifest.read(folder))


def test_mutated_graphs_end_in_one_error(folder: Path, model: Any) -> None:
    """Byte mutations: accepted only if they change nothing that the check reads; never another exception."""
    data = model.SerializeToString()
    generator = random.Random(7)
    refused = 0
    for _ in range(600):
        mutated = bytearray(data)
        for _ in range(generator.randint(1, 4)):
            mutated[generator.randrange(len(mutated))] = generator.randrange(256)
        if generator.random() < 0.3:
            del mutated[generator.randrange(len(mutated)) :]
        try:
            check(folder, bytes(mutated))
        except ModelFormatError:
            refused += 1
    assert refused > 300
