"""MessageLines: what one turn of a conversation looks like, as lines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from textual.content import Content
from textual.strip import Strip

from edge_llm.messages import Role
from edge_llm.text.terminal import TerminalFilter, clean, clean_line
from edge_llm_chat.conversation import State, Turn
from edge_llm_chat.markdown.document import Document
from edge_llm_chat.markdown.lines import strip_of
from edge_llm_chat.markdown.palette import Palette

QUESTION_LINES = 12
"""lines of a question that are shown until it is unfolded"""
RESULT_LINES = 4
"""and of what a tool says"""
LONG = 40_000
"""characters from which on a finished text is read and drawn on a thread"""
_STATES = {State.STOPPED: "stopped", State.CUT: "cut: it reached its limit", State.FAILED: "failed"}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a turn stands among its siblings: number `index` (from 1) of `count`."""

    index: int = 1
    count: int = 1


class MessageLines:
    """The text of a turn, which may grow, its thoughts, calls and files, and what is to be said of it."""

    def __init__(self, turn: Turn, place: Place, *, streaming: bool) -> None:
        self.turn, self.place, self.streaming = turn, place, streaming
        self.waiting = ""
        """what is going on while there is no text yet"""
        self.folded = True
        self._is_answer = turn.role is Role.ASSISTANT
        self._filter, self._thought_filter = TerminalFilter(), TerminalFilter()
        self._body = self._document(turn.content)
        self._thoughts = self._document(turn.reasoning)
        self._look: tuple[int, Palette] | None = None  # the last one

    def _document(self, text: str) -> Document:
        shown = clean(text)
        if not self._is_answer:
            return Document(shown, markdown=False)
        # a long one is read when it is mounted, on a thread
        return Document(shown, finished=not self.streaming and not _takes_long(shown))

    @property
    def unfinished(self) -> bool:
        """No more comes, and `finish` has to be called."""
        return not self.streaming and not self._body.finished

    def append(self, text: str, reasoning: str) -> None:
        if text:
            self._body.feed(self._filter.feed(text))
        if reasoning:
            self._thoughts.feed(self._thought_filter.feed(reasoning))
        self.waiting = ""

    def end(self, turn: Turn) -> None:
        """No more comes; `finish` comes next."""
        self.turn, self.streaming, self.waiting = turn, False, ""
        self._body.feed(self._filter.flush())
        self._thoughts.feed(self._thought_filter.flush())

    async def finish(self) -> None:
        """Read and draw the whole text once more; a long one on a thread."""
        for document in (self._thoughts, self._body):
            if document.finished:
                continue
            if not _takes_long(document.text) or self._look is None:
                document.finish()
                continue
            document.become(await asyncio.to_thread(Document.read, document.text))
            room, palette = self._look
            document.keep(await asyncio.to_thread(document.drawn, room, palette), room, palette)

    def draw(self, room: int, palette: Palette) -> list[Strip]:
        """All lines, for `room` cells."""
        self._look = (room, palette)
        note = partial(_note, room=room, palette=palette)
        draw = self._answer if self._is_answer else self._question
        footer = self._footer()
        return [*draw(room, palette, note), *([note(footer)] if footer else [])]

    def _question(self, room: int, palette: Palette, note: Callable[[str], Strip]) -> list[Strip]:
        lines = self._body.lines(room, palette)
        most = QUESTION_LINES if self.turn.role is Role.USER else RESULT_LINES
        if self.folded and len(lines) > most + 1:
            lines = [*lines[: most - 1], note(f"… {len(lines) - most + 1:,} more lines")]
        if self.turn.role is Role.TOOL:
            lines = [note(f"⚙ {clean_line(self.turn.tool_name or 'a tool')} says"), *lines]
        files = [note(f"▤ {clean_line(item.name)}") for item in self.turn.attachments]
        return [*lines, *files]

    def _answer(self, room: int, palette: Palette, note: Callable[[str], Strip]) -> list[Strip]:
        lines: list[Strip] = []
        if self._thoughts.text:
            mark = "▸" if self.folded else "▾"
            words = len(self._thoughts.text.split())
            busy = self.streaming and not self._body.text
            lines.append(note(f"{mark} {'thinking …' if busy else 'thought'} ({words:,} words)"))
            if not self.folded:
                bar = strip_of(Content.styled("│ ", "dim"), palette, palette("text"))
                lines += [Strip.join([bar, line]) for line in self._thoughts.lines(room - 2, palette)]
            lines.append(Strip([], 0))
        lines += self._body.lines(room, palette)
        if self.streaming and self.waiting:
            lines.append(note(self.waiting))
        lines += [note(f"⚙ {clean_line(call.name)} {clean_line(call.arguments)}") for call in self.turn.tool_calls]
        return lines

    def _footer(self) -> str:
        """One faint line under the message: its versions, how it ended, what else there is to say."""
        parts = [f"‹ {self.place.index}/{self.place.count} ›"] if self.place.count > 1 else []
        if self._is_answer and not self.streaming:
            parts += [_STATES[self.turn.state]] if self.turn.state in _STATES else []
            parts += [clean_line(self.turn.facts.note)] if self.turn.facts.note else []
            parts += [] if self.turn.content or self.turn.tool_calls or parts else ["the model said nothing"]
        return " · ".join(parts)


def _note(text: str, *, room: int, palette: Palette) -> Strip:
    line = Content.styled(text, "dim").truncate(room, ellipsis=True)
    return strip_of(line, palette, palette("text"))


def _takes_long(text: str) -> bool:
    """To be read and drawn on a thread: a long text, and one with code, whose lexers may have to be loaded."""
    return len(text) > LONG or "```" in text or "~~~" in text
