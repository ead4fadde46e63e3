"""From GGUF metadata to our tokenizer.json, the ids that steer, and the chat template.

Two kinds of tokenizer are read (tokenizer.ggml.model): "gpt2", byte-level BPE, and "llama", SentencePiece's BPE.
"""

from __future__ import annotations

import json
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

from edge_llm.errors import ModelFormatError, UnsupportedModelError, quoted
from edge_llm.export.byte_level import byte_level_parts, read_pre_tokenizer
from edge_llm.export.gguf import GgufFile
from edge_llm.export.gguf_vocabulary import GgufVocabulary, TokenKind, read_vocabulary
from edge_llm.export.sentencepiece import sentencepiece_parts
from edge_llm.model.manifest import TokenSpec
from edge_llm.text.tokenizer import Tokenizer
from edge_llm.text.tokenizer_parts import byte_alphabet

MAX_TEMPLATE_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class ExportedTokenizer:
    """`json` is the text of tokenizer.json; `vocab` the number of tokens; `chat_template` None if the file has none."""

    json: str
    tokens: TokenSpec
    chat_template: str | None
    vocab: int


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
    if model not in ("gpt2", "llama"):
        raise UnsupportedModelError(
            f"the tokenizer {quoted(model)} is not supported",
            hint='supported: "gpt2" (byte-level BPE), "llama" (SentencePiece)',
        )
    pre = read_pre_tokenizer(gguf) if model == "gpt2" else None
    template = _chat_template(gguf)
    vocabulary = read_vocabulary(gguf)
    tokens = _token_spec(gguf, vocabulary, template, add_bos=pre is None or pre.add_bos)
    special = _special_ids(vocabulary, tokens)
    parts = sentencepiece_parts(gguf, vocabulary) if pre is None else byte_level_parts(gguf, pre, vocabulary, special)
    text = _tokenizer_json(vocabulary, special, parts)
    if pre is None:
        Tokenizer.from_json(text)
    else:
        _check_loads(text, [vocabulary.texts[i] for i in special], special)
    return ExportedTokenizer(text, tokens, template, len(vocabulary.texts))


def _chat_template(gguf: GgufFile) -> str | None:
    template = gguf.text("tokenizer.chat_template", default="")
    size = len(template.encode())
    if size > MAX_TEMPLATE_BYTES:
        raise ModelFormatError(f"the chat template has {size} bytes, more than the {MAX_TEMPLATE_BYTES} allowed")
    return template or None


def _token_spec(gguf: GgufFile, vocabulary: GgufVocabulary, template: str | None, *, add_bos: bool) -> TokenSpec:
    """`add_bos` counts where the file does not say.

    `eos` is what the metadata names as end of text, turn or message, and control tokens known to mean the same.
    """
    vocab, kinds = vocabulary.ids, vocabulary.kinds

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
    add_bos = gguf.flag("tokenizer.ggml.add_bos_token", default=add_bos)
    if add_bos and bos is None:
        raise ModelFormatError("the file asks for a first token and does not name it (tokenizer.ggml.bos_token_id)")
    return TokenSpec(bos=bos, eos=eos, add_bos=add_bos, padding=named("padding"))


def _special_ids(vocabulary: GgufVocabulary, tokens: TokenSpec) -> set[int]:
    kinds = (TokenKind.CONTROL, TokenKind.UNKNOWN)
    special = {i for i, kind in enumerate(vocabulary.kinds) if kind in kinds} | set(tokens.eos)
    return special if tokens.bos is None else special | {tokens.bos}


def _tokenizer_json(vocabulary: GgufVocabulary, special: Set[int], parts: dict[str, Any]) -> str:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": i, "content": text, **flags, "special": i in special}
        for i, (text, kind) in enumerate(zip(vocabulary.texts, vocabulary.kinds, strict=True))
        if i in special or kind == TokenKind.USER_DEFINED
    ]
    document = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **parts}
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
