"""Text from models, files and servers, made safe for a terminal.

A terminal obeys characters that nobody sees: escape sequences move the cursor, set the clipboard or forge a prompt;
bidirectional controls and tag characters hide or reorder text. Each code point is judged alone, so cutting the text
anywhere cannot change the result. Ordinary text passes as it is.

    kept       what Python counts as printable, new line, tab, spaces; emoji that this Python does not know yet
    shown      control characters as their pictures (ESC is ␛), U+2028 and U+2029 as new lines; all else that is not
               printable as U+FFFD: C1 controls, bidirectional overrides, tags, private use, unassigned, lone surrogates
    dropped    characters that look like nothing and only shape their neighbours: zero-width spaces and joiners,
               variation selectors, directional marks, soft hyphens. An emoji made of several shows its parts.

`\\r\\n` becomes `\\n`. Only what a terminal shows is changed, never what is stored or piped.
"""

from __future__ import annotations

import unicodedata
from functools import lru_cache

REPLACEMENT = "\ufffd"
_PICTURES = 0x2400  # U+2400 + c is the picture of control character c
_PICTURE_OF_DELETE = "\u2421"

_DROPPED = frozenset(
    map(
        chr,
        (
            *(0x00AD, 0x034F, 0x061C, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x3164, 0xFEFF, 0xFFA0),
            *range(0x180B, 0x1810),  # Mongolian variation selectors
            *range(0x200B, 0x2010),  # zero-width space and joiners, directional marks
            *range(0x2060, 0x2065),  # word joiner, invisible operators
            *range(0xFE00, 0xFE10),  # variation selectors
            *range(0xE0100, 0xE01F0),
        ),
    )
)
# Signs that Unicode counts as format characters although they are seen (Arabic, Syriac and Kaithi number signs).
_SEEN_FORMAT = frozenset("\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd")
_EMOJI = range(0x1F000, 0x1FC00)


def clean(text: str) -> str:
    """`text` as a terminal may show it, of several lines."""
    return _visible(text.replace("\r\n", "\n"))


def clean_line(text: str) -> str:
    """`text` as a terminal may show it on one line: new lines are shown as ␊, tabs as a space."""
    return clean(text).replace("\n", "\u240a").replace("\t", " ")


class TerminalFilter:
    """`clean` for text that comes in chunks: the outputs joined are what `clean` makes of the whole."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, chunk: str) -> str:
        text = self._held + chunk
        self._held = "\r" if text.endswith("\r") else ""
        return clean(text.removesuffix("\r"))

    def flush(self) -> str:
        held, self._held = self._held, ""
        return _visible(held)


def _visible(text: str) -> str:
    if text.isascii() and text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return "".join(map(_shown, text))


@lru_cache(maxsize=8192)
def _shown(character: str) -> str:
    code = ord(character)
    if character in _DROPPED:
        return ""
    if character in "\n\t" or character.isprintable() or character in _SEEN_FORMAT:
        return character
    if code < 0x20:
        return chr(_PICTURES + code)
    if code == 0x7F:
        return _PICTURE_OF_DELETE
    if character in "\u2028\u2029":
        return "\n"
    if unicodedata.category(character) == "Zs" or (code in _EMOJI and unicodedata.category(character) == "Cn"):
        return character
    return REPLACEMENT
