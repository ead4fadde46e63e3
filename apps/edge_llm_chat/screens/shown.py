"""ShownScreen: a conversation on the screen: its parts, and what the user is told."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.screen import Screen
from textual.widgets import OptionList, Static

from edge_llm.errors import EdgeLLMError
from edge_llm.messages import Role
from edge_llm.text.terminal import clean_line
from edge_llm_chat.conversation import Attachment, Conversation, Facts, Turn
from edge_llm_chat.widgets.composer import Composer
from edge_llm_chat.widgets.message_lines import Place
from edge_llm_chat.widgets.status import StatusLine
from edge_llm_chat.widgets.transcript import Transcript

if TYPE_CHECKING:
    from edge_llm_chat.app import ChatApp

WIDE = 64
"""columns of a window that has room for more than what is needed most"""
_READ_PER_S = 15
"""characters that somebody reads who was doing something else"""
WELCOME = "Ask anything.\nEnter sends · Ctrl+J new line\n/ commands · F1 help"


class ShownScreen(Screen[None]):
    """Shows a `Conversation`, and where its next question is written."""

    app: ChatApp
    BLANK = True  # widgets cover it
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+c", "copy_selection", "Copy what is selected", id="chat.copy_selection"),
        Binding("pageup", "scroll(-1)", "Scroll up", id="chat.page_up", priority=True),
        Binding("pagedown", "scroll(1)", "Scroll down", id="chat.page_down", priority=True),
        Binding("shift+tab,ctrl+up", "messages", "To the messages", id="chat.messages", priority=True),
    ]

    def __init__(self, conversation: Conversation) -> None:
        super().__init__()
        self.conversation = conversation
        self._editing: int | None = None  # the question that is written anew
        self._attached: list[Attachment] = []
        self._told: dict[str, float] = {}  # what was said, and until when it is to be seen

    def compose(self) -> ComposeResult:
        yield Static(id="title", markup=False)
        yield Static(WELCOME, id="welcome", markup=False)
        yield Transcript()
        yield OptionList(id="completions", markup=False)
        yield Static(id="attached", markup=False)
        yield Composer()
        yield StatusLine()

    # --- parts ---

    @property
    def transcript(self) -> Transcript:
        return self.query_one(Transcript)

    @property
    def composer(self) -> Composer:
        return self.query_one(Composer)

    @property
    def status(self) -> StatusLine:
        return self.query_one(StatusLine)

    async def show_path(self, *, follow: bool = True) -> None:
        """Show the turns of the path, and which versions there are."""
        path = self.conversation.path()
        await self.transcript.show(path, [self._place(turn) for turn in path])
        if follow:
            self.transcript.follow()
        self.query_one("#welcome").display = not path
        self.transcript.display = bool(path)
        self._show_title()
        self._show_facts(next((turn.facts for turn in reversed(path) if turn.role is Role.ASSISTANT), Facts()))

    def _place(self, turn: Turn) -> Place:
        siblings = self.conversation.siblings(turn.id)
        return Place(siblings.index(turn.id) + 1, len(siblings))

    def _show_title(self) -> None:
        title = clean_line(self.conversation.title) or "New chat"
        marks = ["pinned"] if self.conversation.pinned else []
        marks += [f"#{clean_line(tag)}" for tag in self.conversation.tags]
        self.query_one("#title", Static).update(
            Content.assemble((title, "bold $foreground"), *(f"  {mark}" for mark in marks))
        )

    def _show_facts(self, facts: Facts) -> None:
        known = facts.prompt_tokens > 0
        self.status.tell(
            context_used=facts.prompt_tokens + facts.completion_tokens if known else None,
            cached=facts.cached_tokens / facts.prompt_tokens if known else None,
            ttft_s=facts.ttft_s,
            tokens_per_s=facts.tokens_per_s,
            kv_bytes=self.app.backend.kv_bytes(),
        )

    def report(self, error: EdgeLLMError) -> None:
        """Say what went wrong, and what to do about it."""
        self.notify(words(error), severity="error", markup=False, timeout=8)

    @contextmanager
    def reported(self) -> Iterator[None]:
        """What goes wrong inside is said, and the program goes on."""
        try:
            yield
        except EdgeLLMError as error:
            self.report(error)

    def tell(self, text: str) -> None:
        """Say something for as long as it takes to read; what is on the screen already is not said again."""
        lasts_s, now = max(3.0, len(text) / _READ_PER_S), time.monotonic()
        if self._told.get(text, 0.0) < now:
            self._told = {one: until for one, until in self._told.items() if until > now} | {text: now + lasts_s}
            self.notify(clean_line(text), markup=False, timeout=lasts_s)

    def action_copy_selection(self) -> None:
        text = self.get_selected_text()
        if text:
            self.app.copy_to_clipboard(text)
            self.tell("Copied")
        else:
            self.tell("Nothing is selected. Ctrl+Q leaves, Escape stops an answer")

    def action_scroll(self, direction: int) -> None:
        if direction < 0:
            self.transcript.scroll_page_up(animate=False)
        else:
            self.transcript.scroll_page_down(animate=False)

    def action_messages(self) -> None:
        views = self.transcript.views
        if views:
            views[-1].focus()

    def on_transcript_left(self) -> None:
        self.composer.focus()

    def _show_hint(self, text: str = "") -> None:
        """What is to be known of the question that is being written."""
        editing = ["editing: Escape leaves"] if self._editing is not None else []
        self.composer.border_subtitle = " · ".join([*editing, *([text] if text else [])])

    def _show_attached(self) -> None:
        attached = self.query_one("#attached", Static)
        attached.update(Content("  ".join(f"▤ {clean_line(item.name)}" for item in self._attached)))
        attached.set_class(bool(self._attached), "some")


def words(error: EdgeLLMError) -> str:
    """What went wrong, and what to do about it."""
    return clean_line(str(error)) + (f"\n{clean_line(error.hint)}" if error.hint else "")
