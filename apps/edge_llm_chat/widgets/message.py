"""MessageView: one turn of a conversation, drawn line by line, so that its length costs nothing but memory."""

from __future__ import annotations

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
from edge_llm_chat.conversation import Turn
from edge_llm_chat.markdown.palette import STYLES, Palette
from edge_llm_chat.widgets.message_lines import MessageLines, Place

_MOST_ROWS = 1_000
"""lines that are kept as they are drawn"""
_MARGIN = 2
_WIDEST = 110
"""cells of a line of text: longer ones are hard to read"""


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

    def __init__(self, turn: Turn, place: Place = Place(), *, streaming: bool = False) -> None:  # noqa: B008
        super().__init__()
        self._shown = MessageLines(turn, place, streaming=streaming)
        self.add_class({Role.ASSISTANT: "answer", Role.TOOL: "tool"}.get(turn.role, "question"))
        self._palette: Palette | None = None
        self._lines: list[Strip] = []
        self._rows: dict[int, tuple[Strip, bool, Strip]] = {}  # by number: line, whether it is the last, as it is drawn
        self._look: object = None
        self._width = 0
        self._stale = True

    @property
    def turn(self) -> Turn:
        return self._shown.turn

    # --- what changes ---

    def append(self, text: str, reasoning: str = "") -> None:
        """More of the answer or of its reasoning; `refresh_text` shows it."""
        self._shown.append(text, reasoning)

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
        self._shown.end(turn)
        await self._finish()

    async def _finish(self) -> None:
        await self._shown.finish()
        self.refresh_text()

    def show_place(self, place: Place) -> None:
        if place != self._shown.place:
            self._shown.place = place
            self.refresh_text()

    def wait(self, what: str) -> None:
        """Say what is going on while nothing was said yet."""
        if what != self._shown.waiting:
            self._shown.waiting = what
            self.refresh_text()

    def action_fold(self) -> None:
        self._shown.folded = not self._shown.folded
        self.refresh_text()

    def action_tell(self, action: str) -> None:
        self.post_message(self.Told(self, action))

    async def on_mount(self) -> None:
        self.watch(self.app, "theme", self._theme_changed, init=False)
        if self._shown.unfinished:
            self.run_worker(self._finish(), exit_on_error=False)

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
        room = max(8, min(self._width - 2 * _MARGIN, _WIDEST))
        self._lines = [*self._shown.draw(room, self._palette), Strip([], 0)]

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


def _first_new(old: list[Strip], new: list[Strip]) -> int:
    """From where on two lists of lines are not the same objects; what is settled is, and stands before the rest."""
    y = len(new)
    while y and old[y - 1] is not new[y - 1]:
        y -= 1
    return y
