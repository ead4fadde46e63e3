"""HelpScreen: all keys and commands, read from the bindings and the list of commands themselves."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from edge_llm_chat.commands import COMMANDS
from edge_llm_chat.screens.shown import WIDE

_COLUMN = 22
"""cells for keys and commands, before what they do"""
_NAMES = {"pageup": "PgUp", "pagedown": "PgDn", "left": "←", "right": "→", "up": "↑", "down": "↓"}
_FIGURES = {
    "ctx": "How full the context is: what the model sees at once",
    "kv": "Memory of what the model has read",
    "hit": "Share of the prompt that did not have to be read again",
    "ttft": "Time to the first token",
    "tok/s": "Tokens a second",
}


class HelpScreen(ModalScreen[None]):
    """Told the classes whose keys there are, under headings."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,f1,q", "dismiss", "Back")]

    def __init__(self, sections: Mapping[str, tuple[type, ...]]) -> None:
        super().__init__()
        self._sections = sections

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog", id="help") as dialog:
            dialog.border_title = "Keys and commands"
            dialog.border_subtitle = "Escape"
            yield Static(markup=False)

    def on_resize(self, event: events.Resize) -> None:
        self.query_one(Static).update(self._text(min(event.size.width, 84) - 5))  # beside border, padding and scrollbar

    def _text(self, width: int) -> Content:
        lines: list[Content] = []
        keymap = self.app._keymap
        for heading, owners in self._sections.items():
            lines += [Content.styled(heading, "bold $text-primary")]
            lines += [_line(keys, what, width) for owner in owners for keys, what in keys_of(owner, keymap)]
            lines += [Content()]
        lines += [Content.styled("Commands", "bold $text-primary")]
        lines += [_line(command.usage, command.help, width) for command in COMMANDS]
        lines += [_line("@path", "In a question: attach that text file", width), Content()]
        lines += [Content.styled("In the line at the bottom", "bold $text-primary")]
        lines += [_line(figure, what, width) for figure, what in _FIGURES.items()]
        return Content("\n").join(lines)


def keys_of(owner: type, keymap: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(keys, what they do) of a class's own bindings, as the user's keymap has them."""
    for binding in owner.__dict__.get("BINDINGS", ()):
        if isinstance(binding, Binding) and binding.description:
            keys = keymap.get(binding.id or "", binding.key)
            yield ", ".join(named(key) for key in keys.split(",")), binding.description


def named(key: str) -> str:
    """A key as people write it."""
    *held, last = (_NAMES.get(part, part if len(part) == 1 else part.capitalize()) for part in key.split("+"))
    return "+".join([*held, last.upper() if held and len(last) == 1 else last])


def _line(left: str, right: str, width: int) -> Content:
    """Two columns, or one after the other where two have no room; what goes on below is indented."""
    lead = f"  {left:<{_COLUMN if width >= WIDE else 0}}  "
    indent = " " * (len(lead) if width >= WIDE else 4)
    text = "\n".join(textwrap.wrap(lead.replace(" ", "_") + right, width, subsequent_indent=indent))
    return Content.assemble((lead, "$text-accent"), text[len(lead) :])
