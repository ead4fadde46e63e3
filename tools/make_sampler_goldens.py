"""Goldens of the sampler's stages from llama.cpp: what stays of a row, and what DRY takes from which token.

    python3 -m venv /tmp/llama && /tmp/llama/bin/pip install llama-cpp-python==0.3.36
    /tmp/llama/bin/python tools/make_sampler_goldens.py SmolLM2-135M-Instruct.Q4_1.gguf > tests/golden/llama_samplers.json

The model gives DRY its vocabulary; its weights are not read.
"""

from __future__ import annotations

import ctypes
import json
import math
import random
import sys
from importlib import metadata
from typing import Any

import llama_cpp

UNIT = 1 << 16
"""logits are multiples of 1 / UNIT, so that JSON keeps them exactly, and hardly any two are equal"""
TEXT = (
    'He said: "the cat sat on the mat, the cat sat on the mat, the dog sat on the mat.\n'
    "User: again and again and again.\nUser: again and again and again.\nThe cat sat on the mat, the cat sat on the"
)
BREAKERS: list[list[str]] = [[], ["\n", ":", '"', "*"], ["sat on"], ["ser:", ","], ["mat, the d"]]


def rows() -> list[list[int]]:
    draw = random.Random(20261130)
    spreads = (0.7, 2.0, 3.5)  # none so wide that a token is too improbable for our weights
    return [[round(draw.gauss(0, spreads[i % 3]) * UNIT) for _ in range(40)] for i in range(9)]


def applied(sampler: Any, logits: list[float]) -> list[tuple[int, float]]:
    """(id, logit) of the candidates that `sampler` leaves."""
    data = (llama_cpp.llama_token_data * len(logits))()
    for i, logit in enumerate(logits):
        data[i] = llama_cpp.llama_token_data(i, logit, 0.0)
    candidates = llama_cpp.llama_token_data_array(data, len(logits), -1, False)
    llama_cpp.llama_sampler_apply(sampler, ctypes.byref(candidates))
    return [(candidates.data[i].id, candidates.data[i].logit) for i in range(candidates.size)]


def kept(sampler: Any, row: list[int]) -> list[int]:
    left = applied(sampler, [value / UNIT for value in row])
    llama_cpp.llama_sampler_free(sampler)
    return sorted(token for token, logit in left if logit > -math.inf)


def truncations(row: list[int]) -> list[dict[str, Any]]:
    cases: list[tuple[dict[str, float], Any]] = []
    for p in (0.1, 0.5, 0.9, 0.99):
        cases.append(({"typical_p": p}, llama_cpp.llama_sampler_init_typical(p, 1)))
    for n in (0.3, 1.0, 2.0):
        cases.append(({"top_n_sigma": n}, llama_cpp.llama_sampler_init_top_n_sigma(n)))
    for t in (0.02, 0.1, 0.3):
        xtc = {"xtc_probability": 1.0, "xtc_threshold": t}
        cases.append((xtc, llama_cpp.llama_sampler_init_xtc(1.0, t, 1, 0)))
    for tau in (0.5, 1.5, 3.0):
        cases.append(({"mirostat_tau": tau}, llama_cpp.llama_sampler_init_mirostat_v2(0, tau, 0.1)))
    return [{"params": params, "kept": kept(sampler, row)} for params, sampler in cases]


def dry_case(vocab: Any, size: int, ids: list[int], breakers: list[str], **params: Any) -> dict[str, Any]:
    texts = (ctypes.c_char_p * len(breakers))(*(text.encode() for text in breakers))
    sampler = llama_cpp.llama_sampler_init_dry(
        vocab,
        params["dry_multiplier"],
        params["dry_base"],
        params["dry_allowed_length"],
        params["dry_penalty_last_n"],
        texts,
        len(breakers),
    )
    for token in ids:
        llama_cpp.llama_sampler_accept(sampler, token)
    left = applied(sampler, [0.0] * size)
    llama_cpp.llama_sampler_free(sampler)
    penalties = {str(token): -logit for token, logit in left if logit}
    return {"tokens": len(ids), "breakers": breakers, "params": params, "penalties": penalties}


def main() -> None:
    llama_cpp.llama_backend_init()
    options = llama_cpp.llama_model_default_params()
    options.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(sys.argv[1].encode(), options)
    vocab = llama_cpp.llama_model_get_vocab(model)
    size = llama_cpp.llama_vocab_n_tokens(vocab)
    buffer = (llama_cpp.llama_token * 512)()
    count = llama_cpp.llama_tokenize(vocab, TEXT.encode(), len(TEXT.encode()), buffer, 512, False, False)
    ids = list(buffer[:count])
    piece = ctypes.create_string_buffer(64)

    def text_of(token: int) -> str:
        size = llama_cpp.llama_token_to_piece(vocab, token, piece, 64, 0, True)
        return piece.raw[:size].decode()

    dry = [
        dry_case(
            vocab,
            size,
            ids[:end],
            breakers,
            dry_multiplier=0.75,
            dry_base=1.5,
            dry_allowed_length=allowed,
            dry_penalty_last_n=last_n,
        )
        for breakers in BREAKERS
        for end in range(14, count + 1, 5)
        for allowed, last_n in ((1, 4096), (2, 4096), (3, 20))
    ]
    document = {
        "source": f"llama.cpp by llama-cpp-python {metadata.version('llama-cpp-python')}",
        "unit": UNIT,
        "truncations": [{"row": row, "cases": truncations(row)} for row in rows()],
        "ids": ids,
        "texts": {str(token): text_of(token) for token in sorted(set(ids))},
        "dry": dry,
    }
    json.dump(document, sys.stdout, separators=(",", ":"))
    print()


if __name__ == "__main__":
    main()
