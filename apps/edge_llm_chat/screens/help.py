"""HelpScreen: all keys and commands, read from the bindings and the list of commands themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from edge_llm_chat.commands import COMMANDS

_WIDTH = 22
_NAMES = {
    "ctrl": "^",
    "shift": "⇧",
    "pageup": "PgUp",
    "pagedown": "PgDn",
    "left": "←",
    "right": "→",
    "up": "↑",
    "down": "↓",
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
            yield Static(self._text(), markup=False)

    def _text(self) -> Content:
        lines: list[Content] = []
        keymap = self.app._keymap
        for heading, owners in self._sections.items():
            lines += [Content.styled(heading, "bold $text-primary")]
            lines += [_line(keys, what) for owner in owners for keys, what in keys_of(owner, keymap)]
            lines += [Content()]
        lines += [Content.styled("Commands", "bold $text-primary")]
        lines += [_line(command.usage, command.help) for command in COMMANDS]
        lines += [Content(), Content("@path in a question attaches that text file.")]
        return Content("\n").join(lines)


def keys_of(owner: type, keymap: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(keys, what they do) of a class's own bindings, as the user's keymap has them."""
    for binding in owner.__dict__.get("BINDINGS", ()):
        if isinstance(binding, Binding) and binding.description:
            keys = keymap.get(binding.id or "", binding.key)
            yield " ".join(named(key) for key in keys.split(",")), binding.description


def named(key: str) -> str:
    """A key as people write it."""
    shown = "".join(_NAMES.get(part, part if len(part) == 1 else part.capitalize()) for part in key.split("+"))
    return shown.upper() if shown.startswith("^") and len(shown) == 2 else shown


def _line(left: str, right: str) -> Content:
    return Content.assemble((f"  {left:<{_WIDTH}}", "$text-accent"), " ", right)
