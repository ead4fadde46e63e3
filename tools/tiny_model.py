"""A small random llama model as a GGUF file, the same for the same seed: what the tests run instead of a real model.

    python -m tools.tiny_model tiny.gguf

Weights are in GGUF's own row order: q and k lie as llama.cpp's converter leaves them, so that rows 2i and 2i + 1 of a
head turn together (interleaved rope). The vocabulary is byte-level BPE: three control tokens, 256 bytes, some words.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edge_llm.export.gguf_types import TENSOR_TYPES
from edge_llm.text.tokenizer_parts import byte_alphabet
from tools.random_blocks import random_blocks

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SMALLEST_VOCAB = len(CONTROL_TOKENS) + 256

_WORDS = """
the and that have for not with you this but his from they say her she will one all would there their what out about who
get which when make can like time just him know take people into year your good some could them see other than then now
look only come its over think also back after use two how our work first well way even new want because any these give
day most us is are was were answer question hello world France Paris capital
"""
_ENCODED = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0")
_ALIGNMENT = 32
_BLOCK = 32

Floats: TypeAlias = NDArray[np.float32]
Tensor: TypeAlias = tuple[str, tuple[int, ...], bytes]
"""type, shape with rows first, bytes"""


def write_tiny_gguf(
    path: str | Path,
    *,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    intermediate: int = 96,
    vocab: int = 331,
    context: int = 512,
    matrix_type: str = "Q4_1",
    head_type: str = "Q8_0",
    tied: bool = True,
    rope_base: float = 10000.0,
    rope_factors: Floats | None = None,
    chat_template: str | None = CHAT_TEMPLATE,
    architecture: str = "llama",
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model of random weights to `path` and give the path back; `tools.tiny_gemma` makes a gemma3 with it.

    The token embedding has `head_type` and is the output matrix too if `tied`, else output.weight has that type as
    well; the other matrices have `matrix_type`: any type that can be run. `hidden`, `intermediate` and heads * head_dim
    must be multiples of 32 (256 for the K types), `vocab` at least `SMALLEST_VOCAB`. `rope_factors` [head_dim / 2] divide
    the frequencies of rope (rope_freqs.weight). `metadata` replaces keys of the file; None takes one out. Weights are
    scaled so that layers and logits have a spread of about 1 and 2.
    """
    random = np.random.Generator(np.random.PCG64(seed))

    def matrix(rows: int, columns: int, kind: str = matrix_type, gain: float = 2) -> Tensor:
        if kind not in _ENCODED:
            return kind, (rows, columns), random_blocks(random, kind, rows, columns, gain * columns**-0.5)
        if columns % _BLOCK:
            raise ValueError(f"rows of {columns} values are not whole blocks of {_BLOCK}")
        values = random.standard_normal((rows, columns), np.float32) * np.float32(gain * columns**-0.5)
        return kind, (rows, columns), encode(values, kind)

    def norm(width: int = hidden) -> Tensor:
        values = np.float32(1) + random.standard_normal(width, np.float32) / np.float32(10)
        return "F32", (width,), encode(values, "F32")

    tensors = {"token_embd.weight": matrix(vocab, hidden, head_type)}
    for layer in range(layers):
        block = f"blk.{layer}."
        tensors |= {
            f"{block}attn_norm.weight": norm(),
            f"{block}attn_q.weight": matrix(heads * head_dim, hidden),
            f"{block}attn_k.weight": matrix(kv_heads * head_dim, hidden),
            f"{block}attn_v.weight": matrix(kv_heads * head_dim, hidden),
            f"{block}attn_output.weight": matrix(hidden, heads * head_dim, gain=1),
            f"{block}ffn_norm.weight": norm(),
            f"{block}ffn_gate.weight": matrix(intermediate, hidden),
            f"{block}ffn_up.weight": matrix(intermediate, hidden),
            f"{block}ffn_down.weight": matrix(hidden, intermediate, gain=1),
        }
        if architecture == "gemma3":
            tensors |= {f"{block}{name}.weight": norm(head_dim) for name in ("attn_q_norm", "attn_k_norm")}
            tensors |= {f"{block}{name}.weight": norm() for name in ("post_attention_norm", "post_ffw_norm")}
    tensors["output_norm.weight"] = norm()
    if not tied:
        tensors["output.weight"] = matrix(vocab, hidden, head_type)
    if rope_factors is not None:
        tensors["rope_freqs.weight"] = "F32", rope_factors.shape, encode(rope_factors, "F32")
    values: dict[str, Any] = {
        "general.architecture": architecture,
        "general.name": "tiny",
        f"{architecture}.block_count": layers,
        f"{architecture}.context_length": context,
        f"{architecture}.embedding_length": hidden,
        f"{architecture}.feed_forward_length": intermediate,
        f"{architecture}.attention.head_count": heads,
        f"{architecture}.attention.head_count_kv": kv_heads,
        f"{architecture}.attention.key_length": head_dim,
        f"{architecture}.attention.value_length": head_dim,
        f"{architecture}.rope.freq_base": rope_base,
        f"{architecture}.rope.dimension_count": head_dim,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.vocab_size": vocab,
        **tokenizer_metadata(vocab),
        "tokenizer.chat_template": chat_template,
        **(metadata or {}),
    }
    write_gguf(path, {key: value for key, value in values.items() if value is not None}, tensors)
    return Path(path)


