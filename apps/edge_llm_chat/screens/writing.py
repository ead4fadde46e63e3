"""WritingScreen: how a question or a command comes about: completion, files that go with it, how long it will be."""

from __future__ import annotations

import asyncio
import contextlib

from textual import work
from textual.content import Content
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from edge_llm.errors import EdgeLLMError
from edge_llm.messages import Role
from edge_llm.text.terminal import clean_line
from edge_llm_chat import commands, files
from edge_llm_chat.conversation import Turn
from edge_llm_chat.screens.conversation import ConversationScreen
from edge_llm_chat.screens.shown import WIDE
from edge_llm_chat.widgets.composer import Composer

_COUNTED = 1_000
"""characters from which on it is worth knowing how many tokens a question is"""
_COLUMN = 22
"""cells for commands, before what they do"""


class WritingScreen(ConversationScreen):
    """Sends questions, and does commands by its methods `do_NAME`, which a class derived from it has."""

    _offered_for = ""

    async def on_composer_sent(self, event: Composer.Sent) -> None:
        command = commands.parse(self._whole_command(event.text))
        if command is None:
            if self.stopping:
                self._send_later(event.text)
            else:
                await self._send(event.text)
            return
        name, argument = command
        if name not in commands.BY_NAME:
            self.tell(f"There is no command /{name}; /help shows all")
            self.composer.put_back(event.text)
            return
        self.action_do(name, argument)

    def _whole_command(self, text: str) -> str:
        """What the list offers for this text, or, if keys came too fast for the list, the only command that it begins."""
        possible = [f"/{command.name}" for command in commands.matching(text)]
        if possible and self.composer.completing and self._offered_for == text:
            option = self.query_one("#completions", OptionList).highlighted_option
            if option is not None and option.id is not None:
                return option.id
        return possible[0] if len(possible) == 1 else text

    async def _send(self, text: str) -> None:
        if self.busy_told():
            self.composer.put_back(text)
            return
        await self._attach_mentions(text)
        await self.ask(text.strip("\n"))

    @work
    async def _send_later(self, text: str) -> None:
        """Not in the handler of a message: the end of an answer needs those."""
        await self.free()
        await self._send(text)

    def action_do(self, name: str, argument: str = "") -> None:
        """Do a command of the list."""
        if commands.BY_NAME[name].needs_argument and not argument:
            self.composer.write(f"/{name} ")
            self.composer.focus()
            return
        getattr(self, f"do_{name}")(argument)

    def busy_told(self) -> bool:
        """Whether an answer is coming; if so, that is said."""
        if self.busy or (self._waiting and self._failure is None):
            self.tell("An answer is coming: Escape stops it")
            return True
        return False

    @property
    def stopping(self) -> bool:
        """An answer was stopped, and has not ended yet."""
        return self.busy and self._stopped

    async def free(self) -> bool:
        """Whether something else may begin; the end of an answer that was stopped is waited for, one that comes is told of."""
        if self.stopping:
            await self._ended.wait()
        return not self.busy_told()

    def do_attach(self, argument: str) -> None:
        try:
            self._attached.append(files.read_attachment(argument))
        except EdgeLLMError as error:
            self.report(error)
        self._show_attached()

    async def _attach_mentions(self, text: str) -> None:
        known = {item.name for item in self._attached}
        for path in files.mentions(text):
            try:
                item = await asyncio.to_thread(files.read_attachment, path)
            except EdgeLLMError as error:
                self.report(error)
            else:
                self._attached += [] if item.name in known else [item]

    def on_composer_written(self, event: Composer.Written) -> None:
        self._complete(event.text)
        self._count_tokens()

    def _complete(self, text: str) -> None:
        """Offer what the beginning of a command, or of a path after @, may become."""
        self._offered_for = text
        column = _COLUMN if self.size.width >= WIDE else 0
        found = [Option(_offer(one, column), id=f"/{one.name}") for one in commands.matching(text)]
        if not found and self.composer.cursor_location == self.composer.document.end:
            found = [Option(clean_line(path), id=path) for path in files.completions(text)]
        if not found and not self.composer.completing:
            return  # most keys: a list that changes costs a layout
        offered = self.query_one("#completions", OptionList)
        offered.clear_options()
        offered.add_options(found)
        offered.highlighted = 0 if found else None
        self._offer(bool(found))

    def _offer(self, offered: bool) -> None:
        self.query_one("#completions").set_class(offered, "open")
        self.composer.completing = offered

    def on_composer_completing(self) -> None:
        self._accept(run=False)

    def on_composer_moving(self, event: Composer.Moving) -> None:
        offered = self.query_one("#completions", OptionList)
        (offered.action_cursor_down if event.by > 0 else offered.action_cursor_up)()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self._accept(run=True)
        self.composer.focus()

    def _accept(self, *, run: bool) -> None:
        """Take the highlighted offer; a whole command is done at once with `run`."""
        if self._offered_for != self.composer.text:  # keys in one burst: the list has not seen the last of them
            self._complete(self.composer.text)
        offered = self.query_one("#completions", OptionList)
        option = offered.highlighted_option if self.composer.completing else None
        if option is None or option.id is None:
            return
        self._offer(False)
        text = self.composer.text
        if text.startswith("/"):
            command = commands.BY_NAME[option.id[1:]]
            if run and not command.needs_argument:
                self.composer.clear()
                self.action_do(command.name)
            else:
                self.composer.write(f"/{command.name}" + (" " if command.argument else ""))
        else:
            self.composer.write(text[: text.rindex("@") + 1] + option.id + ("" if option.id.endswith("/") else " "))

    async def action_back(self) -> None:
        if self.composer.completing:
            self._offer(False)
        else:
            await super().action_back()

    def _show_attached(self) -> None:
        super()._show_attached()
        self._count_tokens()

    @work(exclusive=True, group="count")
    async def _count_tokens(self) -> None:
        """How many tokens the question will be, once that is worth knowing."""
        text = self.composer.text
        named = files.mentions(text)
        if not named and not self._attached and len(text) < _COUNTED:
            self._show_hint()
            return
        await asyncio.sleep(0.3)  # a later call cancels this one
        attached = list(self._attached)
        for path in named:
            with contextlib.suppress(EdgeLLMError):
                attached.append(await asyncio.to_thread(files.read_attachment, path))
        question = Turn(0, None, Role.USER, text, attachments=tuple(attached)).message()
        count = await self.app.backend.count((question,))
        if count is not None:
            self._show_hint(f"{count:,} tokens")


def _offer(command: commands.Command, column: int) -> Content:
    return Content.assemble(f"{command.usage:<{column}} ", (command.help, "$foreground-muted"))
