"""The parts of a tokenizer.json that we run, built one by one from an allow-list: a file is hostile until then.

Byte-pair encoding only, over bytes written in the byte alphabet (GPT-2 and its kin) or over characters with byte
fallback (SentencePiece and its kin). Patterns are known ones only: a stranger's pattern could take for ever to match.

A model of type "SentencePiece" is our importer's own: `pieces`, texts by id; their `ranks`; `space_prefix`, true or false.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from edge_llm.errors import ModelFormatError, UnsupportedModelError, quoted
from edge_llm.text.sentencepiece import BYTE_PIECES, SPACE, SentencePieceEncoder

_MAX_LITERAL = 16
_KEPT_WORDS = 1000
"""that the library keeps once it has encoded them, for each thread that calls it: by default ten times as many, in 4 MB"""


def _words(digits: str) -> str:
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


KNOWN_PATTERNS = frozenset(
    (
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",  # GPT-2
        _words(r"\p{N}{1,3}"),  # Llama 3
        _words(r"\p{N}"),  # Qwen 2
        r"\p{N}+",
        r"\p{N}{1,3}",
        "[0-9][0-9][0-9]",
        r"[\p{P}\$\+<=>\^~\|]+",
    )
)
"""patterns of well-known models, each of which takes time linear in the text"""

_BYTE_OF_PIECE = {piece: bytes([byte]) for byte, piece in enumerate(BYTE_PIECES)}


class Encoder(Protocol):
    """Gives the ids of a text; `begins` is False where it goes on from other text."""

    def __call__(self, text: str, *, begins: bool = True) -> list[int]: ...


def build_encoder(
    document: Mapping[str, Any], vocab: Mapping[str, int], gone: Collection[str], whole: Mapping[str, int]
) -> Encoder:
    """The encoder of a tokenizer.json without its added tokens, but for ids by text of those that it is to keep `whole`.

    `vocab` is its `vocabulary`; the texts `gone` never come out.

    Raises `UnsupportedModelError`, naming the part, for what we do not run, and `ModelFormatError` for what cannot be.
    """
    if _is_sentencepiece(document):
        return _sentencepiece(document, vocab, gone, whole)
    from tokenizers import AddedToken, Tokenizer

    core = Tokenizer(_model(_part(document, "model"), vocab, gone, whole))
    if document.get("normalizer"):
        core.normalizer = _normalizer(_part(document, "normalizer"))
    if document.get("pre_tokenizer"):
        core.pre_tokenizer = _pre_tokenizer(_part(document, "pre_tokenizer"))
    core.add_tokens([AddedToken(text, normalized=False) for text in whole])

    # one text at a time: threads of the library would only be in the way of those that compute, and of a fork
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    def encode(text: str, *, begins: bool = True) -> list[int]:
        # the one call that lets other threads of Python run meanwhile, and it notes no offsets
        ids: list[int] = core.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    return encode


def vocabulary(document: Mapping[str, Any]) -> dict[str, int]:
    """Ids by the text of the token."""
    if _is_sentencepiece(document):
        pieces = _part(document, "model").get("pieces")
        if not isinstance(pieces, list) or set(map(type, pieces)) != {str}:
            raise ModelFormatError("tokenizer.json has no vocabulary of pieces")
        ids = {piece: i for i, piece in enumerate(pieces)}
        if len(ids) < len(pieces):
            raise ModelFormatError("tokenizer.json has a piece twice")
        return ids
    vocab = _part(document, "model").get("vocab")
    if not isinstance(vocab, dict) or set(map(type, vocab.values())) != {int}:
        raise ModelFormatError("tokenizer.json has no vocabulary of ids by token")
    return vocab


def bytes_of_tokens(document: Mapping[str, Any]) -> Callable[[str], bytes]:
    """What gives the bytes of a token from its text in the vocabulary."""
    if _is_sentencepiece(document):
        return _from_fallback
    decoder = document.get("decoder") or {}
    kinds = _kinds(decoder, "decoders")
    if kinds == ["ByteLevel"] or (not kinds and "ByteLevel" in _kinds(document.get("pre_tokenizer"), "pretokenizers")):
        alphabet = {character: byte for byte, character in enumerate(byte_alphabet())}
        return lambda text: _from_alphabet(text, alphabet)
    if kinds == ["Replace", "ByteFallback", "Fuse"]:
        return _from_fallback
    raise UnsupportedModelError(f"the tokenizer's decoder {quoted('+'.join(kinds))} is not supported")


def byte_alphabet() -> list[str]:
    """The character that stands for each byte: itself if printable Latin-1, else the next from U+0100 (as GPT-2)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _from_alphabet(text: str, alphabet: Mapping[str, int]) -> bytes:
    try:
        return bytes([alphabet[character] for character in text])
    except KeyError:  # not written in the alphabet: the text itself
        return text.encode("utf-8", "replace")


