"""ChatScreen: what can be done with the conversation that is open, by key, by command, by palette."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from textual import work
from textual.binding import Binding, BindingType

from edge_llm.errors import EdgeLLMError
from edge_llm.text.terminal import clean_line
from edge_llm_chat import parameters
from edge_llm_chat.conversation import Conversation
from edge_llm_chat.models import with_speeds
from edge_llm_chat.screens.conversation import ConversationScreen
from edge_llm_chat.screens.dialogs import Choice, ConfirmScreen, LineScreen, PickScreen, TextScreen
from edge_llm_chat.screens.help import HelpScreen
from edge_llm_chat.screens.history import HistoryScreen, tags_of
from edge_llm_chat.screens.settings import SettingsScreen
from edge_llm_chat.screens.shown import ShownScreen
from edge_llm_chat.screens.turns import TurnsScreen
from edge_llm_chat.widgets.composer import Composer
from edge_llm_chat.widgets.message import MessageView
from edge_llm_chat.widgets.transcript import Transcript


class ChatScreen(TurnsScreen):
    """The commands of `commands.COMMANDS`, but for those of one message."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+n", "do('new')", "New chat", id="chat.new", priority=True),
        Binding("ctrl+o", "do('history')", "Stored chats", id="chat.history", priority=True),
        Binding("ctrl+r", "do('retry')", "Answer again, beside the last answer", id="chat.retry", priority=True),
        Binding("ctrl+y", "do('copy')", "Copy the last answer", id="chat.copy", priority=True),
        Binding("f1", "do('help')", "This help", id="chat.help", priority=True),
        Binding("f2", "do('inspect')", "Inspect the last answer", id="chat.inspect", priority=True),
        Binding("f3", "do('set')", "Sampling of this chat", id="chat.settings", priority=True),
        Binding("f4", "do('model')", "Choose a model", id="chat.model", priority=True),
    ]

    def _save(self) -> None:
        """Write what changed of the conversation itself."""
        with self.reported():
            self.app.store.save(self.conversation)
        self._show_title()

    async def _open(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self._editing, self._attached = None, []
        if self.model is not None:
            conversation.model = self.model.name
        try:
            self.belt.forget()
        except EdgeLLMError as error:  # a folder that is not there any more
            self.report(error)
        self._show_hint()
        await self.show_path()
        self.composer.focus()

    @work
    async def do_new(self, _argument: str) -> None:
        if await self.free():
            await self._open(Conversation(parameters=dict(self.conversation.parameters)))

    @work
    async def do_history(self, _argument: str) -> None:
        if not await self.free():
            return
        chosen = await self.app.push_screen_wait(HistoryScreen(opened=self.conversation.id))
        try:
            if chosen is not None:
                await self._open(self.app.store.load(chosen))
            elif self.conversation.id is not None:  # its title or tags may have been changed there
                await self._open(self.app.store.load(self.conversation.id))
        except EdgeLLMError as error:
            self.report(error)

    @work
    async def do_system(self, argument: str) -> None:
        text: str | None = argument
        if not text:
            text = await self.app.push_screen_wait(TextScreen("System message", self.conversation.system or ""))
        if text is not None:
            self.conversation.system = text.strip() or None
            self._save()
            self.tell("The system message is " + ("set" if self.conversation.system else "gone"))

    @work
    async def do_prompts(self, _argument: str) -> None:
        prompts: dict[str, str] = {}
        with self.reported():
            prompts = self.app.store.prompts()
        if not prompts:
            self.tell("Your library is empty: /keep NAME puts this chat's system message into it")
            return
        choices = [Choice(name, name, text[:60]) for name, text in prompts.items()]
        name = await self.app.push_screen_wait(PickScreen("System messages", choices))
        if name is not None:
            self.conversation.system = prompts[name]
            self._save()

    def do_keep(self, argument: str) -> None:
        name = clean_line(argument)
        try:
            if self.conversation.system:
                self.app.store.save_prompt(name, self.conversation.system)
                self.tell(f"Kept as {name}")
            else:
                self.app.store.delete_prompt(name)
                self.tell(f"This chat has no system message, so {name} is out of the library")
        except EdgeLLMError as error:
            self.report(error)

    @work
    async def do_set(self, argument: str) -> None:
        values: dict[str, float | int] | None
        if argument:
            name, _, text = argument.partition(" ")
            try:
                values = parameters.changed(self.conversation.parameters, name, text)
            except EdgeLLMError as error:
                self.report(error)
                return
            self.tell(f"{name} is {values.get(name, 'what the model recommends')}")
        else:
            values = await self.app.push_screen_wait(SettingsScreen(self.conversation.parameters))
        if values is not None:
            self.conversation.parameters = values
            self._save()

    def do_tools(self, argument: str) -> None:
        try:
            if argument:
                self.belt.take([] if argument == "off" else argument.split())
        except EdgeLLMError as error:
            self.report(error)
            return
        have = ", ".join(self.belt.names) or "none"
        self.tell(f"Tools of this chat: {have}. There are time, calculator, read:FOLDER, or off")

    @work
    async def do_model(self, argument: str) -> None:
        if not await self.free():
            return
        name: str | None = argument
        try:
            found = with_speeds(await self.app.backend.models(), self.app.store.speeds())
        except EdgeLLMError as error:
            self.report(error)
            return
        if name and name not in {one.name for one in found} and not Path(name).expanduser().exists():
            self.tell(f"No model is called {clean_line(name)}: /model alone shows those there are")  # the old one stays
            return
        if not name:
            listed = [Choice(one.name, one.name, one.detail) for one in found]
            current = self.model.name if self.model else None
            name = await self.app.push_screen_wait(PickScreen("Models", listed, current=current))
        if name and (self.model is None or name != self.model.name):
            await self.app.change_model(name)
            self.model = None
            self.status.tell(model=clean_line(name), context=None, kv_bytes=None)
            self.load_model()

    @work
    async def do_title(self, argument: str) -> None:
        title: str | None = argument
        if not title:
            title = await self.app.push_screen_wait(LineScreen("Title", self.conversation.title))
        if title:
            self.conversation.title = clean_line(title)
            self._save()

    @work
    async def do_tag(self, argument: str) -> None:
        text: str | None = argument
        if not text:
            tags = " ".join(self.conversation.tags)
            text = await self.app.push_screen_wait(LineScreen("Tags", tags, hint="words, without #"))
        if text is not None:
            self.conversation.tags = tags_of(text)
            self._save()

    def do_pin(self, _argument: str) -> None:
        self.conversation.pinned = not self.conversation.pinned
        self._save()

    def do_export(self, argument: str) -> None:
        from edge_llm_chat.export import export

        try:
            self.tell(f"Written to {export(self.conversation, argument)}")
        except EdgeLLMError as error:
            self.report(error)

    @work
    async def do_delete(self, _argument: str) -> None:
        if not await self.free():
            return
        count = len(self.conversation.turns)
        if not count:
            return
        if await self.app.push_screen_wait(ConfirmScreen(f"Delete this chat and its {count} messages?")):
            if self.conversation.id is not None:
                with self.reported():
                    self.app.store.delete(self.conversation.id)
            await self._open(Conversation(parameters=dict(self.conversation.parameters)))

    @work
    async def do_theme(self, argument: str) -> None:
        name: str | None = argument
        if not name:
            themes = [Choice(theme, theme) for theme in sorted(self.app.available_themes)]
            name = await self.app.push_screen_wait(PickScreen("Themes", themes, current=self.app.theme))
        if name in self.app.available_themes:
            self.app.choose_theme(name)
        elif name:
            self.tell(f"There is no theme {name}")

    def do_help(self, _argument: str) -> None:
        from edge_llm_chat.screens.inspector import InspectorScreen

        sections: dict[str, tuple[type, ...]] = {
            "Writing": (Composer,),
            "Anywhere": (type(self), ConversationScreen, ShownScreen, type(self.app)),
            "On a message": (MessageView, Transcript),
            "In the inspector": (InspectorScreen,),
            "In the list of chats": (HistoryScreen,),
        }
        self.app.push_screen(HelpScreen(sections))

    def do_quit(self, _argument: str) -> None:
        self.app.call_later(self.app.action_quit)
