"""What the exporter knows of each architecture, and the sizes it reads from a GGUF file: one table, one parameterised builder."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edge_llm.errors import ModelFormatError, UnsupportedModelError, quoted
from edge_llm.export.gguf import GgufFile
from edge_llm.kernels.layout import Activation
from edge_llm.model.manifest import LayerSpec, ModelDimensions, RopeTable


@dataclass(frozen=True, slots=True)
class LocalLayers:
    """The last of every `period` layers is global; the others attend to a window and rotate by a base of their own.

    These are the family's values, which a file may leave out: attention.sliding_window_pattern, rope.freq_base_swa.
    """

    period: int
    rope_base: float


@dataclass(frozen=True, slots=True)
class Architecture:
    """One family of graphs. Names of metadata and tensors are GGUF's (ggml-org/ggml docs/gguf.md)."""

    name: str
    activation: Activation
    interleaved_rope: bool = False
    """rows of q and k are stored for rotation of pairs (2i, 2i + 1); the kernels rotate halves (i, i + d/2)"""
    scaled_embedding: bool = False
    """embeddings, but not the output matrix, are multiplied by sqrt(hidden)"""
    head_norms: bool = False
    """each head of q and k is normalised before it turns"""
    post_norms: bool = False
    """what attention and MLP give is normalised before it is added to the residual"""
    local: LocalLayers | None = None


ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        Architecture(name="llama", activation=Activation.SILU, interleaved_rope=True),
        # Gemma 3 (arXiv:2503.19786), as llama.cpp's converter leaves it: the 1 of (1 + w) is part of the stored norms
        Architecture(
            name="gemma3",
            activation=Activation.GELU_TANH,
            scaled_embedding=True,
            head_norms=True,
            post_norms=True,
            local=LocalLayers(period=6, rope_base=10000.0),
        ),
    )
}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A GGUF model's sizes, layers and rope, checked against each other and against the tensors that are there."""

    architecture: Architecture
    dimensions: ModelDimensions
    layers: tuple[LayerSpec, ...]
    rope: tuple[RopeTable, ...]
    norm_eps: float
    tied_head: bool
    """the output matrix is the token embedding"""


