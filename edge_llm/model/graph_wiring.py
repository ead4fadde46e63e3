"""Which values the nodes of a graph read: those that our exporter lets them read, and no others.

Kernels check sizes when an op is called and compute later, when ONNX Runtime has given the op's inputs back. So what decides
about addresses, token ids and segments, must be the graph's own inputs, which stay as they are for the whole step; and
two ops must not take each other's place, as two attentions of one layer would.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from edge_llm.model.manifest import ModelManifest

RESULT, CONSTANT, MAYBE = "a result", "a constant", "a constant or nothing"

_READS: Mapping[str, Sequence[str]] = {
    "BlockEmbedding": ("input_ids", CONSTANT, CONSTANT),
    "BlockLinear": (RESULT, CONSTANT, CONSTANT, MAYBE),
    "RmsNorm": (RESULT, CONSTANT),
    "AddRmsNorm": (RESULT, RESULT, CONSTANT),
    "GatedActivation": (RESULT,),
    "RingAttention": (RESULT, "segments", "rope", "kv", MAYBE, MAYBE),
    "Gather": (RESULT, "logit_rows"),
}
"""what each input of an op is; other names are inputs of the graph"""
_WRITERS = {"logits": ("BlockLinear",), "hidden": ("RmsNorm", "AddRmsNorm")}
"""outputs of the graph, and the ops that they may come from"""


@dataclass(frozen=True)
class Wires:
    """One node: its op, the names that it reads and writes, and its attributes that are whole numbers."""

    domain: str
    op: str
    inputs: Sequence[str]
    outputs: Sequence[str]
    numbers: Mapping[str, object]


def find_fault(nodes: Iterable[Wires], constants: Collection[str], manifest: ModelManifest) -> str | None:
    """What is wrong with the nodes of a graph, all of known ops, in their order; or None."""
    size = manifest.dimensions
    heads = {"heads": size.heads, "kv_heads": size.kv_heads, "head_dim": size.head_dim}
    taken = {*constants, *(name for reads in _READS.values() for name in reads)}
    results: dict[str, str] = {}
    layers: list[object] = []
    for node in nodes:
        if fault := _reading_fault(node, results, constants):
            return fault
        if len(node.outputs) != (2 if node.op == "AddRmsNorm" else 1):
            return f"{node.op} has {len(node.outputs)} outputs"
        for name in node.outputs:
            if not name or name in taken or name in results:
                return f"{node.op} writes {name!r}, which is something else"
            results[name] = node.op
        if node.op == "RingAttention":
            if not heads.items() <= node.numbers.items():
                return "RingAttention has other heads than the manifest"
            layers.append(node.numbers.get("layer"))
    if layers != list(range(len(manifest.layers))):
        return f"the layers {layers} attend, in this order"
    for name, writers in _WRITERS.items():
        if results.get(name) not in writers:
            return f"{name!r} is no result of {' or '.join(writers)}"
    return None


def _reading_fault(node: Wires, results: Mapping[str, str], constants: Collection[str]) -> str | None:
    """What is wrong with the inputs of a node, and with how a stock op takes them: where nothing can grow."""
    if node.op == "Concat":
        products = all(results.get(name) == "BlockLinear" for name in node.inputs)
        if node.numbers != {"axis": 1} or len(set(node.inputs)) != len(node.inputs) or not products:
            return "Concat joins something else than matrix products, side by side"
        return None
    if node.op == "Gather" and node.numbers != {"axis": 0}:
        return "Gather takes something else than rows"
    reads = _READS[node.op]
    if not len(reads) - reads.count(MAYBE) <= len(node.inputs) <= len(reads):
        return f"{node.op} has {len(node.inputs)} inputs"
    known: Mapping[str, Collection[str]] = {RESULT: results, CONSTANT: constants, MAYBE: constants}
    for name, read in zip(node.inputs, reads, strict=False):
        if name not in known.get(read, (read,)):
            return f"{node.op} reads {name!r} where {read} is expected"
    return None
