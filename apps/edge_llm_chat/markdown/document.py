"""Document: a Markdown text that grows, and its lines.

While it grows only its end is drawn anew: blocks that are complete keep their lines, and an end that has become long is cut and
kept as it looks (a long block of code goes on in the next piece). `finish` reads the whole text once more, as it is meant.
"""

from __future__ import annotations

import re
from dataclasses import replace

from textual.strip import Strip

from edge_llm_chat.markdown.leaves import Leaf, leaves, parser, plain_leaves
from edge_llm_chat.markdown.lines import draw
from edge_llm_chat.markdown.palette import Palette

LONGEST_TAIL = 2_000
"""characters that are drawn anew with each piece of text"""
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")


class Document:
    """`feed` text, read `lines`. `markdown` False shows the text as it is."""

    def __init__(self, text: str = "", *, markdown: bool = True, finished: bool = True) -> None:
        self.text = ""
        self._markdown = markdown
        self._settled: list[Leaf] = []
        self._tail = ""
        self._fence = ""  # the line that opened the block of code which the tail goes on with
        self._cut = False  # the tail goes on with the block before it
        self._tail_leaves: list[Leaf] = []
        self._read = True
        self._drawn = 0
        self._lines: list[Strip] = []
        self._all: list[Strip] | None = None
        self._look: tuple[int, Palette] | None = None
        self.finished = False
        if text:
            self.feed(text)
        if finished:
            self.finish()

    def feed(self, text: str) -> None:
        """More of the text."""
        self.text += text
        self._tail += text
        self._read = False
        self._all = None

    def finish(self) -> None:
        """The text is complete: read it as a whole."""
        self.become(self.read(self.text, markdown=self._markdown))

    @staticmethod
    def read(text: str, *, markdown: bool = True) -> list[Leaf]:
        """The leaves of a whole text; any thread."""
        return leaves(parser().parse(text)) if markdown else plain_leaves(text)

    def become(self, read: list[Leaf]) -> None:
        """Take what `read` gave for the whole text."""
        self._settled, self._tail, self._tail_leaves, self._fence = read, "", [], ""
        self._drawn, self._lines, self._all = 0, [], None
        self._read = self.finished = True

    def drawn(self, width: int, palette: Palette) -> list[Strip]:
        """All lines, anew, without keeping them; any thread, while nothing is fed."""
        return draw([*self._settled, *self._tail_leaves], width, palette)

    def keep(self, lines: list[Strip], width: int, palette: Palette) -> None:
        """Take lines that `drawn` gave for a finished text."""
        self._look, self._lines, self._drawn, self._all = (width, palette), lines, len(self._settled), None

    def lines(self, width: int, palette: Palette) -> list[Strip]:
        """The lines for `width` cells; they are kept until something changes. Not to be changed."""
        if self._look != (width, palette):
            self._look, self._drawn, self._lines, self._all = (width, palette), 0, [], None
        if self._all is None:
            self._read_tail()
            self._lines += draw(self._settled[self._drawn :], width, palette, highlight=self.finished)
            self._drawn = len(self._settled)
            tail = draw(self._tail_leaves, width, palette, highlight=False)
            self._all = self._lines + tail if tail else self._lines
        return self._all

    def _read_tail(self) -> None:
        """Settle the blocks of the tail that nothing can change any more, and what is too long to be drawn again."""
        if self._read:
            return
        self._read = True
        if not self._markdown:
            self._settle_plain()
            return
        tokens = parser().parse(self._fence + self._tail)
        offset = 1 if self._fence else 0
        starts = [token.map[0] for token in tokens if token.level == 0 and token.map and token.nesting >= 0]
        if len(starts) > 1 and starts[-1] > offset:
            lines = self._tail.splitlines(keepends=True)
            whole = "".join(lines[: starts[-1] - offset])
            self._settle(self._fence + whole)
            self._fence, self._cut, self._tail = "", False, self._tail[len(whole) :]
        while len(self._tail) > LONGEST_TAIL:
            cut = self._tail.rfind("\n", 0, LONGEST_TAIL) + 1 or LONGEST_TAIL
            piece, self._tail = self._tail[:cut], self._tail[cut:]
            source = self._fence + piece
            self._settle(source)
            self._fence, self._cut = _open_fence(source), True
        self._tail_leaves = self._joined(leaves(parser().parse(self._fence + self._tail)))

    def _settle(self, source: str) -> None:
        self._settled += self._joined(leaves(parser().parse(source)))

    def _joined(self, read: list[Leaf]) -> list[Leaf]:
        """The leaves after those that are settled: with a gap, unless the first goes on with the last of them."""
        if read and self._settled and not read[0].gap and not self._cut:
            read[0] = replace(read[0], gap=True)
        return read

    def _settle_plain(self) -> None:
        cut = self._tail.rfind("\n")
        if len(self._tail) > LONGEST_TAIL and cut >= 0:
            self._settled += plain_leaves(self._tail[:cut])
            self._tail = self._tail[cut + 1 :]
        self._tail_leaves = plain_leaves(self._tail) if self._tail else []


def _open_fence(source: str) -> str:
    """The line that opens a block of code which does not end in `source`; nothing if there is none."""
    opened = ""
    for line in source.splitlines(keepends=True):
        match = _FENCE.match(line)
        if not match:
            continue
        if not opened:
            opened = line if line.endswith("\n") else line + "\n"
        elif match[1].startswith(_FENCE.match(opened)[1]) and not line.strip().strip(match[1][0]):  # type: ignore[index]
            opened = ""
    return opened
