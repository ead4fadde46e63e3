"""From leaves to lines of a given width. Pure: nothing here knows of widgets, so it may run on any thread."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.segment import Segment
from textual.content import Content
from textual.strip import Strip
from textual.style import Style

from edge_llm_chat.markdown.highlight import highlighted
from edge_llm_chat.markdown.leaves import Kind, Leaf
from edge_llm_chat.markdown.palette import Palette

_NARROWEST = 8
"""cells that text gets however deep it is nested"""


def draw(leaves: Iterable[Leaf], width: int, palette: Palette, *, highlight: bool = True) -> list[Strip]:
    """The lines of `leaves`, none wider than `width` cells. Without `highlight` code has one colour."""
    lines: list[Strip] = []
    for leaf in leaves:
        if leaf.gap:
            lines.append(Strip([], 0))
        lines += _draw_leaf(leaf, width, palette, highlight)
    return lines


def strip_of(content: Content, palette: Palette, base: Style) -> Strip:
    """One line of text on `base`."""
    if not content.plain:
        return Strip([], 0)
    segments = [Segment(text, (base + style).rich_style) for text, style in content.render(base, "", palette)]
    return Strip(segments, content.cell_length)


def _draw_leaf(leaf: Leaf, width: int, palette: Palette, highlight: bool) -> list[Strip]:
    text, room = palette("text"), max(width - leaf.rest.cell_length, _NARROWEST)
    match leaf.kind:
        case Kind.TEXT:
            inner = [strip_of(line, palette, text) for line in leaf.content.wrap(room)]
        case Kind.CODE:
            inner = _code(leaf, room, palette, highlight)
        case Kind.RULE:
            inner = [strip_of(Content.styled("─" * min(room, 40), "rule"), palette, text)]
        case Kind.TABLE:
            inner = [strip_of(line, palette, text) for line in _table(leaf.rows, room)]
    if not leaf.rest.plain and not leaf.first.plain:
        return inner
    first, rest = (strip_of(prefix, palette, text) for prefix in (leaf.first, leaf.rest))
    return [Strip.join([rest if number else first, strip]) for number, strip in enumerate(inner)]


def _code(leaf: Leaf, width: int, palette: Palette, highlight: bool) -> list[Strip]:
    """A block on a ground of its own, one cell of it on both sides; long lines are folded."""
    base = palette("text") + palette("block")
    content = highlighted(leaf.content.plain, leaf.language) if highlight else leaf.content
    ground, room = base.rich_style, max(width - 2, _NARROWEST)
    side = Strip([Segment(" ", ground)], 1)
    lines = [folded for line in content.split("\n", allow_blank=True) for folded in line.fold(room)]
    return [Strip.join([side, strip_of(line, palette, base)]).extend_cell_length(width, ground) for line in lines]


def _table(rows: Sequence[Sequence[Content]], width: int) -> list[Content]:
    """Columns side by side, a line under the head; the widest give way where there is too little room."""
    columns = max(map(len, rows), default=0)
    if not columns:
        return []
    cells = [[*row, *[Content()] * (columns - len(row))] for row in rows]
    widths = _column_widths([max(row[i].cell_length for row in cells) for i in range(columns)], width)
    lines: list[Content] = []
    for number, row in enumerate(cells):
        wrapped = [cell.wrap(max(room, 1)) for cell, room in zip(row, widths, strict=True)]
        for y in range(max(map(len, wrapped))):
            parts = [
                (cell[y] if y < len(cell) else Content()).pad_right(
                    max(0, room - (cell[y].cell_length if y < len(cell) else 0))
                )
                for cell, room in zip(wrapped, widths, strict=True)
            ]
            line = Content("  ").join(parts)
            lines.append(line.stylize("strong") if number == 0 else line)
        if number == 0:
            lines.append(Content.styled("  ".join("─" * room for room in widths), "rule"))
    return lines


def _column_widths(natural: list[int], width: int) -> list[int]:
    room = max(width - 2 * (len(natural) - 1), len(natural))
    widths = list(natural)
    while sum(widths) > room and max(widths) > 1:
        widest = widths.index(max(widths))
        others = max((w for i, w in enumerate(widths) if i != widest), default=1)
        widths[widest] = max(1, min(widths[widest] - 1, max(others, widths[widest] - (sum(widths) - room))))
    return widths
