"""The tiny gemma3 is the network that llama.cpp sees in it (tools/make_logits_golden.py), and no other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.reference.gemma3 import Facts, logits_of, weights_of
from tools.tiny_gemma import SMALLEST_VOCAB, WINDOW, sentencepiece_metadata, write_tiny_gemma3

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "tiny_gemma_logits.json").read_text(encoding="utf-8"))
ROUNDING = 5e-3
"""of llama.cpp's GELU, a table of float16: it hides which of the two forms of GELU it is, which transformers' logits tell"""


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    path = write_tiny_gemma3(tmp_path_factory.mktemp("gemma") / "tiny.gguf", matrix_type="F32", head_type="F32")
    return weights_of(path)


def largest_difference(weights: dict[str, np.ndarray], facts: Facts) -> float:
    logits = logits_of(weights, GOLDEN["tokens"], facts)[GOLDEN["rows"]]
    return float(np.abs(logits - np.array(GOLDEN["logits"])).max())


def test_llama_cpp_sees_the_network_that_is_described(weights: dict[str, np.ndarray]) -> None:
    assert largest_difference(weights, Facts()) < ROUNDING


@pytest.mark.parametrize(
    "wrong",
    [
        {"window": WINDOW - 1}, {"window": WINDOW + 1}, {"period": 5}, {"period": 7}, {"local_base": 1e6},
        {"global_base": 1e4}, {"attention_scale": 1.0}, {"embedding_scale": 1.0},
        {"stored_one": False},
    ],
    ids=str,
)  # fmt: skip
def test_any_other_network_would_show(weights: dict[str, np.ndarray], wrong: dict[str, float]) -> None:
    assert largest_difference(weights, replace(Facts(), **wrong)) > 100 * ROUNDING


def test_a_vocabulary_has_the_size_that_is_asked_for() -> None:
    for vocab in (SMALLEST_VOCAB, 1000):
        tokens = sentencepiece_metadata(vocab)["tokenizer.ggml.tokens"]
        assert len(tokens) == len(set(tokens)) == vocab
    with pytest.raises(ValueError, match=str(SMALLEST_VOCAB)):
        sentencepiece_metadata(300)
