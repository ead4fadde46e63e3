"""A rendered prompt that knows which of its characters the template wrote and which came from the conversation.

Content is never control: only text that the template itself wrote may become a control token. So text is followed
through the template, character by character, by a string of the same length whose characters say where each came from.
An operation that does not keep this record yields plain `str`, which counts as content: losing it is safe.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self, SupportsIndex

from edge_llm.messages import Message

CONTENT = "\0"
"""origin of text that somebody said, or that nobody knows the origin of"""
SCAFFOLD = "\1"
"""origin of text that the template wrote: the only one that may hold control tokens"""
_FIRST_MESSAGE = 2
_LAST_ORIGIN = 0x10FFFF


_RUN = re.compile(r"(.)\1*", re.DOTALL)


class PromptText(str):
    """A `str` that remembers the origin of each of its characters, and keeps it through what templates do with text."""

    __slots__ = ("origins",)
    origins: str

    def __new__(cls, text: str, origins: str) -> Self:
        made = super().__new__(cls, text)
        made.origins = origins
        return made

    @classmethod
    def of(cls, text: str, origin: str) -> Self:
        return cls(text, origin * len(text))

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> PromptText:
        return concat((self, other))

    def __radd__(self, other: str) -> PromptText:
        return concat((other, self))

    def __mul__(self, count: SupportsIndex) -> PromptText:
        return PromptText(str.__mul__(self, count), self.origins * count)

    __rmul__ = __mul__

    def __getitem__(self, key: SupportsIndex | slice) -> PromptText:
        return PromptText(str.__getitem__(self, key), self.origins[key])

    def _cut(self, start: int, length: int) -> PromptText:
        return self[start : start + length]

    def _cut_each(self, pieces: Iterable[str], separator: str | None) -> list[Any]:
        """The pieces of a split, each with its origins."""
        return [
            PromptText(piece, self.origins[start : start + len(piece)])
            for start, piece in self._placed(pieces, separator)
        ]

    def _placed(self, pieces: Iterable[str], separator: str | None) -> Iterator[tuple[int, str]]:
        """(start, piece) of each piece of a split."""
        start = 0
        for piece in pieces:
            if separator is None:  # split at white space, of which there may be any amount
                start = self.find(piece, start)
            yield start, piece
            start += len(piece) + len(separator or "")

    def lstrip(self, chars: str | None = None, /) -> PromptText:
        kept = len(str.lstrip(self, chars))
        return self._cut(len(self) - kept, kept)

    def rstrip(self, chars: str | None = None, /) -> PromptText:
        return self._cut(0, len(str.rstrip(self, chars)))

    def strip(self, chars: str | None = None, /) -> PromptText:
        return self.rstrip(chars).lstrip(chars)

    def removeprefix(self, prefix: str, /) -> PromptText:
        return self[len(prefix) :] if self.startswith(prefix) else self

    def removesuffix(self, suffix: str, /) -> PromptText:
        return self[: len(self) - len(suffix)] if self.endswith(suffix) else self

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Any]:
        return self._cut_each(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Any]:
        return self._cut_each(str.rsplit(self, sep, maxsplit), sep)

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        if not old:
            return str.replace(self, old, new, count)
        pieces = str.split(self, old, count)
        origins = (self.origins[start : start + len(piece)] for start, piece in self._placed(pieces, old))
        return PromptText(str.join(new, pieces), origins_of(new).join(origins))

    def upper(self) -> str:
        return self._recased(str.upper(self))

    def lower(self) -> str:
        return self._recased(str.lower(self))

    def title(self) -> str:
        return self._recased(str.title(self))

    def capitalize(self) -> str:
        return self._recased(str.capitalize(self))

    def _recased(self, text: str) -> str:
        return PromptText(text, self.origins) if len(text) == len(self) else text


def origin_of_message(index: int) -> str:
    """The origin of the content of a conversation's message; past what characters can count, content of nobody's."""
    number = _FIRST_MESSAGE + index
    return chr(number) if number <= _LAST_ORIGIN else CONTENT


def origins_of(text: str) -> str:
    return text.origins if isinstance(text, PromptText) else CONTENT * len(text)


def concat(parts: Iterable[str]) -> PromptText:
    """The parts in a row, each character with its origin."""
    parts = list(parts)
    return PromptText("".join(parts), "".join(map(origins_of, parts)))


def join(separator: str, parts: Iterable[str]) -> PromptText:
    """As `separator.join(parts)`, each character with its origin."""
    parts = list(parts)
    return PromptText(str.join(separator, parts), origins_of(separator).join(map(origins_of, parts)))


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """The text of a prompt, and as many characters that say where each came from (CONTENT, SCAFFOLD, or a message).

    `messages` are those of the conversation. Nothing is hidden in `text`: it is what the model is shown.
    """

    text: str
    origins: str = field(repr=False)
    messages: tuple[Message, ...] = ()

    def __post_init__(self) -> None:
        if len(self.text) != len(self.origins):
            raise ValueError("each character needs one origin")

    def runs(self) -> Iterator[tuple[int, int, str]]:
        """(start, end, origin) of each longest run of one origin, in order."""
        for run in _RUN.finditer(self.origins):
            yield run.start(), run.end(), run[1]

    def message_of(self, origin: str) -> int | None:
        """Index of the message that characters of this origin belong to."""
        index = ord(origin) - _FIRST_MESSAGE
        return index if 0 <= index < len(self.messages) else None
