"""The slow truth of gemma3: a float64 network with the sizes of tools/tiny_gemma.py, written for reading."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edge_llm.export.gguf import read_gguf
from edge_llm.export.gguf_types import dequantise
from tools.tiny_gemma import WINDOW


@dataclass(frozen=True)
class Facts:
    """What no tensor says of a gemma3 with seven layers, two heads of 32 and one head of keys."""

    window: int = WINDOW
    period: int = 6
    local_base: float = 1e4
    global_base: float = 1e6
    attention_scale: float = 32**-0.5
    embedding_scale: float = 8.0
    stored_one: bool = True


def weights_of(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a GGUF file in float64, by name."""
    with read_gguf(path) as file:
        return {
            name: dequantise(file.tensor_bytes(tensor), tensor.type, tensor.shape, name).astype(np.float64)
            for name, tensor in file.tensors.items()
        }


def logits_of(weights: dict[str, np.ndarray], tokens: Sequence[int], facts: Facts) -> np.ndarray:
    """float64 [tokens, vocab]."""
    rows = np.arange(len(tokens))
    distance = rows[:, None] - rows

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        gamma = weights[f"{name}.weight"] + (0 if facts.stored_one else 1)
        return x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + 1e-5) * gamma

    def rotate(x: np.ndarray, base: float) -> np.ndarray:
        turn = np.exp(1j * rows[:, None] * base ** (-np.arange(0, 32, 2) / 32))[:, None]
        turned = (x[..., :16] + 1j * x[..., 16:]) * turn
        return np.concatenate([turned.real, turned.imag], axis=-1)

    def gelu(x: np.ndarray) -> np.ndarray:
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    h = weights["token_embd.weight"][tokens] * facts.embedding_scale
    for layer in range(7):
        block = f"blk.{layer}."
        w = {name.removeprefix(block).removesuffix(".weight"): v for name, v in weights.items() if block in name}
        is_global = layer % facts.period == facts.period - 1
        base = facts.global_base if is_global else facts.local_base
        seen = (distance >= 0) & (is_global | (distance < facts.window))
        x = norm(h, f"{block}attn_norm")
        q = rotate(norm((x @ w["attn_q"].T).reshape(-1, 2, 32), f"{block}attn_q_norm"), base)
        k = rotate(norm((x @ w["attn_k"].T).reshape(-1, 1, 32), f"{block}attn_k_norm"), base)
        scores = np.einsum("ihd,jd->hij", q, k[:, 0]) * facts.attention_scale + np.where(seen, 0, -1e30)
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        attended = np.einsum("hij,jd->ihd", p / p.sum(axis=-1, keepdims=True), x @ w["attn_v"].T)
        h = h + norm(attended.reshape(len(tokens), -1) @ w["attn_output"].T, f"{block}post_attention_norm")
        x = norm(h, f"{block}ffn_norm")
        mlp = (gelu(x @ w["ffn_gate"].T) * (x @ w["ffn_up"].T)) @ w["ffn_down"].T
        h = h + norm(mlp, f"{block}post_ffw_norm")
    return norm(h, "output_norm") @ weights["token_embd.weight"].T
