"""ChatApp: the full-screen chat. It owns the store and the backend; the screens use them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from textual.app import App
from textual.binding import Binding, BindingType

from edge_llm_chat.backend import ChatBackend
from edge_llm_chat.conversation import Conversation
from edge_llm_chat.store import Store
from edge_llm_chat.themes import DARK, LIGHT


@dataclass(frozen=True, slots=True)
class Start:
    """What the command line asks for."""

    conversation: int | None = None
    """the stored conversation to go on with"""
    pick: bool = False
    """begin with the list of conversations"""
    system: str | None = None
    parameters: dict[str, float | int] = field(default_factory=dict)
    private: bool = False
    theme: str = DARK.name


class ChatApp(App[None]):
    """A conversation with the model behind `backend`, kept in `store`."""

    CSS_PATH = "chat.tcss"
    TITLE = "edge-llm"
    ENABLE_COMMAND_PALETTE = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+q", "quit", "Leave", id="app.quit", priority=True, show=False),
    ]

    def __init__(self, backend: ChatBackend, store: Store, start: Start = Start()) -> None:
        super().__init__()
        self.backend = backend
        self.store = store
        self.start = start
        for theme in (DARK, LIGHT):
            self.register_theme(theme)
        self.theme = start.theme

    def on_mount(self) -> None:
        from edge_llm_chat.screens.conversation import ConversationScreen

        start = self.start
        if start.conversation is not None:
            conversation = self.store.load(start.conversation)
        else:
            conversation = Conversation(system=start.system)
        conversation.parameters |= start.parameters
        self.push_screen(ConversationScreen(conversation))

    async def action_quit(self) -> None:
        self.backend.close()
        self.exit()
