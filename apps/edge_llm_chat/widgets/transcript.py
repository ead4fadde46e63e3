"""Transcript: the messages of the path that is shown, and the scrolling that follows while the reader is at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.message import Message
from textual.widgets import Static

from edge_llm_chat.conversation import Turn
from edge_llm_chat.widgets.message import MessageView
from edge_llm_chat.widgets.message_lines import Place


class Transcript(VerticalScroll, can_focus=False):
    """Holds one `MessageView` for each turn that is shown."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "neighbour(-1)", "The message before", id="transcript.up"),
        Binding("down,j", "neighbour(1)", "The next message, or back to typing", id="transcript.down"),
        Binding("home", "scroll_home", "To the beginning", id="transcript.home"),
        Binding("end", "scroll_end", "To the end", id="transcript.end"),
    ]

    @dataclass
    class Left(Message):
        """The user has gone down past the last message."""

    BLANK = True  # nothing is drawn of it but its ground: that is cheap

    def __init__(self) -> None:
        super().__init__(id="transcript")
        self.following = True
        """the reader is at the end: what comes is scrolled into view"""

    async def show(self, turns: Sequence[Turn], places: Sequence[Place]) -> None:
        """Show these turns; views of turns that stay are kept."""
        old = list(self.views)
        same = 0
        while same < min(len(old), len(turns)) and old[same].turn is turns[same]:
            old[same].show_place(places[same])
            same += 1
        async with self.batch():
            for gone in (*self.query_children(".notice"), *old[same:]):
                await gone.remove()
            await self.mount_all(
                MessageView(turn, place) for turn, place in zip(turns[same:], places[same:], strict=True)
            )

    async def add(self, turn: Turn, place: Place = Place(), *, streaming: bool = False) -> MessageView:  # noqa: B008
        """One more turn at the end."""
        view = MessageView(turn, place, streaming=streaming)
        await self.mount(view)
        return view

    async def tell(self, text: str) -> None:
        """Say below the messages why no answer follows; until the next change."""
        for old in self.query_children(".notice"):
            await old.remove()
        indented = text.replace("\n", "\n  ")
        await self.mount(Static(f"✕ {indented}", markup=False, classes="notice"))

    def follow(self) -> None:
        """Go to the end and stay there until the reader scrolls up."""
        self.following = True
        self.scroll_end(animate=False, immediate=True)

    # Textual's own `anchor` would put a short conversation at the bottom of the window.

    def watch_virtual_size(self) -> None:
        if self.following:
            self.scroll_end(animate=False, immediate=True)

    def grow(self, by: int) -> None:
        """A message becomes `by` lines longer: scroll now, and not when that is laid out, for then it would be painted twice."""
        if by > 0 and self.following and self.max_scroll_y > 0:
            self.virtual_size += (0, by)

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        if new_value >= self.max_scroll_y:
            self.following = True

    def release_anchor(self) -> None:
        """Called by Textual when the reader scrolls."""
        super().release_anchor()
        self.following = False
        self.call_after_refresh(self._look_where)

    def _look_where(self) -> None:
        self.following = self.following or self.scroll_y >= self.max_scroll_y

    def on_resize(self) -> None:
        if self.following:
            self.call_after_refresh(self.follow)

    @property
    def views(self) -> Sequence[MessageView]:
        return list(self.query_children(MessageView))

    def view_of(self, turn: int) -> MessageView | None:
        return next((view for view in self.views if view.turn.id == turn), None)

    def action_neighbour(self, by: int) -> None:
        views = self.views
        focused = next((i for i, view in enumerate(views) if view.has_focus), len(views))
        if 0 <= focused + by < len(views):
            views[focused + by].focus()
        elif by > 0:
            self.post_message(self.Left())

    def on_click(self, event: events.Click) -> None:
        if event.widget is self:
            self.post_message(self.Left())
