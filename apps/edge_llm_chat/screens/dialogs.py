"""Small dialogs: to pick one of a list, to write something, to say yes or no. Each is dismissed with what was chosen, or None."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static, TextArea
from textual.widgets.option_list import Option

from edge_llm.text.terminal import clean, clean_line


@dataclass(frozen=True, slots=True)
class Choice:
    """One line of a list; what was typed is searched for in `label`."""

    id: str
    label: str
    detail: str = ""

    def content(self) -> Content:
        label, detail = Content(clean_line(self.label)), clean_line(self.detail)
        return Content.assemble(label, ("\n" + detail, "$foreground-muted")) if detail else label


class PickScreen(ModalScreen[str | None]):
    """A list with a line to search it by; gives the id of the choice."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "Back"),
        Binding("down", "move(1)", "Next", priority=True),
        Binding("up", "move(-1)", "Previous", priority=True),
    ]

    def __init__(self, title: str, choices: Sequence[Choice], *, current: str | None = None) -> None:
        super().__init__()
        self._title, self._choices, self._current = title, choices, current

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as dialog:
            dialog.border_title = clean_line(self._title)
            dialog.border_subtitle = "Enter chooses · Escape leaves"
            yield Input(placeholder="search")
            yield OptionList(markup=False)

    def on_mount(self) -> None:
        self._show("")

    def _show(self, words: str) -> None:
        wanted = words.lower().split()
        found = [one for one in self._choices if all(word in f"{one.label} {one.detail}".lower() for word in wanted)]
        options = self.query_one(OptionList)
        options.clear_options()
        options.add_options([Option(one.content(), id=one.id) for one in found])
        ids = [one.id for one in found]
        options.highlighted = ids.index(self._current) if self._current in ids else (0 if ids else None)

    def on_input_changed(self, event: Input.Changed) -> None:
        self._show(event.value)

    def on_input_submitted(self) -> None:
        option = self.query_one(OptionList).highlighted_option
        if option is not None:
            self.dismiss(option.id)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option_id)

    def action_move(self, by: int) -> None:
        options = self.query_one(OptionList)
        (options.action_cursor_down if by > 0 else options.action_cursor_up)()


class LineScreen(ModalScreen[str | None]):
    """One line of text."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "Back")]

    def __init__(
        self, title: str, text: str = "", *, hint: str = "", check: Callable[[str], str] = lambda _: ""
    ) -> None:
        """`check` says what is wrong with a text, or nothing."""
        super().__init__()
        self._title, self._text, self._hint, self._check = title, text, hint, check

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as dialog:
            dialog.border_title = clean_line(self._title)
            dialog.border_subtitle = "Enter keeps · Escape leaves"
            yield Input(clean_line(self._text))
            yield Static(clean(self._hint), classes="hint", markup=False)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        value = event.value.strip()
        wrong = self._check(value)
        if wrong:
            self.query_one(Static).update(Content.styled(clean_line(wrong), "$text-error"))
        else:
            self.dismiss(value)


class _Paragraphs(TextArea):
    async def _on_paste(self, event: events.Paste) -> None:
        event.prevent_default()
        await super()._on_paste(events.Paste(clean(event.text)))
        event.stop()


class TextScreen(ModalScreen[str | None]):
    """Several lines of text."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "Back"),
        Binding("ctrl+s", "keep", "Keep", priority=True),
    ]

    def __init__(self, title: str, text: str = "") -> None:
        super().__init__()
        self._title, self._text = title, text

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as dialog:
            dialog.border_title = clean_line(self._title)
            dialog.border_subtitle = "Ctrl+S keeps · Escape leaves"
            yield _Paragraphs(clean(self._text), soft_wrap=True, show_line_numbers=False, id="paragraphs")

    def action_keep(self) -> None:
        self.dismiss(self.query_one(TextArea).text)


class ConfirmScreen(ModalScreen[bool]):
    """Yes or no; Enter is no, so that nothing is lost by habit."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "Yes"),
        Binding("n,escape,enter", "dismiss(False)", "No"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as dialog:
            dialog.border_subtitle = "y yes · n no"
            yield Static(clean(self._question), markup=False, classes="question")
