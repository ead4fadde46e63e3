"""Composer: where a question is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import TextArea

from edge_llm.text.terminal import clean


class Composer(TextArea):
    """A text of several lines. Enter sends it; what is pasted arrives whole, made harmless for the terminal."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "send", "Send", id="composer.send"),
        Binding("shift+enter,ctrl+j", "new_line", "New line", id="composer.new_line"),
        Binding("tab", "complete", "Complete a command or a file", id="composer.complete"),
        Binding("ctrl+c", "copy_or_hint", id="composer.copy"),  # the screen's own says what it does
    ]

    @dataclass
    class Sent(Message):
        text: str

    @dataclass
    class WentUp(Message):
        """Up in the first line; `empty` tells whether anything was written."""

        empty: bool

    @dataclass
    class Written(Message):
        """The text has changed."""

        text: str

    @dataclass
    class Completing(Message):
        """Tab was pressed."""

        text: str

    @dataclass
    class Moving(Message):
        """A key for the list of completions, while it is open."""

        by: int

    def __init__(self) -> None:
        super().__init__(
            soft_wrap=True,
            show_line_numbers=False,
            tab_behavior="focus",
            highlight_cursor_line=False,
            placeholder="Ask anything",
            id="composer",
        )
        self.completing = False
        """a list of completions is open: Up and Down are for it"""

    async def _on_key(self, event: events.Key) -> None:
        # Here and not in a priority binding: those overtake the keys before them, and an answer's question would lack its end.
        active = None if event.is_printable else self.screen.active_bindings.get(event.key)
        if active is None or active.node is not self:
            return  # the text area's own handler comes next
        event.stop()
        event.prevent_default()
        await self.run_action(active.binding.action)

    def write(self, text: str) -> None:
        """Replace what is written, the cursor behind it."""
        self.load_text(clean(text))
        self.move_cursor(self.document.end)

    def put_back(self, text: str) -> None:
        """Write what could not be sent again, before what was typed meanwhile."""
        self.write(text + self.text)

    def action_send(self) -> None:
        text = self.text
        if text.strip():
            self.clear()  # now: what is typed next belongs to the next message
            self.post_message(self.Sent(text))

    def action_new_line(self) -> None:
        self._replace_via_keyboard("\n", *self.selection)

    def action_complete(self) -> None:
        if self.text:
            self.post_message(self.Completing(self.text))
        else:
            self.screen.focus_previous()

    async def action_copy_or_hint(self) -> None:
        if self.selected_text:
            self.app.copy_to_clipboard(self.selected_text)
        else:
            await self.run_action("screen.copy_selection")

    def action_cursor_up(self, select: bool = False) -> None:
        if self.completing:
            self.post_message(self.Moving(-1))
        elif self.cursor_at_first_line and not select:
            self.post_message(self.WentUp(not self.text))
            if self.text:
                super().action_cursor_up(select)
        else:
            super().action_cursor_up(select)

    def action_cursor_down(self, select: bool = False) -> None:
        if self.completing:
            self.post_message(self.Moving(1))
        else:
            super().action_cursor_down(select)

    async def _on_paste(self, event: events.Paste) -> None:
        event.stop()
        event.prevent_default()
        result = self._replace_via_keyboard(
            clean(event.text.replace("\r\n", "\n").replace("\r", "\n")), *self.selection
        )
        if result:
            self.move_cursor(result.end_location)

    def on_text_area_changed(self, event: TextArea.Changed) -> None:
        event.stop()
        self.post_message(self.Written(self.text))
