"""SettingsScreen: how this chat samples, one line a parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, Label, Static

from edge_llm.errors import ParameterError
from edge_llm.text.terminal import clean_line
from edge_llm_chat import parameters
from edge_llm_chat.parameters import PARAMETERS


class SettingsScreen(ModalScreen[dict[str, float | int] | None]):
    """Gives the new values. An empty line leaves a parameter to the model."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "Back", id="settings.back"),
        Binding("enter", "keep", "Keep", id="settings.keep"),
        # priority: in a low window the dialog itself would scroll by them
        Binding("down", "app.focus_next", "Next", id="settings.down", priority=True),
        Binding("up", "app.focus_previous", "Previous", id="settings.up", priority=True),
    ]

    def __init__(self, values: Mapping[str, float | int]) -> None:
        super().__init__()
        self._values = values
        self.HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (80, "-wide")]

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog", id="settings", can_focus=False) as dialog:
            dialog.border_title = "Sampling of this chat"
            dialog.border_subtitle = "Enter keeps · Escape leaves"
            for parameter in PARAMETERS:
                with Horizontal(classes="row"):
                    yield Label(parameter.name, markup=False)
                    yield Input(str(self._values.get(parameter.name, "")), placeholder="default", id=parameter.name)
                    yield Static(parameter.help, classes="hint", markup=False)
            yield Static("", id="about", markup=False)
            yield Static("", id="wrong", markup=False)

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        if event.widget.id in parameters.BY_NAME:
            self.query_one("#about", Static).update(parameters.BY_NAME[event.widget.id].help)

    def _tell(self, wrong: Content) -> None:
        """In a narrow window, where the help of a line is otherwise."""
        self.query_one("#about" if self.has_class("-narrow") else "#wrong", Static).update(wrong)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Enter, after all keys before it: a binding with priority would overtake them."""
        event.stop()
        self.action_keep()

    def action_keep(self) -> None:
        values: dict[str, float | int] = {}
        try:
            for parameter in PARAMETERS:
                values = parameters.changed(values, parameter.name, self.query_one(f"#{parameter.name}", Input).value)
        except ParameterError as error:
            self.query_one(f"#{parameter.name}", Input).focus()
            self.call_after_refresh(self._tell, Content.styled(clean_line(str(error)), "$text-error"))
            return
        self.dismiss(values)
