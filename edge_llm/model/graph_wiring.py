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

    op: str
    inputs: Sequence[str]
    outputs: Sequence[str]
    numbers: Mapping[str, object]


def find_fault(nodes: Iterable[Wires], constants: Collection[str], manifest: ModelManifest) -> str | None:
    """What is wrong with the nodes of a graph, in their order, or None."""
    taken = {*constants, *(name for reads in _READS.values() for name in reads)}
    results: dict[str, str] = {}
    layers: list[object] = []
    for node in nodes:
        # what Concat joins is checked with its kind
        reads = (RESULT,) * len(node.inputs) if node.op == "Concat" else _READS[node.op]
        needed = len(reads) - reads.count(MAYBE)
        if not needed <= len(node.inputs) <= len(reads) or len(node.outputs) != (2 if node.op == "AddRmsNorm" else 1):
            return f"{node.op} has {len(node.inputs)} inputs and {len(node.outputs)} outputs"
        for name, read in zip(node.inputs, reads, strict=False):
            there = (
                name in results if read == RESULT else name in constants if read in (CONSTANT, MAYBE) else name == read
            )
            if not there:
                return f"{node.op} reads {name!r} where {read} is expected"
        for name in node.outputs:
            if not name or name in taken or name in results:
                return f"{node.op} writes {name!r}, which is something else"
            results[name] = node.op
        if node.op == "RingAttention":
            size = manifest.dimensions
            if [node.numbers.get(name) for name in ("heads", "kv_heads", "head_dim")] != [
                size.heads,
                size.kv_heads,
                size.head_dim,
            ]:
                return "RingAttention has other heads than the manifest"
            layers.append(node.numbers.get("layer"))
    if layers != list(range(len(manifest.layers))):
        return f"the layers {layers} attend, in this order"
    for name, writers in _WRITERS.items():
        if results.get(name) not in writers:
            return f"{name!r} is no result of {' or '.join(writers)}"
    return None
