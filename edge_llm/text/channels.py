"""What a model thinks, apart from what it answers, in text that comes in chunks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Self

from edge_llm.messages import ReasoningDelta, TextDelta
from edge_llm.text.markers import TrailingSpace, cut
from edge_llm.text.prompt import SCAFFOLD, RenderedPrompt

MAX_MARKER = 64
_MAX_LEAD = 64
"""characters of white space before the marker that opens reasoning"""
_KNOWN = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<reasoning>", "</reasoning>"))


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """The texts around a model's reasoning. Raises `ValueError` for what cannot be markers."""

    begin: str
    end: str

    def __post_init__(self) -> None:
        for text in (self.begin, self.end):
            if not isinstance(text, str) or not 0 < len(text) <= MAX_MARKER or text != text.strip():
                raise ValueError("a marker of reasoning is a short text")

    @classmethod
    def of(cls, spec: Mapping[str, str]) -> Self | None:
        """Those of a manifest; None if it names none."""
        return cls(**spec) if spec else None

    @classmethod
    def detect(cls, template: str) -> Self | None:
        """Those that a chat template writes or looks for."""
        return next((cls(begin, end) for begin, end in _KNOWN if end in template), None)

    def open_in(self, prompt: RenderedPrompt) -> bool:
        """Whether the template itself has begun the reasoning of the answer."""
        begun = len(prompt.origins.rstrip(SCAFFOLD))
        last = prompt.text.rfind(self.begin, begun)
        return last >= 0 and self.end not in prompt.text[last:]


class _State(Enum):
    START = auto()
    REASONING = auto()
    GAP = auto()
    ANSWER = auto()


class ChannelSplitter:
    """Feed it the text of one answer. Reasoning is what stands between the markers at its beginning, nowhere else: an
    answer that speaks of the markers stays an answer. White space around the reasoning belongs to nobody."""

    def __init__(self, markers: ReasoningMarkers, *, is_open: bool = False) -> None:
        """`is_open`: the prompt ends inside the reasoning."""
        self._markers = markers
        self._state = _State.REASONING if is_open else _State.START
        self._held = ""
        self._begun = False
        self._space = TrailingSpace()

    @property
    def in_reasoning(self) -> bool:
        return self._state is _State.REASONING

    def feed(self, chunk: str) -> list[TextDelta | ReasoningDelta]:
        text, self._held = self._held + chunk, ""
        deltas: list[TextDelta | ReasoningDelta] = []
        if self._state is _State.START:
            text = self._start(text)
        if self._state is _State.REASONING:
            thought, rest, ended = cut(text, self._markers.end)
            if shown := self._thought(thought):
                deltas.append(ReasoningDelta(shown))
            text, self._held = (rest, "") if ended else ("", rest)
            if ended:
                self._state = _State.GAP
        if self._state is _State.GAP:
            text = text.lstrip()
            if text:
                self._state = _State.ANSWER
        if self._state is _State.ANSWER and text:
            deltas.append(TextDelta(text))
        return deltas

    def flush(self) -> list[TextDelta | ReasoningDelta]:
        """What was held back, once the answer has ended."""
        held, self._held = self._held, ""
        if self._state is _State.REASONING:
            shown = self._thought(held)
            return [ReasoningDelta(shown)] if shown else []
        return [TextDelta(held)] if held else []

    def _start(self, text: str) -> str:
        """The text after the marker, if that is what the answer begins with; else all of it, or nothing yet."""
        said = text.lstrip()
        if len(text) - len(said) <= _MAX_LEAD:
            if said.startswith(self._markers.begin):
                self._state = _State.REASONING
                return said[len(self._markers.begin) :]
            if self._markers.begin.startswith(said):
                self._held = text
                return ""
        self._state = _State.ANSWER
        return text

    def _thought(self, text: str) -> str:
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        return self._space.feed(text)
