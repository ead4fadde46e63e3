"""TokenText: an answer token by token, each on a ground that tells how surprising it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.geometry import Region, Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

from edge_llm.messages import TokenInfo
from edge_llm_chat.surprise import LEVELS, bits, level, texts


@dataclass(frozen=True, slots=True)
class Piece:
    """A token's cells in one line."""

    token: int
    text: str
    x: int


def arrange(pieces: Sequence[str], width: int) -> list[list[Piece]]:
    """Lines of at most `width` cells; a token is cut only where it ends a line or is wider than one."""
    lines: list[list[Piece]] = [[]]
    x = 0
    for number, text in enumerate(pieces):
        parts = text.split("\n")
        for part_number, part in enumerate(parts):
            ended = part_number < len(parts) - 1
            for shown in _folded(part + ("↵" if ended else "") or "·", width):
                size = cell_len(shown)
                if x + size > width and lines[-1]:
                    lines.append([])
                    x = 0
                lines[-1].append(Piece(number, shown, x))
                x += size
            if ended:
                lines.append([])
                x = 0
    return lines if lines[-1] else lines[:-1] or [[]]


def _folded(text: str, width: int) -> list[str]:
    if cell_len(text) <= width:
        return [text]
    return [text[start : start + max(1, width // 2)] for start in range(0, len(text), max(1, width // 2))]


class TokenText(ScrollView, can_focus=False):
    """Shows tokens, one of them selected."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        *(f"surprise--{number}" for number in range(len(LEVELS) + 1)),
        "surprise--selected",
    }
    selected: reactive[int] = reactive(0)

    @dataclass
    class Clicked(Message):
        token: int

    def __init__(self, tokens: Sequence[TokenInfo]) -> None:
        super().__init__(id="tokens")
        self._texts = [text.replace("\t", "    ") for text in texts([token.chosen for token in tokens])]
        self._levels = [level(bits(token.chosen)) for token in tokens]
        self._lines: list[list[Piece]] = []
        self._line_of: dict[int, int] = {}

    def on_resize(self, event: events.Resize) -> None:
        self._lines = arrange(self._texts, max(1, self.scrollable_content_region.width))
        self._line_of = {piece.token: y for y, line in reversed(list(enumerate(self._lines))) for piece in line}
        self.virtual_size = Size(self.scrollable_content_region.width, len(self._lines))
        self.watch_selected()
        self.refresh()

    def watch_selected(self) -> None:
        y = self._line_of.get(self.selected, 0)
        self.scroll_to_region(Region(0, max(0, y - 1), 1, 3), animate=False)
        self.refresh()

    def line_step(self, by: int) -> int:
        """The token above or below the selected one."""
        y = self._line_of.get(self.selected, 0)
        x = next((piece.x for piece in self._lines[y] if piece.token == self.selected), 0)
        line = self._lines[max(0, min(len(self._lines) - 1, y + by))]
        return min(line, key=lambda piece: abs(piece.x - x)).token if line else self.selected

    def render_line(self, y: int) -> Strip:
        y += self.scroll_offset.y
        base = self.rich_style
        if y >= len(self._lines):
            return Strip.blank(self.size.width, base)
        segments = [Segment(piece.text, self._style(piece.token)) for piece in self._lines[y]]
        return Strip(segments).adjust_cell_length(self.size.width, base)

    def _style(self, token: int) -> Style:
        name = "surprise--selected" if token == self.selected else f"surprise--{self._levels[token]}"
        return self.get_component_rich_style(name)

    def on_click(self, event: events.Click) -> None:
        offset = event.get_content_offset(self)
        y = offset.y + self.scroll_offset.y if offset else len(self._lines)
        if offset and y < len(self._lines):
            for piece in self._lines[y]:
                if piece.x <= offset.x < piece.x + cell_len(piece.text):
                    self.post_message(self.Clicked(piece.token))
