"""Added tokens of a tokenizer.json: those that steer, and those that only keep a piece of text whole."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from edge_llm.errors import ModelFormatError

MAX_ID = 1 << 22
MAX_ADDED = 16_384
MAX_ADDED_CHARACTERS = 1 << 18
"""of all added tokens together; some vocabularies have thousands"""
MAX_CONTENT_CHARACTERS = 1 << 13
"""of those that are content: each place of a text may be compared with all of them; Gemma's have 2,000"""
MAX_ADDED_TEXT = 256

_MARKUP = re.compile(
    r"</?(?:a|b|bbox|blockquote|body|caption|code|div|em|footer|h[1-6]|html|i|iframe|img|li|s|span|strong|sub|sup"
    r"|table|tbody|td|tfoot|th|thead|tr|u|ul)>"
)
"""tags of web pages, as Gemma's vocabulary has them"""


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token found by its text before anything else. `lstrip` and `rstrip` take white space beside it along."""

    id: int
    text: str
    special: bool
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False

    @property
    def is_content(self) -> bool:
        """Whether it is text as any other, so that anybody's words may hold it: a run of white space, or a tag of a web page.

        Every other added token may steer a model, also one that the file does not call special, as `<think>`.
        """
        return not self.special and (self.text.isspace() or _MARKUP.fullmatch(self.text) is not None)


def added_tokens(document: Mapping[str, Any]) -> list[AddedToken]:
    """The added tokens of a tokenizer.json. Raises `ModelFormatError` for unsound ones, or too many."""
    entries = document.get("added_tokens") or ()
    if len(entries) > MAX_ADDED:
        raise ModelFormatError(f"tokenizer.json has more than {MAX_ADDED} added tokens")
    tokens = [_added_token(entry) for entry in entries]
    if len({token.id for token in tokens}) < len(tokens) or len({token.text for token in tokens}) < len(tokens):
        raise ModelFormatError("tokenizer.json has an added token twice")
    if sum(len(token.text) for token in tokens) > MAX_ADDED_CHARACTERS:
        raise ModelFormatError(f"tokenizer.json has more than {MAX_ADDED_CHARACTERS} characters of added tokens")
    if sum(len(token.text) for token in tokens if token.is_content) > MAX_CONTENT_CHARACTERS:
        raise ModelFormatError(
            f"tokenizer.json has more than {MAX_CONTENT_CHARACTERS} characters of white space tokens"
        )
    return tokens


class TextFinder:
    """Finds texts inside a text; of those that start at one place the longest, as a pattern of thousands would, but at once."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = frozenset(texts)
        self._lengths = sorted({len(text) for text in self._texts}, reverse=True)
        first = re.escape("".join(sorted({text[0] for text in self._texts})))
        self._first = re.compile(f"[{first}]" if first else "(?!)")

    def spans(self, text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
        """(start, end) of each found in text[start:end], in order, without overlap."""
        while match := self._first.search(text, start, end):
            start = match.start()
            length = next((n for n in self._lengths if start + n <= end and text[start : start + n] in self._texts), 0)
            if length:
                yield start, start + length
            start += length or 1


def _added_token(entry: Any) -> AddedToken:
    token_id, text = entry["id"], entry["content"]
    sound_id = type(token_id) is int and 0 <= token_id <= MAX_ID
    if not sound_id or not isinstance(text, str) or not 0 < len(text) <= MAX_ADDED_TEXT:
        raise ModelFormatError("tokenizer.json has an unsound added token")
    flags = {name: entry.get(name) is True for name in ("special", "lstrip", "rstrip", "single_word")}
    return AddedToken(token_id, text, **flags)
