"""Tool calls in the text of an answer, which comes in chunks.

A call is told as a whole, once it is read: nothing is shown of it that turns out not to be one. What begins as a call and
cannot be read as one stays text. Generated text is hostile: one pass over its characters, no evaluation, bounded.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Collection
from enum import Enum, auto
from typing import Any, NoReturn

from edge_llm.messages import TextDelta, ToolCall, ToolCallDelta
from edge_llm.text.bracketed import BracketedValue
from edge_llm.text.markers import TrailingSpace, cut
from edge_llm.text.pythonic import PythonicReader
from edge_llm.text.tool_syntax import CallForm, ToolSyntax

MAX_CALLS = 32
"""of one answer: a small model may repeat itself for ever"""

_ID_CHARACTERS = string.ascii_letters + string.digits


def new_call_id() -> str:
    """Nine letters and digits: what every chat template takes, Mistral's too."""
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9))


class _State(Enum):
    START = auto()
    """of an answer that may be a bare call"""
    TEXT = auto()
    VALUE = auto()
    """inside a call"""
    AFTER = auto()
    """behind one"""


class ToolCallParser:
    """Feed it the text of one answer, without its reasoning. `names` are those of the tools that may be called."""

    def __init__(self, syntax: ToolSyntax, names: Collection[str], new_id: Callable[[], str] = new_call_id) -> None:
        self._syntax, self._names, self._new_id = syntax, frozenset(names), new_id
        self._state = _State.TEXT if syntax.begin else _State.START
        self._held = ""
        self._space = TrailingSpace()
        self._raw: list[str] = []
        self._value = BracketedValue(syntax.form)
        self._end_may_follow = False
        self.calls: list[ToolCall] = []
        self.repeats = False
        """a call came that the answer had made already, word for word; it is not told again"""
        self.invalid = 0
        """how many began with the marker of a call and were none"""

    @property
    def in_call(self) -> bool:
        """The last character belongs to a call, or stands right behind one."""
        return self._state in (_State.VALUE, _State.AFTER)

    def feed(self, chunk: str) -> list[TextDelta | ToolCallDelta]:
        text, self._held = self._held + chunk, ""
        deltas: list[TextDelta | ToolCallDelta] = []
        while text:
            match self._state:
                case _State.START:
                    text = self._start(text)
                case _State.TEXT:
                    text = self._text(text, deltas)
                case _State.VALUE:
                    text = self._collect(text, deltas)
                case _State.AFTER:
                    text = self._after(text)
        return deltas

    def flush(self) -> list[TextDelta | ToolCallDelta]:
        """What was held back, once the answer has ended."""
        deltas: list[TextDelta | ToolCallDelta] = []
        held, self._held = self._held, ""
        if self._state is _State.VALUE:
            self._refuse(deltas)
        elif self._state is not _State.AFTER:
            self._say(held, deltas)
        if space := self._space.flush():
            deltas.append(TextDelta(space))
        return deltas

    # -- the states; each takes some of the text and gives the rest

    def _start(self, text: str) -> str:
        said = text.lstrip()
        if said:
            self._space.feed(text[: len(text) - len(said)])
            self._begin("" if said[0] in self._value.opening else None)
            return said
        self._space.feed(text)
        return ""

    def _text(self, text: str, deltas: list[TextDelta | ToolCallDelta]) -> str:
        if not self._syntax.begin:
            self._say(text, deltas)
            return ""
        before, rest, found = cut(text, self._syntax.begin)
        self._say(before, deltas)
        if not found:
            self._held = rest
            return ""
        self._begin(self._syntax.begin)
        return rest

    def _begin(self, shown: str | None) -> None:
        """A call begins, of which `shown` was read; or plain text for None."""
        if shown is None:
            self._state = _State.TEXT
            return
        self._raw = [shown]
        self._value = BracketedValue(self._syntax.form)
        self._state = _State.VALUE

    def _collect(self, text: str, deltas: list[TextDelta | ToolCallDelta]) -> str:
        used = self._value.feed(text)
        self._raw.append(text[:used])
        if self._value.broken:
            self._refuse(deltas)
        elif self._value.whole:
            self._finish(deltas)
        return text[used:]

    def _finish(self, deltas: list[TextDelta | ToolCallDelta]) -> None:
        text = "".join(self._raw)
        calls = read_calls(text[len(self._syntax.begin) :], self._syntax, self._names)
        if not calls or len(self.calls) + len(calls) > MAX_CALLS:
            self._refuse(deltas)
            return
        self._space.drop()
        self._raw = []
        for name, arguments in calls:
            if any((name, arguments) == (call.name, call.arguments) for call in self.calls):
                self.repeats = True
                continue
            call = ToolCall(self._new_id(), name, arguments)
            deltas.append(ToolCallDelta(len(self.calls), call.arguments, id=call.id, name=call.name))
            self.calls.append(call)
        self._end_may_follow = bool(self._syntax.end)
        self._state = _State.AFTER

    def _refuse(self, deltas: list[TextDelta | ToolCallDelta]) -> None:
        """What was read as a call is text. (Brackets alone promise no call.)"""
        self._say("".join(self._raw), deltas)
        self._raw = []
        self.invalid += bool(self._syntax.begin)
        self._state = _State.TEXT

    def _after(self, text: str) -> str:
        """Drops what may stand behind a call: white space, the end marker, what parts bare calls."""
        end = self._syntax.end
        text = text.lstrip() if self._syntax.begin else text.lstrip(string.whitespace + ";")
        if self._end_may_follow and text:
            if text.startswith(end):
                self._end_may_follow = False
                return text[len(end) :]
            if end.startswith(text):
                self._held = text
                return ""
        if text:
            bare = not self._syntax.begin and text[0] in self._value.opening
            self._begin("" if bare else None)
        return text

    def _say(self, text: str, deltas: list[TextDelta | ToolCallDelta]) -> None:
        if shown := self._space.feed(text):
            deltas.append(TextDelta(shown))


def read_calls(text: str, syntax: ToolSyntax, names: Collection[str]) -> list[tuple[str, str]] | None:
    """(name, arguments as the JSON text of an object) of each call in `text`; None if it is anything else."""
    try:
        if syntax.form is CallForm.PYTHONIC:
            found: list[tuple[Any, Any]] = list(PythonicReader(text).calls())
        else:
            value = json.loads(text, strict=False, parse_constant=_refuse_constant, object_pairs_hook=_object)
            found = [_parts(entry, syntax) for entry in (value if isinstance(value, list) else [value])]
        calls = [(name, canonical_arguments(arguments)) for name, arguments in found]
    except (ValueError, RecursionError, OverflowError):
        return None
    known = all(isinstance(name, str) and name in names for name, _ in calls)
    return calls if known else None


def canonical_arguments(value: Any) -> str:
    """Arguments as the JSON text of an object: None is an empty one, a text that is JSON is read. Raises `ValueError`."""
    if isinstance(value, str):
        value = json.loads(value, strict=False, parse_constant=_refuse_constant, object_pairs_hook=_object)
    value = {} if value is None else value
    if not isinstance(value, dict):
        raise ValueError("arguments are an object")
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can only escape
        text = json.dumps(value, allow_nan=False)
    return text


def _parts(entry: Any, syntax: ToolSyntax) -> tuple[Any, Any]:
    if not isinstance(entry, dict):
        raise ValueError("a call is an object")
    other = {"arguments": "parameters", "parameters": "arguments"}.get(syntax.arguments, "arguments")
    return entry.get("name"), entry.get(syntax.arguments, entry.get(other))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key stands twice")
    return made


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
