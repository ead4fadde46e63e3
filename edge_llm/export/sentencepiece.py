"""SentencePiece's byte-pair encoding (tokenizer.ggml.model "llama") as our tokenizer.json has it.

Merging follows the pieces' scores, the highest first; only the order counts, which is what is written (`ranks`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from edge_llm.errors import ModelFormatError
from edge_llm.export.gguf import GgufFile
from edge_llm.export.gguf_vocabulary import GgufVocabulary, TokenKind
from edge_llm.text.sentencepiece import BYTE_PIECES


def sentencepiece_parts(gguf: GgufFile, vocabulary: GgufVocabulary) -> dict[str, Any]:
    """Entries of tokenizer.json. Raises `ModelFormatError` for scores or byte tokens that cannot be."""
    scores = gguf.reals("tokenizer.ggml.scores")
    if scores.shape != (len(vocabulary.texts),) or not np.isfinite(scores).all():
        raise ModelFormatError("tokenizer.ggml.scores does not hold a finite number for each token")
    found = {text for text, kind in zip(vocabulary.texts, vocabulary.kinds, strict=True) if kind == TokenKind.BYTE}
    if found != set(BYTE_PIECES):
        raise ModelFormatError(f"the file has {len(found)} byte tokens, not <0x00> to <0xFF>")
    return {
        "model": {
            "type": "SentencePiece",
            "space_prefix": gguf.flag("tokenizer.ggml.add_space_prefix", default=True),
            "pieces": vocabulary.texts,
            "ranks": np.unique(-scores, return_inverse=True)[1].tolist(),
        }
    }
