"""Palette: the styles that text is drawn with, taken from the theme once, so that lines can be drawn on any thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from textual.style import Style

STYLES = (
    *("text", "dim", "strong", "em", "s", "code", "link", "address", "h1", "h2", "h3", "h4", "quote", "bullet", "rule"),
    *("block", "comment", "keyword", "string", "number", "name", "function", "operator", "error"),
)
"""names of styles; a widget that draws text has a component class `text--NAME` for each"""


@dataclass(frozen=True)
class Palette:
    """Styles by name; one that is not there changes nothing."""

    styles: Mapping[str, Style]

    @classmethod
    def of(cls, style_of: Callable[[str], Style]) -> Palette:
        """`style_of` is asked for each component class."""
        return cls({name: style_of(f"text--{name}") for name in STYLES})

    def __call__(self, style: str | Style) -> Style:
        return self.styles.get(style, Style.null()) if isinstance(style, str) else style