def read_spec(gguf: GgufFile) -> ModelSpec:
    """The spec of an open file. Raises `UnsupportedModelError` for what we do not run (named), else `ModelFormatError`."""
    architecture = ARCHITECTURES.get(gguf.architecture)
    if architecture is None:
        raise UnsupportedModelError(
            f"the architecture {quoted(gguf.architecture)} is not supported",
            hint=f"supported architectures: {', '.join(sorted(ARCHITECTURES))}",
        )
    if gguf.integer("split.count", 0, 1 << 16, default=1) > 1:
        raise UnsupportedModelError(
            "the model is split over several files", hint="join them with llama-gguf-split --merge"
        )
    prefix = architecture.name
    hidden = gguf.integer(f"{prefix}.embedding_length", 32, 1 << 18)
    heads = gguf.integer(f"{prefix}.attention.head_count", 1, 1024)
    head_dim = gguf.integer(f"{prefix}.attention.key_length", 8, 1024, default=hidden // heads)
    if gguf.integer(f"{prefix}.attention.value_length", 8, 1024, default=head_dim) != head_dim:
        raise UnsupportedModelError("keys and values of different sizes are not supported")
    dimensions = ModelDimensions(
        vocab=gguf.tensor("token_embd.weight").shape[0],
        hidden=hidden,
        intermediate=gguf.integer(f"{prefix}.feed_forward_length", 32, 1 << 18),
        heads=heads,
        kv_heads=gguf.integer(f"{prefix}.attention.head_count_kv", 1, 1024, default=heads),
        head_dim=head_dim,
        context=gguf.integer(f"{prefix}.context_length", 1, 1 << 24),
    )
    layers = _layers(gguf, architecture)
    rope = [_rope_table(gguf, prefix, head_dim)]
    if architecture.local and any(layer.window for layer in layers):
        # Long contexts stretch the global layers' rotation only.
        base = gguf.number(f"{prefix}.rope.freq_base_swa", default=architecture.local.rope_base)
        rope.append(_checked_rope(RopeTable(base=base, rotary_dim=rope[0].rotary_dim)))
    spec = ModelSpec(
        architecture=architecture,
        dimensions=dimensions,
        layers=layers,
        rope=tuple(rope),
        norm_eps=gguf.number(f"{prefix}.attention.layer_norm_rms_epsilon"),
        tied_head="output.weight" not in gguf.tensors,
    )
    _check_known(gguf, spec)
    _check_multiples(dimensions)
    _check_tensors(gguf, spec)
    return spec


def _layers(gguf: GgufFile, architecture: Architecture) -> tuple[LayerSpec, ...]:
    """Windows are counted as our kernels count them: a local row attends to itself and the window - 1 rows before it."""
    prefix, local = architecture.name, architecture.local
    count = gguf.integer(f"{prefix}.block_count", 1, 512)
    window = gguf.integer(f"{prefix}.attention.sliding_window", 0, 1 << 24, default=0) if local else 0
    if local is None or not window:
        return (LayerSpec(rope=0),) * count
    period = gguf.integer(f"{prefix}.attention.sliding_window_pattern", 1, 512, default=local.period)
    global_layer, local_layer = LayerSpec(rope=0), LayerSpec(rope=1, window=window)
    return tuple(global_layer if (i + 1) % period == 0 else local_layer for i in range(count))


def _rope_table(gguf: GgufFile, prefix: str, head_dim: int) -> RopeTable:
    scaling = gguf.text(f"{prefix}.rope.scaling.type", default="none")
    if scaling not in ("none", "linear"):
        raise UnsupportedModelError(f"rope scaling {quoted(scaling)} is not supported")
    factor = gguf.number(f"{prefix}.rope.scaling.factor", default=1.0) if scaling == "linear" else 1.0
    rotary_dim = gguf.integer(f"{prefix}.rope.dimension_count", 2, head_dim, default=head_dim)
    base = gguf.number(f"{prefix}.rope.freq_base", default=10000.0)
    factors: tuple[float, ...] | None = None
    if "rope_freqs.weight" in gguf.tensors:
        tensor = gguf.tensor("rope_freqs.weight")
        if tensor.type != "F32" or tensor.shape != (rotary_dim // 2,):
            raise ModelFormatError("rope_freqs.weight does not fit the rope dimensions")
        factors = tuple(float(x) for x in gguf.tensor_bytes(tensor).view(np.float32))
    return _checked_rope(RopeTable(base=base, rotary_dim=rotary_dim, factor=factor, frequency_factors=factors))


def _checked_rope(table: RopeTable) -> RopeTable:
    if table.rotary_dim % 2 or table.base <= 0 or table.factor <= 0:
        raise ModelFormatError("rope's dimensions must be even, its base and factor positive")
    return table


def _check_known(gguf: GgufFile, spec: ModelSpec) -> None:
    """Refuse what the metadata says, or leaves out, and the graph does not do."""
    prefix = spec.architecture.name
    if gguf.integer(f"{prefix}.expert_count", 0, 1 << 16, default=0):
        raise UnsupportedModelError("mixtures of experts are not supported")
    if gguf.number(f"{prefix}.final_logit_softcapping", default=0.0):
        raise UnsupportedModelError("logits with a soft cap are not supported")
    if prefix == "gemma3" and len(spec.layers) == 62:
        raise UnsupportedModelError("Gemma 3 27B is not supported: no key says how its attention is scaled")


def _check_multiples(size: ModelDimensions) -> None:
    """Blocks of 32 inputs must not be cut by a row, nor a head by a vector."""
    for name, value in (
        ("embedding_length", size.hidden),
        ("feed_forward_length", size.intermediate),
        ("heads", size.heads * size.head_dim),
    ):
        if value % 32:
            raise UnsupportedModelError(f"{name} is {value}, which is no multiple of 32")
    if size.head_dim % 8 or size.heads % size.kv_heads:
        raise UnsupportedModelError(f"{size.heads} heads of {size.head_dim} over {size.kv_heads} are not supported")


def _check_tensors(gguf: GgufFile, spec: ModelSpec) -> None:
    """Every tensor that the graph needs has its shape, and no tensor is there that the graph would leave out."""
    size = spec.dimensions
    q, kv = size.heads * size.head_dim, size.kv_heads * size.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (size.hidden,),
        "attn_q": (q, size.hidden),
        "attn_k": (kv, size.hidden),
        "attn_v": (kv, size.hidden),
        "attn_output": (size.hidden, q),
        "ffn_norm": (size.hidden,),
        "ffn_gate": (size.intermediate, size.hidden),
        "ffn_up": (size.intermediate, size.hidden),
        "ffn_down": (size.hidden, size.intermediate),
    }
    if spec.architecture.head_norms:
        shapes |= {"attn_q_norm": (size.head_dim,), "attn_k_norm": (size.head_dim,)}
    if spec.architecture.post_norms:
        shapes |= {"post_attention_norm": (size.hidden,), "post_ffw_norm": (size.hidden,)}
    expected: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (size.vocab, size.hidden),
        "output_norm.weight": (size.hidden,),
        **{f"blk.{i}.{name}.weight": shape for i in range(len(spec.layers)) for name, shape in shapes.items()},
    }
    if not spec.tied_head:
        expected["output.weight"] = (size.vocab, size.hidden)
    for name, shape in expected.items():
        if gguf.tensor(name).shape != shape:
            raise ModelFormatError(f"tensor {name} has shape {gguf.tensor(name).shape}, the metadata asks for {shape}")
    for name in gguf.tensors:
        if name not in expected and name != "rope_freqs.weight":
            raise UnsupportedModelError(f"tensor {quoted(name)} has no place in the {spec.architecture.name} graph")
