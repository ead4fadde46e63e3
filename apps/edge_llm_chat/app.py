"""ChatApp: the full-screen chat. It owns the store and the backend; the screens use them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.driver import Driver
from textual.screen import Screen

from edge_llm.errors import EdgeLLMError
from edge_llm_chat.backend import ChatBackend
from edge_llm_chat.clipboard import copy_locally
from edge_llm_chat.commands import COMMANDS
from edge_llm_chat.conversation import Conversation
from edge_llm_chat.paste import MOST_PASTED, PasteCut, PasteParser
from edge_llm_chat.preferences import Preferences
from edge_llm_chat.signals import go_on_after_stops, leave_on_signals
from edge_llm_chat.store import Store
from edge_llm_chat.themes import DARK, LIGHT
from edge_llm_chat.writer import Writer

_OF_DRIVERS = {"XTermParser": PasteParser, "WriterThread": Writer}
"""what takes the place of Textual's own"""


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
    tools: tuple[str, ...] = ()
    """names of tools that the model may ask for"""
    notice: str = ""
    """something to say once, at the beginning"""


class ChatApp(App[None]):
    """A conversation with the model behind `backend`, kept in `store`; `connect` gives the backend of another model."""

    CSS_PATH = "chat.tcss"
    TITLE = "edge-llm"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+q", "quit", "Leave", id="app.quit", priority=True, show=False),
        Binding("ctrl+p", "command_palette", "All commands", id="app.palette", priority=True, show=False),
    ]
    COMMAND_PALETTE_BINDING = "ctrl+p"

    def __init__(
        self,
        backend: ChatBackend,
        store: Store,
        start: Start | None = None,
        *,
        connect: Callable[[str | None], ChatBackend] | None = None,
        preferences: Preferences | None = None,
    ) -> None:
        super().__init__()
        self.backend = backend
        self.store = store
        self.start = start or Start()
        self._connect = connect
        preferences = preferences or Preferences()
        for theme in (DARK, LIGHT):
            self.register_theme(theme)
        themes = [store.setting("theme"), preferences.theme, DARK.name]
        self.theme = next(name for name in themes if name in self.available_themes)
        self.set_keymap(dict(preferences.keys))

    def get_driver_class(self) -> type[Driver]:
        """The driver of the platform, or of a browser; what it reads and writes goes through our classes, whichever it is."""
        driver = super().get_driver_class()
        for base in driver.__mro__:
            names = vars(sys.modules[base.__module__])
            names |= {own: made for own, made in _OF_DRIVERS.items() if own in names}
        return driver

    def on_paste_cut(self, _event: PasteCut) -> None:
        self.notify(
            f"Only the first {MOST_PASTED:,} characters were pasted; /attach takes whole files",
            severity="warning",
            markup=False,
        )

    def on_mount(self) -> None:
        from edge_llm_chat.screens.chat import ChatScreen

        if not self.is_headless:
            leave_on_signals(lambda code: self.exit(return_code=code))
            if self._driver is not None:
                go_on_after_stops(self._driver, self.refresh)
        start = self.start
        stored = start.conversation
        conversation = Conversation() if stored is None else self.store.load(stored)
        if start.system is not None:
            conversation.system = start.system
        conversation.parameters |= start.parameters
        screen = ChatScreen(conversation)
        if start.tools:
            screen.belt.take(start.tools)
        self.push_screen(screen)
        if start.pick:
            self.call_later(screen.action_do, "history")
        if start.notice:
            self.call_later(screen.tell, start.notice)

    async def on_unmount(self) -> None:
        await self.backend.close()

    async def change_model(self, name: str) -> None:
        """Put the backend of another model in the place of this one; it is not loaded yet."""
        if self._connect is not None:
            await self.backend.close()
            self.backend = self._connect(name)

    def change_conversation(self, conversation: int, **changes: object) -> None:
        """Change title, tags or pin of a stored conversation."""
        stored = self.store.load(conversation)
        for name, value in changes.items():
            setattr(stored, name, value)
        self.store.save(stored, touch=False)

    def choose_theme(self, name: str) -> None:
        """Another theme, from now on."""
        self.theme = name
        try:
            self.store.set_setting("theme", name)
        except EdgeLLMError as error:
            self.notify(str(error), severity="error", markup=False)

    def copy_to_clipboard(self, text: str) -> None:
        """To the terminal's clipboard (OSC 52), and to the desktop's."""
        super().copy_to_clipboard(text)
        self.run_worker(partial(copy_locally, text), thread=True, exit_on_error=False)

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """The palette: our own commands."""
        from edge_llm_chat.screens.chat import ChatScreen

        if isinstance(screen, ChatScreen):
            for command in COMMANDS:
                yield SystemCommand(command.usage, command.help, partial(screen.action_do, command.name))
