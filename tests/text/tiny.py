"""Tokenizers small enough to read: byte-level BPE and SentencePiece, with markers as real models have them."""

from __future__ import annotations

import json
from typing import Any

from edge_llm.text.sentencepiece import BYTE_PIECES
from edge_llm.text.tokenizer import Tokenizer
from edge_llm.text.tokenizer_parts import byte_alphabet

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin|>",
    "<|finish|>",
    "<|end|>",
    "<|user|>",
    "<|system|>",
)
SPECIAL += ("<|assistant|>", "<|tool|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")
SPECIAL += ("<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "[TOOL_CALLS]", "<|turn>", "<turn|>")
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "\u2581pad")
"""added tokens that are not special, as `<think>` is in Qwen's tokenizers"""

MERGES = (
    ("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("Ġw", "o"), ("Ġ", "Ġ"), ("Ċ", "Ċ"), ("Ġ", "."),
    ("<", "|"), ("|", ">"), ("i", "m"), ("t", "h"), ("i", "n"), ("in", "k"), ("th", "ink"), ("e", "n"), ("en", "d"),
    ("<", "think"), ("<think", ">"), ("ð", "Ł"), ("ðŁ", "ĺ"), ("Ģ", "Ġ"),
)  # fmt: skip


def document(**changes: Any) -> dict[str, Any]:
    """A tokenizer.json as a mapping; `<think>` could be made of its merges, were it not taken out."""
    texts = [*SPECIAL, *byte_alphabet(), *dict.fromkeys(left + right for left, right in MERGES)]
    vocab = {text: i for i, text in enumerate(texts)}
    ids = dict(vocab)
    for marker in MARKERS:
        ids.setdefault(marker, len(ids))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": ids[t], "content": t, "special": t in SPECIAL, **flags} for t in (*SPECIAL, *MARKERS)]
    made = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "vocab": vocab, "merges": [f"{a} {b}" for a, b in MERGES]},
    }
    return made | changes


WHOLE = ("\n", "\n\n", "  ", "   ", "\t", "<b>", "</b>")
"""added tokens of the SentencePiece vocabulary that are text as any other"""

_WORDS = ("▁hello", "▁the", "▁im", "▁think", "think", "▁end", "</", "<|", "|>", "in", "日本", "_end")


def sentencepiece_document(**changes: Any) -> dict[str, Any]:
    """A tokenizer.json as our importer writes it for SentencePiece; its pieces lead up to `<think>`, were it not control."""
    beginnings = dict.fromkeys(word[:end] for word in _WORDS for end in range(2, len(word) + 1))
    markers = [marker for marker in MARKERS if "▁" not in marker]  # a space, to SentencePiece
    characters = dict.fromkeys("▁<|>/_" + "".join(_WORDS) + "aeioux.")
    pieces = [*SPECIAL, *BYTE_PIECES, *WHOLE, *sorted(beginnings, key=len), "<think", *markers, *characters]
    pieces = list(dict.fromkeys(pieces))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": pieces.index(text), "content": text, "special": text in SPECIAL, **flags}
        for text in (*SPECIAL, *markers, *WHOLE)
    ]
    model = {"type": "SentencePiece", "space_prefix": False, "pieces": pieces, "ranks": list(range(len(pieces)))}
    return {"version": "1.0", "added_tokens": added, "model": model} | changes


def tiny_sentencepiece(**changes: Any) -> Tokenizer:
    return Tokenizer.from_json(json.dumps(sentencepiece_document(**changes)))


def tiny_tokenizer(**changes: Any) -> Tokenizer:
    return Tokenizer.from_json(json.dumps(document(**changes)))


def oracle(**changes: Any) -> Any:
    """The `tokenizers` library's own reading of the same file, in which text becomes control."""
    import tokenizers

    return tokenizers.Tokenizer.from_str(json.dumps(document(**changes)))
