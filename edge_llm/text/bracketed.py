"""Where a bracketed value of JSON or Python ends, in text that comes in chunks."""

from __future__ import annotations

import string

from edge_llm.text.tool_syntax import CallForm

MAX_CALL_CHARACTERS = 1 << 20
"""of one call, or one list of calls"""
MAX_DEPTH = 64

_OUTSIDE_TEXTS = frozenset("{}[]:,+-." + string.ascii_letters + string.digits + string.whitespace)
"""characters of JSON outside its texts"""
_OUTSIDE_PYTHON_TEXTS = _OUTSIDE_TEXTS | frozenset("()=_")


class BracketedValue:
    """Finds where a bracketed value ends, character by character."""

    def __init__(self, form: CallForm) -> None:
        pythonic = form is CallForm.PYTHONIC
        self.opening = "[" if pythonic else "{["
        self._quotes = "\"'" if pythonic else '"'
        self._outside = _OUTSIDE_PYTHON_TEXTS if pythonic else _OUTSIDE_TEXTS
        self._depth = self._size = 0
        self._quote = ""
        self._escaped = False
        self.whole = False
        self.broken = False

    def feed(self, text: str) -> int:
        """Takes characters up to the end of the value, or to the first that cannot be in one; gives how many."""
        for used, character in enumerate(text):
            self._size += 1
            if self._quote:
                self._inside(character)
            elif character in self._quotes and self._depth:
                self._quote = character
            elif character not in self._outside or not (self._depth or self._may_begin(character)):
                self.broken = True
                return used
            else:
                self._depth += (character in "{[(") - (character in "}])")
                if self._depth == 0 and not character.isspace():
                    self.whole = True
                    return used + 1
            if self._size > MAX_CALL_CHARACTERS or self._depth > MAX_DEPTH:
                self.broken = True
                return used + 1
        return len(text)

    def _may_begin(self, character: str) -> bool:
        return character in self.opening or character.isspace()

    def _inside(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == self._quote:
            self._quote = ""
