"""The tokens of a GGUF file, whatever kind of tokenizer they are for: texts, kinds, and which of them are special."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from edge_llm.errors import ModelFormatError, quoted
from edge_llm.export.gguf import GgufFile


class TokenKind(IntEnum):
    """Values of tokenizer.ggml.token_type (GGUF specification)."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """Texts and kinds by id, ids by text."""

    texts: Sequence[str]
    kinds: Sequence[int]
    ids: Mapping[str, int]


def read_vocabulary(gguf: GgufFile) -> GgufVocabulary:
    """Raises `ModelFormatError` for tokens without text, twice the same, or of no known kind."""
    texts = gguf.texts("tokenizer.ggml.tokens")
    kinds: list[int] = gguf.integers("tokenizer.ggml.token_type").tolist()
    if len(kinds) != len(texts):
        raise ModelFormatError(f"the file has {len(texts)} tokens and {len(kinds)} token types")
    unknown = set(kinds) - set(TokenKind)
    if unknown:
        raise ModelFormatError(f"tokenizer.ggml.token_type holds {min(unknown)}, which is no token type")
    ids = {text: i for i, text in enumerate(texts)}
    if len(ids) < len(texts):
        first = next(i for i, text in enumerate(texts) if ids[text] != i)
        raise ModelFormatError(f"tokens {first} and {ids[texts[first]]} are both {quoted(texts[first])}")
    if "" in ids:
        raise ModelFormatError(f"token {ids['']} is empty")
    return GgufVocabulary(texts, kinds, ids)