def tokenizer_metadata(vocab: int) -> dict[str, Any]:
    """The tokenizer.ggml keys of a byte-level BPE vocabulary of `vocab` tokens; what words do not fill is unused."""
    if vocab < SMALLEST_VOCAB:
        raise ValueError(f"vocab must be at least {SMALLEST_VOCAB}, not {vocab}")
    tokens = [*CONTROL_TOKENS, *byte_alphabet()]
    merges: dict[str, str] = {}
    for word in (f"Ġ{word}" for word in _WORDS.split()):
        for end in range(1, len(word)):
            if len(merges) < vocab - SMALLEST_VOCAB:
                merges.setdefault(word[: end + 1], f"{word[:end]} {word[end]}")
    tokens += merges
    unused = [f"<unused{i}>" for i in range(vocab - len(tokens))]
    kinds = [3] * len(CONTROL_TOKENS) + [1] * (len(tokens) - len(CONTROL_TOKENS)) + [5] * len(unused)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens + unused,
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.merges": list(merges.values()),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    }


def encode(values: Floats, kind: str) -> bytes:
    """The bytes of `values`, float32 [..., columns], as ggml's type `kind` (rounded to nearest, no search)."""
    if kind in ("F32", "F16"):
        return values.astype("<f4" if kind == "F32" else "<f2").tobytes()
    if kind == "BF16":
        bits = values.astype("<f4").view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes()
    blocks = values.reshape(-1, _BLOCK)
    low, high = blocks.min(axis=1, keepdims=True), blocks.max(axis=1, keepdims=True)
    largest = np.maximum(high, -low)
    if kind == "Q8_0":
        d = (largest / 127).astype("<f2")
        codes = _steps(blocks, d, np.float32(0), -127, 127).astype(np.int8).view(np.uint8)
        return np.concatenate([d.view(np.uint8), codes], axis=1).tobytes()
    if kind == "Q4_0":
        d = (largest / 7).astype("<f2")
        codes = _steps(blocks, d, -8 * d.astype(np.float32), 0, 15).astype(np.uint8)
        return np.concatenate([d.view(np.uint8), _pairs(codes)], axis=1).tobytes()
    if kind == "Q4_1":
        d, m = ((high - low) / 15).astype("<f2"), low.astype("<f2")
        codes = _steps(blocks, d, m.astype(np.float32), 0, 15).astype(np.uint8)
        return np.concatenate([d.view(np.uint8), m.view(np.uint8), _pairs(codes)], axis=1).tobytes()
    raise ValueError(f"no encoder for {kind}")


def _steps(blocks: Floats, d: NDArray[np.float16], m: Floats | np.float32, low: int, high: int) -> Floats:
    scale = d.astype(np.float32)
    steps: Floats = np.divide(blocks - m, scale, out=np.zeros_like(blocks), where=scale != 0)
    return np.rint(steps).clip(low, high)


def _pairs(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Two codes a byte: 0..15 of a block are the low halves, 16..31 the high ones."""
    return codes[:, :16] | codes[:, 16:] << np.uint8(4)


# --- writing GGUF ---

_TYPE_NUMBERS = {kind.name: number for number, kind in TENSOR_TYPES.items()}
_ARRAY_NUMBERS = {"u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "f4": 6, "b1": 7, "u8": 10, "i8": 11, "f8": 12}


def write_gguf(
    path: str | Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    version: int = 3,
) -> None:
    """Write a little-endian GGUF file.

    Python values become uint32 (int32, uint64 or int64 where it does not fit), float32, bool, string, arrays of
    strings; NumPy arrays and scalars keep their type.
    """
    head = [b"GGUF", struct.pack("<IQQ", version, len(tensors), len(metadata))]
    for key, value in metadata.items():
        head += [_string(key), *_value(value)]
    offset = 0
    for name, (kind, shape, data) in tensors.items():
        dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += [_string(name), dimensions, struct.pack("<IQ", _TYPE_NUMBERS[kind], offset)]
        offset += len(data) + -len(data) % _ALIGNMENT
    start = b"".join(head)
    with Path(path).open("wb") as file:
        file.write(start + bytes(-len(start) % _ALIGNMENT))
        for _, _, data in tensors.values():
            file.write(data + bytes(-len(data) % _ALIGNMENT))


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> Iterable[bytes]:
    if isinstance(value, str):
        return struct.pack("<I", 8), _string(value)
    if isinstance(value, list):
        return struct.pack("<IIQ", 9, 8, len(value)), *(_string(text) for text in value)
    if isinstance(value, float):
        value = np.float32(value)
    if isinstance(value, int) and not isinstance(value, bool):
        value = np.array(value, next(t for t in (np.uint32, np.int32, np.uint64, np.int64) if _fits(value, t)))[()]
    array = np.asarray(value)
    number = _ARRAY_NUMBERS[array.dtype.str[1:]]
    data = array.astype(array.dtype.newbyteorder("<")).tobytes()
    return (struct.pack("<IIQ", 9, number, array.size) if array.ndim else struct.pack("<I", number)), data


def _fits(value: int, kind: type[np.integer[Any]]) -> bool:
    limits = np.iinfo(kind)
    return int(limits.min) <= value <= int(limits.max)


if __name__ == "__main__":
    print(write_tiny_gguf(sys.argv[1]))
