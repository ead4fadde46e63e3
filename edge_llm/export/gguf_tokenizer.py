"""From GGUF metadata to a tokenizer.json for the `tokenizers` library, the ids that steer, and the chat template.

Byte-level BPE only (tokenizer.ggml.model "gpt2"). How text is cut before merging is named by tokenizer.ggml.pre and
stands in `PRE_TOKENIZERS`, as the models' own tokenizer.json files have it; a name that is not there is an error, since
a wrong cut gives plausible but wrong tokens. Nothing of a file becomes a pattern: all patterns are ours.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from edge_llm.errors import ModelFormatError, UnsupportedModelError, quoted
from edge_llm.export.gguf import GgufFile
from edge_llm.model.manifest import TokenSpec
from edge_llm.text.tokenizer_parts import byte_alphabet

MAX_TEMPLATE_BYTES = 256 << 10


class TokenKind(IntEnum):
    """Values of tokenizer.ggml.token_type (GGUF specification)."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text is cut before merging: `steps` (tokenizer.json entries) in turn, then the bytes of each piece.

    `ignore_merges`: a piece that is a token is taken whole. `add_bos`: what counts when the file does not say.
    """

    steps: tuple[dict[str, Any], ...]
    normalizer: dict[str, Any] | None = None
    ignore_merges: bool = False
    add_bos: bool = False


@dataclass(frozen=True, slots=True)
class ExportedTokenizer:
    """`json` is the text of tokenizer.json; `vocab` the number of tokens; `chat_template` None if the file has none."""

    json: str
    tokens: TokenSpec
    chat_template: str | None
    vocab: int


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

_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>")
"""tokens that part the documents of the training text: what follows one has nothing to do with what was before"""

_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>")
"""tokens that end a turn where the chat template uses them"""


def export_tokenizer(gguf: GgufFile) -> ExportedTokenizer:
    """The tokenizer of an open file.

    Raises `UnsupportedModelError`, with the name, for another kind of tokenizer or an unknown pre-tokenizer, and
    `ModelFormatError` for a vocabulary, merges, ids or template that cannot be.
    """
    model = gguf.text("tokenizer.ggml.model")
    if model != "gpt2":
        raise UnsupportedModelError(
            f"the tokenizer {quoted(model)} is not supported", hint='supported: "gpt2" (byte-level BPE)'
        )
    pre_name = gguf.text("tokenizer.ggml.pre", default="")
    pre = PRE_TOKENIZERS.get(pre_name)
    if pre is None:
        problem = f"the pre-tokenizer {quoted(pre_name)} is not supported"
        raise UnsupportedModelError(
            problem if pre_name else "the file does not name its pre-tokenizer",
            hint=f"supported: {', '.join(PRE_TOKENIZERS)}",
        )
    template = _chat_template(gguf)
    texts = gguf.texts("tokenizer.ggml.tokens")
    kinds = _token_kinds(gguf, len(texts))
    vocab = _vocabulary(texts, kinds)
    tokens = _token_spec(gguf, pre, vocab, kinds, template)
    special = {i for i, kind in enumerate(kinds) if kind in (TokenKind.CONTROL, TokenKind.UNKNOWN)} | set(tokens.eos)
    if tokens.bos is not None:
        special.add(tokens.bos)
    merges = _merges(gguf, vocab, {texts[i] for i in special})
    added = [
        {
            "id": i,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": i in special,
        }
        for i, text in enumerate(texts)
        if i in special or kinds[i] == TokenKind.USER_DEFINED
    ]
    text = _tokenizer_json(pre, vocab, merges, added)
    _check_loads(text, [texts[i] for i in special], special)
    return ExportedTokenizer(text, tokens, template, len(texts))


def _chat_template(gguf: GgufFile) -> str | None:
    template = gguf.text("tokenizer.chat_template", default="")
    size = len(template.encode())
    if size > MAX_TEMPLATE_BYTES:
        raise ModelFormatError(f"the chat template has {size} bytes, more than the {MAX_TEMPLATE_BYTES} allowed")
    return template or None


def _token_kinds(gguf: GgufFile, count: int) -> list[int]:
    kinds: list[int] = gguf.integers("tokenizer.ggml.token_type").tolist()
    if len(kinds) != count:
        raise ModelFormatError(f"the file has {count} tokens and {len(kinds)} token types")
    unknown = set(kinds) - set(TokenKind)
    if unknown:
        raise ModelFormatError(f"tokenizer.ggml.token_type holds {min(unknown)}, which is no token type")
    if TokenKind.BYTE in kinds:
        raise UnsupportedModelError("byte tokens in a byte-level BPE vocabulary are not supported")
    return kinds


def _vocabulary(texts: Sequence[str], kinds: Sequence[int]) -> dict[str, int]:
    """Ids by text. Normal tokens are written in the byte alphabet, so that each has one meaning in bytes."""
    vocab = {text: i for i, text in enumerate(texts)}
    if len(vocab) < len(texts):
        first = next(i for i, text in enumerate(texts) if vocab[text] != i)
        raise ModelFormatError(f"tokens {first} and {vocab[texts[first]]} are both {quoted(texts[first])}")
    if "" in vocab:
        raise ModelFormatError(f"token {vocab['']} is empty")
    alphabet = set(byte_alphabet())
    for i, (text, kind) in enumerate(zip(texts, kinds, strict=True)):
        if kind == TokenKind.NORMAL and not alphabet.issuperset(text):
            raise ModelFormatError(f"token {i}, {quoted(text)}, is not written in the byte alphabet")
    return vocab


def _token_spec(
    gguf: GgufFile, pre: PreTokenizer, vocab: dict[str, int], kinds: Sequence[int], template: str | None
) -> TokenSpec:
    """`eos` is what the metadata names as end of text, turn or message, and control tokens known to mean the same."""

    def named(role: str) -> int | None:
        key = f"tokenizer.ggml.{role}_token_id"
        return gguf.integer(key, 0, len(vocab) - 1) if key in gguf.metadata else None

    ends = [named("eos"), named("eot"), named("eom")]
    known = [*_END_OF_TEXT, *(text for text in _END_OF_TURN if text in (template or ""))]
    ends += [vocab[text] for text in known if text in vocab and kinds[vocab[text]] == TokenKind.CONTROL]
    eos = tuple(dict.fromkeys(i for i in ends if i is not None))
    if not eos:
        raise ModelFormatError("the file names no end token, so no answer would end")
    bos = named("bos")
    add_bos = gguf.flag("tokenizer.ggml.add_bos_token", default=pre.add_bos)
    if add_bos and bos is None:
        raise ModelFormatError("the file asks for a first token and does not name it (tokenizer.ggml.bos_token_id)")
    return TokenSpec(bos=bos, eos=eos, add_bos=add_bos, padding=named("padding"))


def _merges(gguf: GgufFile, vocab: dict[str, int], special: set[str]) -> list[str]:
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


def _tokenizer_json(pre: PreTokenizer, vocab: dict[str, int], merges: list[str], added: list[dict[str, Any]]) -> str:
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
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
            "vocab": vocab,
            "merges": merges,
        },
    }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")) + "\n"


def _check_loads(text: str, specials: Sequence[str], special_ids: set[int]) -> None:
    """The library takes it, and no special token can be written as plain text, be it by its name or by its bytes."""
    from tokenizers import Tokenizer

    alphabet = {character: byte for byte, character in enumerate(byte_alphabet())}
    try:
        tokenizer = Tokenizer.from_str(text)
        tokenizer.encode_special_tokens = True
        for special in specials:
            spellings = [special]
            if alphabet.keys() >= set(special):
                spellings.append(bytes(alphabet[character] for character in special).decode("utf-8", "ignore"))
            for spelling in spellings:
                if special_ids.intersection(tokenizer.encode(spelling, add_special_tokens=False).ids):
                    raise ModelFormatError(f"the special token {quoted(special)} can be written as ordinary text")
    except (ModelFormatError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic of the library is no Exception
        raise ModelFormatError(f"the tokenizer cannot be loaded: {quoted(str(error))}") from None
