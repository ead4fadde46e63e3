"""Export: a GGUF file becomes a model folder in the ring layout. Weights keep the source's own codes, scales and minima."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from itertools import groupby
from pathlib import Path

from edge_llm.errors import ModelFormatError
from edge_llm.export.architecture import ModelSpec, read_spec
from edge_llm.export.gguf import GgufFile, read_gguf
from edge_llm.export.gguf_tokenizer import export_tokenizer
from edge_llm.export.ring_graph import RingGraph
from edge_llm.export.weights import (
    Constant,
    PackedMatrix,
    SourceMatrix,
    WeightsWriter,
    read_matrix,
    read_vector,
    rotate_halves,
)
from edge_llm.model.manifest import (
    GRAPH_NAME,
    MANIFEST_NAME,
    TEMPLATE_NAME,
    TOKENIZER_NAME,
    WEIGHTS_NAME,
    FileSpec,
    ModelManifest,
    SourceSpec,
)
from edge_llm.text.channels import ReasoningMarkers
from edge_llm.text.tool_syntax import ToolSyntax

Progress = Callable[[str, int, int], None]
"""called with (what is being written, done, total)"""


def export_gguf(
    source: Path,
    folder: Path,
    *,
    name: str,
    source_sha256: str,
    sampling: Mapping[str, float] | None = None,
    quality: Mapping[str, float] | None = None,
    system_prompt: str | None = None,
    kv_type: str = "int8",
    license: str | None = None,  # noqa: A002 - the manifest's own word
    progress: Progress | None = None,
) -> ModelManifest:
    """Write model.onnx, weights.bin, tokenizer.json, the chat template and manifest.json into the existing `folder`.

    `source_sha256` is the digest of the source file, which the caller has computed anyway. Raises `ModelFormatError` or
    `UnsupportedModelError`, naming what is wrong, before anything large is written where that can be known.
    """
    with read_gguf(source) as gguf:
        spec = read_spec(gguf)
        tokenizer = export_tokenizer(gguf)
        if tokenizer.vocab > spec.dimensions.vocab:
            raise ModelFormatError(f"{tokenizer.vocab} tokens, but embeddings of {spec.dimensions.vocab} only")
        with WeightsWriter(folder / WEIGHTS_NAME) as weights:
            graph = _write_ring(gguf, spec, weights, progress)
        files = {WEIGHTS_NAME: FileSpec(weights.size, weights.sha256)}
        calls = ToolSyntax.detect(tokenizer.chat_template or "")
        markers = ReasoningMarkers.detect(tokenizer.chat_template or "")
        texts = {GRAPH_NAME: graph.model(weights), TOKENIZER_NAME: tokenizer.json.encode()}
        if tokenizer.chat_template is not None:
            texts[TEMPLATE_NAME] = tokenizer.chat_template.encode()
        for file_name, data in texts.items():
            (folder / file_name).write_bytes(data)
            files[file_name] = FileSpec(len(data), hashlib.sha256(data).hexdigest())
        manifest = ModelManifest(
            name=name,
            architecture=spec.architecture.name,
            layout="ring",
            dimensions=spec.dimensions,
            layers=spec.layers,
            rope=spec.rope,
            tokens=tokenizer.tokens,
            source=SourceSpec(
                file=source.name,
                sha256=source_sha256,
                size=gguf.size,
                format="gguf",
                tensor_types=weights.tensor_types,
                fidelity={kind: _fidelity(error) for kind, error in weights.fidelity.items()},
            ),
            files=files,
            kv_type=kv_type,
            tool_calls=dataclasses.asdict(calls) if calls else {},
            reasoning=dataclasses.asdict(markers) if markers else {},
            sampling=dict(sampling or {}),
            system_prompt=system_prompt,
            quality=dict(quality or {}),
            license=license,
        )
    (folder / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
    return manifest


def _fidelity(error: float) -> str:
    return "bit-exact" if error == 0 else f"relative error {error:.2e}"


def _write_ring(gguf: GgufFile, spec: ModelSpec, weights: WeightsWriter, progress: Progress | None) -> RingGraph:
    """The data's way through the model, layer by layer; weights are written in the order in which a step reads them."""
    graph = RingGraph(spec)
    steps = len(spec.layers) + 1

    def report(done: int) -> None:
        if progress:
            progress("weights", done, steps)

    report(0)
    head = weights.matrix(
        "head", read_matrix(gguf, "token_embd.weight" if spec.tied_head else "output.weight", weights)
    )
    embedding = head if spec.tied_head else weights.matrix("embedding", read_matrix(gguf, "token_embd.weight", weights))
    scale = float(spec.dimensions.hidden) ** 0.5 if spec.architecture.scaled_embedding else 1.0
    hidden = graph.embedding("input_ids", embedding, "embedded", scale)
    normed = graph.norm(hidden, _norm(gguf, weights, "blk.0.attn_norm"), "layers.0.attention_norm")
    for layer in range(len(spec.layers)):
        report(layer + 1)
        source, name = f"blk.{layer}", f"layers.{layer}"
        qkv = graph.fused_linear(normed, _qkv(gguf, spec, weights, layer), f"{name}.qkv")
        attended = graph.attention(qkv, layer, _head_norms(gguf, spec, weights, layer), f"{name}.attention")
        output = weights.matrix(f"{name}.output", read_matrix(gguf, f"{source}.attn_output.weight", weights))
        delta = graph.linear(attended, output, f"{name}.output")
        if spec.architecture.post_norms:
            gamma = _norm(gguf, weights, f"{source}.post_attention_norm")
            delta = graph.norm(delta, gamma, f"{name}.attention_post_norm")
        normed, hidden = graph.add_norm(hidden, delta, _norm(gguf, weights, f"{source}.ffn_norm"), f"{name}.mlp_norm")
        gate_up = [read_matrix(gguf, f"{source}.ffn_{part}.weight", weights) for part in ("gate", "up")]
        stored = _store_rows(weights, f"{name}.gate_up", gate_up)
        activated = graph.activation(graph.fused_linear(normed, stored, f"{name}.gate_up"), f"{name}.activation")
        down = weights.matrix(f"{name}.down", read_matrix(gguf, f"{source}.ffn_down.weight", weights))
        delta = graph.linear(activated, down, f"{name}.down")
        if spec.architecture.post_norms:
            delta = graph.norm(delta, _norm(gguf, weights, f"{source}.post_ffw_norm"), f"{name}.mlp_post_norm")
        last = layer + 1 == len(spec.layers)
        gamma = _norm(gguf, weights, "output_norm" if last else f"blk.{layer + 1}.attn_norm")
        normed, hidden = graph.add_norm(
            hidden, delta, gamma, "hidden" if last else f"layers.{layer + 1}.attention_norm"
        )
    graph.linear(graph.node("Gather", [normed, "logit_rows"], ["wanted"], axis=0), head, "logits")
    return graph


