"""HistoryScreen: the stored conversations, with search as you type."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar

from textual import events, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList
from textual.widgets.option_list import Option

from edge_llm.errors import EdgeLLMError
from edge_llm.text.terminal import clean_line
from edge_llm_chat.screens.dialogs import ConfirmScreen, LineScreen
from edge_llm_chat.screens.shown import WIDE
from edge_llm_chat.summaries import Summary

if TYPE_CHECKING:
    from edge_llm_chat.app import ChatApp


class HistoryScreen(ModalScreen[int | None]):
    """Gives the id of the conversation to open."""

    app: ChatApp
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "Back", id="history.back"),
        Binding("down", "move(1)", "Next", id="history.down", priority=True),
        Binding("up", "move(-1)", "Previous", id="history.up", priority=True),
        Binding("f2", "rename", "Rename", id="history.rename"),
        Binding("ctrl+t", "tags", "Tags", id="history.tags"),
        Binding("ctrl+b", "pin", "Pin or unpin", id="history.pin"),
        Binding("ctrl+d,delete", "delete", "Delete", id="history.delete", priority=True),
    ]

    def __init__(self, *, opened: int | None = None) -> None:
        """`opened` is the conversation that is open and cannot be deleted here."""
        super().__init__()
        self._opened = opened
        self._found: list[Summary] = []

    def on_resize(self, event: events.Resize) -> None:
        keys = ["F2 rename", "^T tags", "^D delete"]
        if event.size.width >= WIDE:
            keys = ["Enter opens", *keys[:2], "^B pin", keys[2]]
        self.query_one("#history").border_subtitle = " · ".join(keys)

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog", id="history") as dialog:
            dialog.border_title = "Chats"
            yield Input(placeholder="search titles, texts and #tags")
            yield OptionList(markup=False)

    def on_mount(self) -> None:
        self._show()

    def _show(self, keep: int | None = None) -> None:
        options = self.query_one(OptionList)
        try:
            self._found = self.app.store.find(self.query_one(Input).value)
        except EdgeLLMError as error:
            self._found = []
            self._say(error)
        options.clear_options()
        now = time.time()
        options.add_options([Option(row(one, now, one.id == self._opened), id=str(one.id)) for one in self._found])
        ids = [one.id for one in self._found]
        options.highlighted = ids.index(keep) if keep in ids else (0 if ids else None)
        if not ids:
            options.add_option(Option(Content.styled("nothing found", "$foreground-muted"), disabled=True))

    def on_input_changed(self) -> None:
        self._show()

    def on_input_submitted(self) -> None:
        if self._chosen is not None:
            self.dismiss(self._chosen.id)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        if event.option_id is not None:
            self.dismiss(int(event.option_id))

    @property
    def _chosen(self) -> Summary | None:
        at = self.query_one(OptionList).highlighted
        return self._found[at] if at is not None and at < len(self._found) else None

    def action_move(self, by: int) -> None:
        options = self.query_one(OptionList)
        (options.action_cursor_down if by > 0 else options.action_cursor_up)()

    @work
    async def action_rename(self) -> None:
        if (chosen := self._chosen) is None:
            return
        title = await self.app.push_screen_wait(LineScreen("Rename", chosen.title))
        if title:
            self._change(chosen.id, title=title)

    @work
    async def action_tags(self) -> None:
        if (chosen := self._chosen) is None:
            return
        text = await self.app.push_screen_wait(LineScreen("Tags", " ".join(chosen.tags), hint="words, without #"))
        if text is not None:
            self._change(chosen.id, tags=tags_of(text))

    def action_pin(self) -> None:
        if (chosen := self._chosen) is not None:
            self._change(chosen.id, pinned=not chosen.pinned)

    def _change(self, conversation: int, **changes: object) -> None:
        try:
            self.app.change_conversation(conversation, **changes)
        except EdgeLLMError as error:
            self._say(error)
        self._show(conversation)

    def _say(self, error: EdgeLLMError) -> None:
        self.notify(clean_line(str(error)), severity="error", markup=False)

    @work
    async def action_delete(self) -> None:
        if (chosen := self._chosen) is None:
            return
        if chosen.id == self._opened:
            self.notify("This chat is open: /delete deletes it", markup=False)
            return
        if await self.app.push_screen_wait(ConfirmScreen(f"Delete “{chosen.title}” and its {chosen.turns} messages?")):
            try:
                self.app.store.delete(chosen.id)
            except EdgeLLMError as error:
                self._say(error)
            self._show()


def row(summary: Summary, now: float, opened: bool) -> Content:
    """Two lines: the title, and below what else is known, faint."""
    title = clean_line(summary.title) or "untitled"
    mark = "● " if opened else ("▲ " if summary.pinned else "  ")
    facts = [age(now - summary.updated), f"{summary.turns} messages", *(f"#{clean_line(tag)}" for tag in summary.tags)]
    second = clean_line(summary.excerpt) if summary.excerpt else " · ".join(facts)
    return Content.assemble((mark, "$text-accent"), title, ("\n  " + second, "$foreground-muted"))


def age(seconds: float) -> str:
    """How long ago, in the largest whole unit."""
    for size, name in ((86_400 * 7, "week"), (86_400, "day"), (3_600, "hour"), (60, "minute")):
        count = int(seconds // size)
        if count:
            return f"{count} {name}{'s' if count > 1 else ''} ago"
    return "just now"


def tags_of(text: str) -> tuple[str, ...]:
    """Tags from words, with or without #."""
    return tuple(dict.fromkeys(word.lstrip("#") for word in clean_line(text).split() if word.lstrip("#")))
