"""From Markdown to leaves: the paragraphs, pieces of code, tables and rules of a text, in order.

Everything is made harmless for a terminal here, after the parser: an entity such as `&#27;` is a control character only then.
Links are text and their address; nothing can be clicked, and no address reaches the terminal as a command.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cache
from typing import TYPE_CHECKING

from textual.content import Content, Span

from edge_llm.text.terminal import clean, clean_line

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token

BULLETS = ("•", "◦", "▪")
TAB = 4


class Kind(Enum):
    TEXT = auto()
    CODE = auto()
    RULE = auto()
    TABLE = auto()


@dataclass(frozen=True, slots=True)
class Leaf:
    """A piece of a text that is wrapped by itself. `first` stands left of its first line, `rest` of the others."""

    kind: Kind
    content: Content = field(default_factory=Content)
    language: str = ""
    """of code"""
    rows: tuple[tuple[Content, ...], ...] = ()
    """of a table; the first is its head"""
    first: Content = field(default_factory=Content)
    rest: Content = field(default_factory=Content)
    gap: bool = True
    """an empty line comes before it"""


@cache
def parser() -> MarkdownIt:
    """CommonMark with tables and strikethrough; HTML is text."""
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])


def leaves(tokens: Sequence[Token]) -> list[Leaf]:
    """The leaves of a parsed text. Spans of their contents are named as the styles of `palette.STYLES`."""
    return _Flattener().flatten(tokens)


def plain_leaves(text: str) -> list[Leaf]:
    """A text that is not Markdown: as it is, wrapped."""
    return [Leaf(Kind.TEXT, Content(clean(text).expandtabs(TAB)), gap=False)]


def code_blocks(text: str) -> list[tuple[str, str]]:
    """(language, code) of each block of code in a Markdown text, as it was written."""
    tokens = parser().parse(text)
    return [(token.info.strip(), token.content) for token in tokens if token.type in ("fence", "code_block")]


class _Flattener:
    """Walks the tokens once; a stack holds what each open quote or list puts left of its lines."""

    def __init__(self) -> None:
        self._leaves: list[Leaf] = []
        self._prefixes: list[_Prefix] = []
        self._lists: list[int | None] = []  # the next number of each open list; None: bullets
        self._tight = False
        self._heading = ""
        self._rows: list[list[Content]] = []

    def flatten(self, tokens: Iterable[Token]) -> list[Leaf]:
        for token in tokens:
            self._take(token)
        return self._leaves

    def _take(self, token: Token) -> None:
        match token.type:
            case "heading_open":
                self._heading = f"h{min(int(token.tag[1]), 4)}"
            case "heading_close":
                self._heading = ""
            case "blockquote_open":
                self._prefixes.append(_Prefix(Content.styled("▏ ", "quote"), Content.styled("▏ ", "quote")))
            case "bullet_list_open":
                self._lists.append(None)
            case "ordered_list_open":
                self._lists.append(int(token.attrs.get("start") or 1))
            case "bullet_list_close" | "ordered_list_close":
                self._lists.pop()
            case "list_item_open":
                self._open_item()
            case "blockquote_close" | "list_item_close":
                self._prefixes.pop()
            case "paragraph_open":
                self._tight = token.hidden
            case "inline" if not self._rows:
                self._add(Kind.TEXT, inline(token.children or (), self._heading))
            case "inline":
                self._rows[-1].append(inline(token.children or ()))
            case "fence" | "code_block":
                code = clean(token.content.removesuffix("\n")).expandtabs(TAB)
                self._add(Kind.CODE, Content(code), language=clean_line(token.info.split(" ")[0]))
            case "hr":
                self._add(Kind.RULE, Content())
            case "table_open":
                self._rows = [[]]
            case "tr_open" if self._rows != [[]]:
                self._rows.append([])
            case "table_close":
                rows, self._rows = tuple(map(tuple, self._rows)), []
                self._add(Kind.TABLE, Content(), rows=rows)
            case _:
                pass

    def _open_item(self) -> None:
        number = self._lists[-1]
        if number is None:
            mark = BULLETS[(len(self._lists) - 1) % len(BULLETS)]
        else:
            mark, self._lists[-1] = f"{number}.", number + 1
        self._prefixes.append(_Prefix(Content.styled(f"{mark} ", "bullet"), Content(" " * (len(mark) + 1))))

    def _add(
        self, kind: Kind, content: Content, *, language: str = "", rows: tuple[tuple[Content, ...], ...] = ()
    ) -> None:
        first, rest = Content(), Content()
        for prefix in self._prefixes:
            first, rest = first + prefix.take(), rest + prefix.rest
        # items of one list stand close together, a list and what is around it apart
        close = self._tight and kind is Kind.TEXT and bool(self._lists) and bool(self._leaves)
        gap = bool(self._leaves) and not (close and self._leaves[-1].first)
        self._leaves.append(Leaf(kind, content, language, rows, first, rest, gap))


@dataclass(slots=True)
class _Prefix:
    """`first` left of the first line inside, `rest` left of all others."""

    first: Content
    rest: Content
    used: bool = False

    def take(self) -> Content:
        used, self.used = self.used, True
        return self.rest if used else self.first


def inline(children: Iterable[Token], style: str = "") -> Content:
    """Text with emphasis, code and links; `style` lies under all of it."""
    pieces: list[str] = []
    spans: list[Span] = []
    opened: list[tuple[str, int, str]] = []
    at = 0

    def add(text: str) -> int:
        nonlocal at
        pieces.append(clean(text).replace("\t", " "))
        at += len(pieces[-1])
        return at

    for child in children:
        match child.type:
            case "text" | "html_inline" | "text_special":
                add(child.content)
            case "softbreak" | "hardbreak":
                add("\n")
            case "code_inline":
                spans.append(Span(at, add(child.content), "code"))
            case "image":
                spans.append(Span(at, add(f"[{child.content or 'image'}] ({child.attrs.get('src', '')})"), "link"))
            case "link_open":
                opened.append(("link", at, str(child.attrs.get("href", ""))))
            case "strong_open" | "em_open" | "s_open":
                opened.append((child.type.removesuffix("_open"), at, ""))
            case "strong_close" | "em_close" | "s_close" | "link_close":
                name, start, address = opened.pop()
                spans.append(Span(start, at, name))
                if address and address.removeprefix("mailto:") != "".join(pieces)[start:]:
                    spans.append(Span(at, add(f" ({address})"), "address"))
            case _:
                pass
    text = "".join(pieces)
    return Content(text, [Span(0, len(text), style), *spans] if style else spans)