def _from_fallback(text: str) -> bytes:
    byte = _BYTE_OF_PIECE.get(text)
    return text.replace(SPACE, " ").encode("utf-8", "replace") if byte is None else byte


def _kinds(part: Any, children: str) -> list[str]:
    if not isinstance(part, dict) or not part:
        return []
    if part.get("type") == "Sequence":
        return [kind for child in _children(part, children) for kind in _kinds(child, children)]
    return [str(part.get("type"))]


def _part(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    part = document.get(name)
    if not isinstance(part, dict):
        raise ModelFormatError(f"tokenizer.json has no sound {name}")
    return part


def _children(part: Mapping[str, Any], name: str) -> list[Any]:
    children = part.get(name)
    if not isinstance(children, list) or any(isinstance(c, dict) and c.get("type") == "Sequence" for c in children):
        raise ModelFormatError(f"tokenizer.json has a Sequence without sound {name}")
    return children


def _unsupported(what: str, part: Any) -> UnsupportedModelError:
    kind = part.get("type") if isinstance(part, dict) else part
    return UnsupportedModelError(f"the tokenizer's {what} {quoted(str(kind))} is not supported with these settings")


def _is_sentencepiece(document: Mapping[str, Any]) -> bool:
    return _part(document, "model").get("type") == "SentencePiece"


def _sentencepiece(
    document: Mapping[str, Any], vocab: Mapping[str, int], gone: Collection[str], whole: Mapping[str, int]
) -> Encoder:
    part = _part(document, "model")
    ranks, space_prefix = part.get("ranks"), part.get("space_prefix")
    if not isinstance(ranks, list) or set(map(type, ranks)) != {int} or len(ranks) != len(vocab):
        raise ModelFormatError("tokenizer.json does not have a rank for each piece")
    if not isinstance(space_prefix, bool) or any(document.get(name) for name in ("normalizer", "pre_tokenizer")):
        raise _unsupported("model", part)
    return SentencePieceEncoder(vocab, ranks, whole=whole, gone=gone, space_prefix=space_prefix)


def _model(part: Mapping[str, Any], vocab: Mapping[str, int], gone: Collection[str], whole: Mapping[str, int]) -> Any:
    from tokenizers import models

    unset = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    if part.get("type", "BPE") != "BPE" or any(part.get(name) for name in unset):
        raise _unsupported("model", part)
    # A text in `whole` that had no id here would get one of the library's own.
    kept = {text: i for text, i in vocab.items() if text not in gone} | dict(whole)
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in part["merges"])
    unknown = part.get("unk_token")
    return models.BPE(
        vocab=kept,
        merges=[(a, b) for a, b in pairs if not (a in gone or b in gone or a + b in gone)],
        unk_token=None if unknown in gone else unknown,
        fuse_unk=bool(part.get("fuse_unk")),
        byte_fallback=bool(part.get("byte_fallback")),
        ignore_merges=bool(part.get("ignore_merges")),
        cache_capacity=_KEPT_WORDS,
    )


def _normalizer(part: Any) -> Any:
    from tokenizers import normalizers

    match part:
        case {"type": "Sequence", "normalizers": list()}:
            return normalizers.Sequence([_normalizer(child) for child in _children(part, "normalizers")])
        case {"type": "NFC"}:
            return normalizers.NFC()
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if _short(old, new):
            return normalizers.Replace(old, new)
    raise _unsupported("normalizer", part)


def _pre_tokenizer(part: Any) -> Any:
    from tokenizers import Regex, pre_tokenizers

    match part:
        case {"type": "Sequence"}:
            return pre_tokenizers.Sequence([_pre_tokenizer(child) for child in _children(part, "pretokenizers")])
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=part.get("use_regex", True) is True)
        case {"type": "Digits"}:
            return pre_tokenizers.Digits(individual_digits=part.get("individual_digits") is True)
        case {"type": "Split", "pattern": {"Regex": str(text)}} if text in KNOWN_PATTERNS:
            return pre_tokenizers.Split(Regex(text), _behavior(part), part.get("invert") is True)
        case {"type": "Split", "pattern": {"String": str(text)}} if _short(text):
            return pre_tokenizers.Split(text, _behavior(part), part.get("invert") is True)
    raise _unsupported("pre-tokenizer", part)


def _behavior(part: Mapping[str, Any]) -> str:
    """ "MergedWithPrevious" of the file is "merged_with_previous" of the library."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", str(part.get("behavior"))).lower()


def _short(*texts: str) -> bool:
    return all(0 < len(text) <= _MAX_LITERAL for text in texts)
