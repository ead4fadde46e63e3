"""MessageView: one turn of a conversation, drawn line by line, so that its length costs nothing but memory."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style as RichStyle
from textual import events
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.geometry import Region, Size
from textual.message import Message
from textual.reactive import Reactive
from textual.selection import Selection
from textual.strip import Strip
from textual.style import Style
from textual.widget import Widget

from edge_llm.messages import Role
from edge_llm.text.terminal import TerminalFilter, clean, clean_line
from edge_llm_chat.conversation import State, Turn
from edge_llm_chat.markdown.document import Document
from edge_llm_chat.markdown.lines import strip_of
from edge_llm_chat.markdown.palette import STYLES, Palette

QUESTION_LINES = 12
"""lines of a question that are shown until it is unfolded"""
RESULT_LINES = 4
"""and of what a tool says"""
LONG = 40_000
"""characters from which on a finished text is read and drawn on a thread"""
_MOST_ROWS = 1_000
"""lines that are kept as they are drawn"""
_MARGIN = 2
_WIDEST = 110
"""cells of a line of text: longer ones are hard to read"""

_STATES = {State.STOPPED: "stopped", State.CUT: "cut: it reached its limit", State.FAILED: "failed"}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a turn stands among its siblings: number `index` (from 1) of `count`."""

    index: int = 1
    count: int = 1


