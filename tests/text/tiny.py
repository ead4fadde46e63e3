"""A byte-level BPE tokenizer small enough to read: 256 bytes, some merges, markers as real models have them."""

from __future__ import annotations

import json
from typing import Any

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


def tiny_tokenizer(**changes: Any) -> Tokenizer:
    return Tokenizer.from_json(json.dumps(document(**changes)))


def oracle(**changes: Any) -> Any:
    """The `tokenizers` library's own reading of the same file, in which text becomes control."""
    import tokenizers

    return tokenizers.Tokenizer.from_str(json.dumps(document(**changes)))
