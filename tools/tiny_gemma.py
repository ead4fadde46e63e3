"""A small random gemma3 model as a GGUF file: local and global layers, head norms, post norms, a SentencePiece vocabulary.

python -m tools.tiny_gemma tiny.gguf
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tools.tiny_model import write_tiny_gguf

CONTROL_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
USER_DEFINED = ("[multimodal]", "\n", "\n\n", "\n\n\n", "  ", "   ", "    ", "\t", "<b>", "</b>", "<table>")
WINDOW = 24

_CHARACTERS = "▁etaoinshrdlucmfwypvbgkqjxzETAOIN.,!?'<>/0123456789é日本"
_WORDS = """
the and that have for not with you this but his from they say her she will one all would there their what out about who
hello world France Paris capital answer question banana 日本 café </
"""
SMALLEST_VOCAB = 450


def write_tiny_gemma3(path: str | Path, *, metadata: Mapping[str, Any] | None = None, **options: Any) -> Path:
    """Write a gemma3 of seven layers, the sixth of which is global; `options` as of `write_tiny_gguf`.

    The local window is `WINDOW` rows, counting the row itself. Keys that Gemma's own files leave out are left out.
    """
    sizes = {"layers": 7, "hidden": 64, "heads": 2, "kv_heads": 1, "head_dim": 32, "intermediate": 96}
    options = {**sizes, "vocab": SMALLEST_VOCAB, "rope_base": 1e6, "chat_template": None} | options
    keys = {"gemma3.attention.sliding_window": WINDOW, "gemma3.rope.dimension_count": None, "gemma3.vocab_size": None}
    keys |= sentencepiece_metadata(options["vocab"])
    return write_tiny_gguf(path, architecture="gemma3", metadata=keys | dict(metadata or {}), **options)


def sentencepiece_metadata(vocab: int = SMALLEST_VOCAB) -> dict[str, Any]:
    """The tokenizer.ggml keys of a SentencePiece vocabulary of `vocab` tokens; what words do not fill is unused."""
    kinds = dict.fromkeys(CONTROL_TOKENS, 3) | dict.fromkeys(USER_DEFINED, 4)
    kinds |= {f"<0x{byte:02X}>": 6 for byte in range(256)}
    scores = dict.fromkeys(kinds, -1000.0)
    # Shorter beginnings have better scores, as in a vocabulary that was learned.
    words = [f"▁{word}" if word.isascii() and word.isalpha() else word for word in _WORDS.split()]
    pieces = dict.fromkeys(sorted((w[:end] for w in words for end in range(2, len(w) + 1)), key=len))
    for piece in [*list(pieces)[: vocab - len(kinds) - len(_CHARACTERS)], *_CHARACTERS]:
        scores[piece] = -float(len(kinds))
        kinds[piece] = 1
    for i in range(vocab - len(kinds)):
        kinds[f"<unused{i}>"], scores[f"<unused{i}>"] = 5, -1000.0
    if len(kinds) != vocab:
        raise ValueError(f"vocab must be at least {SMALLEST_VOCAB}, not {vocab}")
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": list(kinds),
        "tokenizer.ggml.scores": np.array([scores[text] for text in kinds], np.float32),
        "tokenizer.ggml.token_type": np.array(list(kinds.values()), np.int32),
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
    }


if __name__ == "__main__":
    print(write_tiny_gemma3(sys.argv[1]))
