"""Calls written as Python: [weather(city="Paris", days=[1, 2]), now()]. Nothing is evaluated; only literals are read."""

from __future__ import annotations

import re
from typing import Any

MAX_DEPTH = 32

_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_KEYWORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_NUMBER = re.compile(r"[+-]?(\d{1,400})(\.\d{0,400})?([eE][+-]?\d{1,3})?|[+-]?\.\d{1,400}")
_CONSTANTS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_CODE_DIGITS = {"x": 2, "u": 4, "U": 8}


class PythonicReader:
    """Reads one text from its beginning. Every method raises `ValueError` where the text is something else."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def calls(self) -> list[tuple[str, dict[str, Any]]]:
        """(name, arguments) of each call of the list that the whole text is."""
        self._expect("[")
        calls: list[tuple[str, dict[str, Any]]] = []
        while not self._took("]"):
            calls.append((self._match(_NAME), self._arguments()))
            if not self._took(","):
                self._expect("]")
                break
        if self._peek():
            raise ValueError("something follows the calls")
        return calls

    def _arguments(self) -> dict[str, Any]:
        self._expect("(")
        given: dict[str, Any] = {}
        while not self._took(")"):
            name = self._match(_KEYWORD)
            self._expect("=")
            if name in given:
                raise ValueError("an argument stands twice")
            given[name] = self._value(1)
            if not self._took(","):
                self._expect(")")
                break
        return given

    def _value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError("nested too deeply")
        first = self._peek()
        if first in "\"'" and first:
            return self._string(first)
        if first and first in "[(":
            return self._list("]" if first == "[" else ")", depth)
        if first == "{":
            return self._mapping(depth)
        if first.isalpha():
            word = self._match(_KEYWORD)
            if word in _CONSTANTS:
                return _CONSTANTS[word]
            raise ValueError("a name is no literal")
        number = self._match(_NUMBER)
        return int(number) if number.lstrip("+-").isdigit() else float(number)

    def _list(self, closing: str, depth: int) -> list[Any]:
        self._at += 1
        items: list[Any] = []
        while not self._took(closing):
            items.append(self._value(depth + 1))
            if not self._took(","):
                self._expect(closing)
                break
        return items

    def _mapping(self, depth: int) -> dict[str, Any]:
        self._at += 1
        made: dict[str, Any] = {}
        while not self._took("}"):
            quote = self._peek()
            if quote not in ("'", '"'):
                raise ValueError("a key is no text")
            key = self._string(quote)
            self._expect(":")
            made[key] = self._value(depth + 1)
            if not self._took(","):
                self._expect("}")
                break
        return made

    def _string(self, quote: str) -> str:
        self._at += 1
        parts: list[str] = []
        while True:
            character = self._next()
            if character == quote:
                return "".join(parts)
            parts.append(self._escaped() if character == "\\" else character)

    def _escaped(self) -> str:
        character = self._next()
        if character in _CODE_DIGITS:
            digits = self._text[self._at : self._at + _CODE_DIGITS[character]]
            if len(digits) < _CODE_DIGITS[character] or not all(c in "0123456789abcdefABCDEF" for c in digits):
                raise ValueError("half an escape")
            self._at += len(digits)
            return chr(int(digits, 16))
        return _ESCAPES.get(character, character if character in "\\'\"" else "\\" + character)

    # -- places in the text

    def _peek(self) -> str:
        """The next character that is no white space; nothing at the end."""
        match = _SPACE.match(self._text, self._at)
        assert match is not None
        self._at = match.end()
        return self._text[self._at : self._at + 1]

    def _next(self) -> str:
        if self._at >= len(self._text):
            raise ValueError("the text ends too soon")
        self._at += 1
        return self._text[self._at - 1]

    def _took(self, sign: str) -> bool:
        if self._peek() != sign:
            return False
        self._at += 1
        return True

    def _expect(self, sign: str) -> None:
        if not self._took(sign):
            raise ValueError(f"{sign} is missing")

    def _match(self, pattern: re.Pattern[str]) -> str:
        self._peek()
        match = pattern.match(self._text, self._at)
        if match is None:
            raise ValueError("something else is expected")
        self._at = match.end()
        return match[0]