def _qkv(gguf: GgufFile, spec: ModelSpec, weights: WeightsWriter, layer: int) -> list[PackedMatrix]:
    size = spec.dimensions
    q, k, v = (read_matrix(gguf, f"blk.{layer}.attn_{part}.weight", weights) for part in "qkv")
    if spec.architecture.interleaved_rope:
        rotary = spec.rope[0].rotary_dim
        q, k = rotate_halves(q, size.heads, rotary), rotate_halves(k, size.kv_heads, rotary)
    return _store_rows(weights, f"layers.{layer}.qkv", [q, k, v])


def _store_rows(weights: WeightsWriter, name: str, parts: list[SourceMatrix]) -> list[PackedMatrix]:
    """Matrices over the same input as one with all their rows; where forms differ, one for each run of equal ones."""
    runs = [list(run) for _, run in groupby(parts, key=lambda part: part.form)]
    return [weights.matrix(name if len(runs) == 1 else f"{name}.{i}", *run) for i, run in enumerate(runs)]


def _head_norms(gguf: GgufFile, spec: ModelSpec, weights: WeightsWriter, layer: int) -> list[Constant]:
    parts = "qk" if spec.architecture.head_norms else ""
    return [_norm(gguf, weights, f"blk.{layer}.attn_{part}_norm") for part in parts]


def _norm(gguf: GgufFile, weights: WeightsWriter, name: str) -> Constant:
    return weights.array(f"{name}.gamma", read_vector(gguf, f"{name}.weight"))
