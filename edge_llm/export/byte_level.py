"""Byte-level BPE (tokenizer.ggml.model "gpt2") as a tokenizer.json has it.

How text is cut before merging is named by tokenizer.ggml.pre and stands in `PRE_TOKENIZERS`, as the models' own
tokenizer.json files have it; a name that is not there is an error, since a wrong cut gives plausible but wrong tokens.
Nothing of a file becomes a pattern: all patterns are ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from edge_llm.errors import ModelFormatError, UnsupportedModelError, quoted
from edge_llm.export.gguf import GgufFile
from edge_llm.export.gguf_vocabulary import GgufVocabulary, TokenKind
from edge_llm.text.tokenizer_parts import byte_alphabet


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text is cut before merging: `steps` (tokenizer.json entries) in turn, then the bytes of each piece.

    `ignore_merges`: a piece that is a token is taken whole. `add_bos`: what counts when the file does not say.
    """

    steps: tuple[dict[str, Any], ...]
    normalizer: dict[str, Any] | None = None
    ignore_merges: bool = False
    add_bos: bool = False


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _words(digits: str) -> dict[str, Any]:
    """The pattern that Llama 3 and Qwen 2 share, but for the digits that go into one piece."""
    return _split(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_GPT2 = _split(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
_DIGITS = {"type": "Digits", "individual_digits": True}
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}

_GPT2_WORDS = PreTokenizer((_GPT2,))
_SINGLE_DIGITS = PreTokenizer((_DIGITS, _GPT2))
_LLAMA3 = PreTokenizer((_words(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer((_words(r"\p{N}"),), normalizer={"type": "NFC"})
# llama.cpp's own cut for files of unknown origin that say "default"; no model was trained with it.
_DEFAULT = PreTokenizer((_split(r"[\p{P}\$\+<=>\^~\|]+"), _GPT2, _split(r"\p{N}+"), _split("[0-9][0-9][0-9]")))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": _DEFAULT,
    "gpt-2": _GPT2_WORDS,
    "phi-2": _GPT2_WORDS,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": PreTokenizer(_QWEN2.steps),
}
"""by tokenizer.ggml.pre"""


def read_pre_tokenizer(gguf: GgufFile) -> PreTokenizer:
    """The one that the file names. Raises `UnsupportedModelError` for a name that is not known, or none."""
    name = gguf.text("tokenizer.ggml.pre", default="")
    pre = PRE_TOKENIZERS.get(name)
    if pre is None:
        problem = f"the pre-tokenizer {quoted(name)} is not supported"
        raise UnsupportedModelError(
            problem if name else "the file does not name its pre-tokenizer",
            hint=f"supported: {', '.join(PRE_TOKENIZERS)}",
        )
    return pre


def byte_level_parts(
    gguf: GgufFile, pre: PreTokenizer, vocabulary: GgufVocabulary, special: Set[int]
) -> dict[str, Any]:
    """Entries of tokenizer.json. Raises `ModelFormatError` for a vocabulary or merges that cannot be."""
    if TokenKind.BYTE in vocabulary.kinds:
        raise UnsupportedModelError("byte tokens in a byte-level BPE vocabulary are not supported")
    _check_alphabet(vocabulary)
    merges = _merges(gguf, vocabulary.ids, {vocabulary.texts[i] for i in special})
    return {
        "normalizer": pre.normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*pre.steps, _BYTES]},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        # A byte without a token is left out, as the models' own tokenizers do: no token stands for it.
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre.ignore_merges,
            "vocab": vocabulary.ids,
            "merges": merges,
        },
    }


def _check_alphabet(vocabulary: GgufVocabulary) -> None:
    """Normal tokens are written in the byte alphabet, so that each has one meaning in bytes."""
    alphabet = set(byte_alphabet())
    for i, (text, kind) in enumerate(zip(vocabulary.texts, vocabulary.kinds, strict=True)):
        if kind == TokenKind.NORMAL and not alphabet.issuperset(text):
            raise ModelFormatError(f"token {i}, {quoted(text)}, is not written in the byte alphabet")


def _merges(gguf: GgufFile, vocab: Mapping[str, int], special: Set[str]) -> list[str]:
    """The merges as they stand, "left right", each of and to known tokens and none to a special one."""
    merges = gguf.texts("tokenizer.ggml.merges")
    if len(set(merges)) < len(merges):
        raise ModelFormatError("tokenizer.ggml.merges holds the same merge twice")
    for i, merge in enumerate(merges):
        left, space, right = merge.partition(" ")
        if not (left and space and right and left in vocab and right in vocab and left + right in vocab):
            raise ModelFormatError(f"merge {i}, {quoted(merge)}, is not two tokens that make a third")
        if left + right in special:
            raise ModelFormatError(f"merge {i} makes the special token {quoted(left + right)} of ordinary text")
    return merges
