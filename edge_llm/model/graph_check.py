"""Checks a model folder's graph before ONNX Runtime sees it: only our own ops, only weights inside our own file.

ONNX Runtime is no sandbox: a crafted model can make it read out of bounds at load (trust: MatMulNBits PrePack). So the
protobuf is walked here, by field number (onnx.proto3), and anything that our exporter does not write is refused.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import NoReturn

from edge_llm.errors import ModelFormatError
from edge_llm.model.custom_ops import DOMAIN, SPECS
from edge_llm.model.graph_wiring import Wires, find_fault
from edge_llm.model.manifest import GRAPH_NAME, WEIGHTS_NAME, ModelManifest

ALIGNMENT = 64
_MAX_GRAPH_BYTES = 32 << 20
_NODES_A_LAYER, _OTHER_NODES = 24, 24
_ALLOWED_OPS = {(DOMAIN, spec.name) for spec in SPECS} | {("", "Gather"), ("", "Concat")}
_ELEMENT_BYTES = {1: 4, 2: 1, 10: 2}  # float32, uint8, float16
_INPUTS = {"input_ids", "segments", "rope", "logit_rows", "kv"}
_OUTPUTS = {"logits", "hidden"}

# Field numbers of onnx.proto3
_MODEL = {1: "ir_version", 2: "producer_name", 7: "graph", 8: "opset_import"}
_GRAPH = {1: "node", 2: "name", 5: "initializer", 11: "input", 12: "output"}
_NODE = {1: "input", 2: "output", 3: "name", 4: "op_type", 5: "attribute", 7: "domain"}
_ATTRIBUTE = {1: "name", 2: "f", 3: "i", 20: "type"}
_TENSOR = {1: "dims", 2: "data_type", 8: "name", 13: "external_data", 14: "data_location"}
_ENTRY = {1: "key", 2: "value"}
_VALUE_INFO = {1: "name", 2: "type"}

Value = int | bytes


def check_graph(folder: Path, manifest: ModelManifest) -> frozenset[str]:
    """The names of what stock ops and the host read, of all that is computed.

    Raises `ModelFormatError` unless model.onnx is the graph that the manifest lists and holds nothing but what we export.
    """
    graph = _read(folder / GRAPH_NAME, manifest)
    weight_bytes = _size(folder / WEIGHTS_NAME)
    if weight_bytes != manifest.weight_bytes:
        _refuse(f"{WEIGHTS_NAME} has {weight_bytes} bytes, the manifest says {manifest.weight_bytes}")
    model = _message(graph, _MODEL, "model")
    if len(model.get("graph", [])) != 1:
        _refuse("the model must hold one graph")
    fields = _message(_bytes(model["graph"][0]), _GRAPH, "graph")
    nodes = [_wires(_message(_bytes(node), _NODE, "node")) for node in fields.get("node", [])]
    _check_ops(nodes, len(manifest.layers))
    tensors = [_message(_bytes(tensor), _TENSOR, "initializer") for tensor in fields.get("initializer", [])]
    for tensor in tensors:
        _check_tensor(tensor, weight_bytes)
    fault = find_fault(nodes, {_text(tensor, "name") for tensor in tensors}, manifest)
    if fault is not None:
        _refuse(fault)
    for kind, expected in (("input", _INPUTS), ("output", _OUTPUTS)):
        infos = [_message(_bytes(info), _VALUE_INFO, kind) for info in fields.get(kind, [])]
        names = [_text(info, "name") for info in infos]
        if set(names) != expected or len(names) != len(expected):
            _refuse(f"the graph's {kind}s are {sorted(names)}, not {sorted(expected)}")
    return frozenset(_OUTPUTS.union(*(node.inputs for node in nodes if node.domain != DOMAIN)))


def _refuse(what: str) -> NoReturn:
    raise ModelFormatError(f"{GRAPH_NAME}: {what}", hint="import the model again")


def _size(path: Path) -> int:
    try:
        info = os.stat(path, follow_symlinks=False)
    except OSError as error:
        _refuse(f"{path.name} cannot be read: {error.strerror}")
    if not stat.S_ISREG(info.st_mode):
        _refuse(f"{path.name} is no regular file")
    return info.st_size


def _read(path: Path, manifest: ModelManifest) -> bytes:
    if not 0 < _size(path) <= _MAX_GRAPH_BYTES:
        _refuse("its size is out of range")
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != manifest.files[GRAPH_NAME].sha256:
        _refuse("it does not match the digest in the manifest")
    return data


def _check_ops(nodes: list[Wires], layers: int) -> None:
    """Only known ops, and no more of them than such a model needs."""
    if len(nodes) > _NODES_A_LAYER * layers + _OTHER_NODES:
        _refuse(f"{len(nodes)} nodes are too many for {layers} layers")
    for node in nodes:
        if (node.domain, node.op) not in _ALLOWED_OPS:
            _refuse(f"op {node.op!r} of domain {node.domain!r} is not one of ours")


def _wires(node: dict[str, list[Value]]) -> Wires:
    inputs, outputs = ([_decoded(name, side) for name in node.get(side, [])] for side in ("input", "output"))
    return Wires(_text(node, "domain"), _text(node, "op_type"), inputs, outputs, _numbers(node))


def _numbers(node: dict[str, list[Value]]) -> dict[str, Value]:
    """The integer attributes of a node. Attributes are plain numbers only: no tensors, no subgraphs."""
    attributes = [_message(_bytes(raw), _ATTRIBUTE, "attribute") for raw in node.get("attribute", [])]
    return {_text(attribute, "name"): attribute["i"][-1] for attribute in attributes if "i" in attribute}


def _check_tensor(tensor: dict[str, list[Value]], weight_bytes: int) -> None:
    name = _text(tensor, "name")
    location: dict[str, str] = {}
    for raw in tensor.get("external_data", []):
        entry = _message(_bytes(raw), _ENTRY, "external_data")
        key = _text(entry, "key")
        if key in location:
            _refuse(f"{name}: {key} is given twice")
        location[key] = _text(entry, "value")
    if tensor.get("data_location") != [1] or set(location) != {"location", "offset", "length"}:
        _refuse(f"{name}: not stored outside the graph as we export it")
    if location["location"] != WEIGHTS_NAME:
        _refuse(f"{name}: stored in {location['location']!r}, not in {WEIGHTS_NAME}")
    if not all(
        location[key].isascii() and location[key].isdigit() and len(location[key]) < 20 for key in ("offset", "length")
    ):
        _refuse(f"{name}: offset or length is no number")
    offset, length = int(location["offset"]), int(location["length"])
    if offset % ALIGNMENT or offset + length > weight_bytes:
        _refuse(f"{name}: bytes {offset} to {offset + length} do not lie aligned inside {WEIGHTS_NAME}")
    element = tensor.get("data_type", [0])[-1]
    width = _ELEMENT_BYTES.get(element) if isinstance(element, int) else None
    if width is None:
        _refuse(f"{name}: element type {element!r} is not one that we export")
    if prod(_dimensions(tensor, name)) * width != length:
        _refuse(f"{name}: its shape does not fit its {length} bytes")


def _dimensions(tensor: dict[str, list[Value]], name: str) -> list[int]:
    dimensions: list[int] = []
    for value in tensor.get("dims", []):
        if isinstance(value, int):
            dimensions.append(value)
        else:  # packed
            position = 0
            while position < len(value):
                number, position = _varint(value, position)
                dimensions.append(number)
    if not 1 <= len(dimensions) <= 4 or any(not 0 < size < 1 << 40 for size in dimensions):
        _refuse(f"{name}: bad shape")
    return dimensions


# --- protobuf wire format (protobuf.dev/programming-guides/encoding) ---


def _bytes(value: Value) -> bytes:
    if not isinstance(value, bytes):
        _refuse("a message is expected where a number stands")
    return value


def _text(fields: dict[str, list[Value]], name: str) -> str:
    values = fields.get(name, [b""])
    if len(values) != 1:
        _refuse(f"{name} is given {len(values)} times")
    return _decoded(values[0], name)


def _decoded(value: Value, name: str) -> str:
    try:
        return _bytes(value).decode("utf-8")
    except UnicodeDecodeError:
        _refuse(f"{name} is not UTF-8")


def _message(data: bytes, known: dict[int, str], what: str) -> dict[str, list[Value]]:
    """Fields by name; a field that is not known is refused."""
    fields: dict[str, list[Value]] = {}
    for number, value in _wire_fields(data):
        if number not in known:
            _refuse(f"{what} holds field {number}, which we do not export")
        fields.setdefault(known[number], []).append(value)
    return fields


def _wire_fields(data: bytes) -> Iterator[tuple[int, Value]]:
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, position = _varint(data, position)
            yield number, value
            continue
        if wire == 2:
            size, position = _varint(data, position)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            _refuse(f"wire type {wire} is not used by ONNX")
        if position + size > len(data):
            _refuse("it is cut short")
        yield number, data[position : position + size]
        position += size


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while position < len(data) and shift < 64:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7
    _refuse("a number is cut short")