class MessageView(Widget, can_focus=True):
    """Shows a `Turn`; a turn that is still being answered is fed with `append` and ended with `end`."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {*(f"text--{name}" for name in STYLES), "message--bar"}

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("c", "tell('copy')", "Copy the message", id="message.copy"),
        Binding("y", "tell('copy_code')", "Copy its last block of code", id="message.copy_code"),
        Binding("e", "tell('edit')", "Edit the question and ask again", id="message.edit"),
        Binding("r", "tell('regenerate')", "Answer again, beside this answer", id="message.regenerate"),
        Binding("i", "tell('inspect')", "Inspect the answer's tokens", id="message.inspect"),
        Binding("left,[", "tell('previous')", "Show the version before", id="message.previous"),
        Binding("right,]", "tell('next')", "Show the next version", id="message.next"),
        Binding("t,enter", "fold", "Fold or unfold thinking and long questions", id="message.fold"),
        Binding("d", "tell('delete')", "Delete from here on", id="message.delete"),
    ]

    virtual_size = Reactive(
        Size(0, 0), repaint=False
    )  # Textual's own asks for a second layout after each change of the height

    @dataclass
    class Told(Message):
        """The user wants `action` (the names in BINDINGS) of this message."""

        view: MessageView
        action: str

        @property
        def control(self) -> MessageView:
            return self.view

    def __init__(self, turn: Turn, place: Place = Place(), *, streaming: bool = False) -> None:
        super().__init__()
        self.turn = turn
        self.place = place
        self.streaming = streaming
        self.waiting = ""
        """what is going on while there is no text yet"""
        self.folded = True
        self._filter, self._thought_filter = TerminalFilter(), TerminalFilter()
        self._is_answer = turn.role is Role.ASSISTANT
        self.add_class({Role.ASSISTANT: "answer", Role.TOOL: "tool"}.get(turn.role, "question"))
        self._body = self._document(turn.content)
        self._thoughts = self._document(turn.reasoning)
        self._palette: Palette | None = None
        self._lines: list[Strip] = []
        self._rows: dict[int, tuple[Strip, bool, Strip]] = {}  # by number: line, whether it is the last, as it is drawn
        self._look: object = None
        self._width = 0
        self._stale = True

    def _document(self, text: str) -> Document:
        shown = clean(text)
        if not self._is_answer:
            return Document(shown, markdown=False)
        # a long one is read when it is mounted, on a thread
        return Document(shown, finished=not self.streaming and not _takes_long(shown))

    # --- what changes ---

    def append(self, text: str, reasoning: str = "") -> None:
        """More of the answer or of its reasoning; `refresh_text` shows it."""
        if text:
            self._body.feed(self._filter.feed(text))
        if reasoning:
            self._thoughts.feed(self._thought_filter.feed(reasoning))
        self.waiting = ""

    def refresh_text(self) -> int:
        """Draw what was appended, and no more of this widget than that where the height stays; gives how many lines came."""
        before = self._lines
        self._stale = True
        self._draw()
        if len(self._lines) != len(before):
            self.refresh(layout=True)
        elif changed := [y for y in range(_first_new(before, self._lines), len(before)) if self._lines[y] != before[y]]:
            self.refresh(Region(0, changed[0], self.size.width, changed[-1] - changed[0] + 1))
        return len(self._lines) - len(before)

    async def end(self, turn: Turn) -> None:
        """The answer is complete: show it as a whole."""
        self.turn, self.streaming, self.waiting = turn, False, ""
        self._body.feed(self._filter.flush())
        self._thoughts.feed(self._thought_filter.flush())
        await self._finish_bodies()

    async def _finish_bodies(self) -> None:
        for document in (self._thoughts, self._body):
            if document.finished:
                continue
            if not _takes_long(document.text) or self._palette is None or not self._width:
                document.finish()
            else:
                document.become(await asyncio.to_thread(Document.read, document.text))
                await self._redraw(document)
        self.refresh_text()

    async def _redraw(self, document: Document) -> None:
        """The lines of a long text, made on a thread."""
        if self._palette is not None:
            palette, room = self._palette, self._room
            document.keep(await asyncio.to_thread(document.drawn, room, palette), room, palette)

    def show_place(self, place: Place) -> None:
        if place != self.place:
            self.place = place
            self.refresh_text()

    def wait(self, what: str) -> None:
        """Say what is going on while nothing was said yet."""
        if what != self.waiting:
            self.waiting = what
            self.refresh_text()

    def action_fold(self) -> None:
        self.folded = not self.folded
        self.refresh_text()

    def action_tell(self, action: str) -> None:
        self.post_message(self.Told(self, action))

    async def on_mount(self) -> None:
        self.watch(self.app, "theme", self._theme_changed, init=False)
        if not self.streaming and not self._body.finished:
            self.run_worker(self._finish_bodies(), exit_on_error=False)

    def _theme_changed(self) -> None:
        self.call_after_refresh(self._restyle)

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._palette = self._look = None
        self._stale = True

    def _restyle(self) -> None:
        self._palette = None
        self.refresh_text()

    def on_resize(self, event: events.Resize) -> None:
        if event.size.width != self._width:
            self._stale = True

    # --- drawing ---

    @property
    def _room(self) -> int:
        return max(8, min(self._width - 2 * _MARGIN, _WIDEST))

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        if width != self._width:
            self._width, self._stale = width, True
        self._draw()
        return len(self._lines)

    def _draw(self) -> None:
        if not self._stale or not self._width or not self.is_attached:
            return  # Textual may paint a widget once more that it has taken the styles of
        self._stale = False
        if self._palette is None:
            self._palette = Palette.of(self._style)
        lines = self._question() if not self._is_answer else self._answer()
        self._lines = [*lines, Strip([], 0)]

    def _style(self, name: str) -> Style:
        """What a component class sets, and nothing else; colours are opaque, for the ground may change."""
        rules, whole = self.get_component_styles(name), self.get_visual_style(name)
        ground = whole.background or self.visual_style.background
        assert ground is not None
        assert whole.foreground is not None
        coloured = rules.has_rule("color") or rules.has_rule("auto_color")
        return Style(
            background=ground if rules.has_rule("background") else None,
            foreground=ground.blend(whole.foreground, whole.foreground.a, 1.0) if coloured else None,
            bold=whole.bold or None,
            italic=whole.italic or None,
            underline=whole.underline or None,
            strike=whole.strike or None,
        )

    def _question(self) -> list[Strip]:
        assert self._palette is not None
        lines = self._body.lines(self._room, self._palette)
        most = QUESTION_LINES if self.turn.role is Role.USER else RESULT_LINES
        if self.folded and len(lines) > most + 1:
            lines = [*lines[: most - 1], self._note(f"… {len(lines) - most + 1:,} more lines")]
        if self.turn.role is Role.TOOL:
            lines = [self._note(f"⚙ {clean_line(self.turn.tool_name or 'a tool')} says"), *lines]
        files = [self._note(f"▤ {clean_line(item.name)}") for item in self.turn.attachments]
        return [*lines, *files, *self._footer()]

    def _answer(self) -> list[Strip]:
        assert self._palette is not None
        lines: list[Strip] = []
        if self._thoughts.text:
            mark = "▸" if self.folded else "▾"
            words = len(self._thoughts.text.split())
            busy = self.streaming and not self._body.text
            lines.append(self._note(f"{mark} {'thinking …' if busy else 'thought'} ({words:,} words)"))
            if not self.folded:
                bar = strip_of(Content.styled("│ ", "dim"), self._palette, self._palette("text"))
                lines += [Strip.join([bar, line]) for line in self._thoughts.lines(self._room - 2, self._palette)]
            lines.append(Strip([], 0))
        lines += self._body.lines(self._room, self._palette)
        if self.streaming and self.waiting:
            lines.append(self._note(self.waiting))
        lines += [
            self._note(f"⚙ {clean_line(call.name)} {clean_line(call.arguments)}") for call in self.turn.tool_calls
        ]
        return lines + self._footer()

    def _footer(self) -> list[Strip]:
        """One faint line under the message: its versions, how it ended, what else there is to say."""
        parts = [f"‹ {self.place.index}/{self.place.count} ›"] if self.place.count > 1 else []
        if self._is_answer and not self.streaming:
            parts += [_STATES[self.turn.state]] if self.turn.state in _STATES else []
            parts += [clean_line(self.turn.facts.note)] if self.turn.facts.note else []
            parts += [] if self.turn.content or self.turn.tool_calls or parts else ["the model said nothing"]
        return [self._note(" · ".join(parts))] if parts else []

    def _note(self, text: str) -> Strip:
        assert self._palette is not None
        line = Content.styled(text, "dim").truncate(self._room, ellipsis=True)
        return strip_of(line, self._palette, self._palette("text"))

    def render_lines(self, crop: Region) -> list[Strip]:
        """In place of Textual's cache of lines, which is empty after each change of the height: a growing answer would be
        drawn anew as a whole, many times a second."""
        self._draw()
        base, width = self.visual_style.rich_style, self.size.width
        if not self.is_attached:
            return [Strip.blank(crop.width, base)] * crop.height
        look = (base, width, self.has_focus, self.text_selection)
        if look != self._look or len(self._rows) > _MOST_ROWS:
            self._look = look
            self._rows.clear()
        rows = [self._row(y, base, width) for y in crop.line_range]
        for line_filter in self.get_line_filters():
            rows = [row.apply_filter(line_filter, self.background_colors[1]) for row in rows]
        return rows if crop.column_span == (0, width) else [row.crop(*crop.column_span) for row in rows]

    def _row(self, y: int, base: RichStyle, width: int) -> Strip:
        """Line `y` as it goes to the screen."""
        if not 0 <= y < len(self._lines):
            return Strip.blank(width, base)
        line, last = self._lines[y], y == len(self._lines) - 1
        kept = self._rows.get(y)
        if kept is not None and kept[0] == line and kept[1] == last:
            return kept[2]
        bar = self.get_visual_style("message--bar").rich_style if not last else base
        marked = not last and (self.has_class("question") or self.has_focus)
        left = Strip([Segment("▎ " if marked else "  ", bar)], _MARGIN)
        text = self._selected(line, y).apply_offsets(0, y)
        row = Strip.join([left, text]).apply_style(base).adjust_cell_length(width, base)
        self._rows[y] = (line, last, row)
        return row

    # --- selecting with the mouse ---

    def _selected(self, line: Strip, y: int) -> Strip:
        selection = self.text_selection
        if selection is None or (span := selection.get_span(y)) is None:
            return line
        text = line.text
        start, end = span[0], len(text) if span[1] == -1 else span[1]
        a, b = Content(text[:start]).cell_length, Content(text[:end]).cell_length
        style = Style.from_styles(self.screen.get_component_styles("screen--selection")).rich_style
        chosen = Strip([Segment(text[start:end], style)], b - a)
        return Strip.join([line.crop(0, a), chosen, line.crop(b, line.cell_length)])

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        return selection.extract("\n".join(line.text.rstrip() for line in self._lines)), "\n"


def _takes_long(text: str) -> bool:
    """To be read and drawn on a thread: a long text, and one with code, whose lexers may have to be loaded."""
    return len(text) > LONG or "```" in text or "~~~" in text


def _first_new(old: list[Strip], new: list[Strip]) -> int:
    """From where on two lists of lines are not the same objects; what is settled is, and stands before the rest."""
    y = len(new)
    while y and old[y - 1] is not new[y - 1]:
        y -= 1
    return y
