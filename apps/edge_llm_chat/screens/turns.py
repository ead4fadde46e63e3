"""TurnsScreen: what can be done with one turn of a conversation: copy, edit, answer again, inspect and fork, versions, delete."""

from __future__ import annotations

from textual import work

from edge_llm.messages import Role
from edge_llm_chat.conversation import Turn
from edge_llm_chat.markdown.leaves import code_blocks
from edge_llm_chat.screens.dialogs import ConfirmScreen
from edge_llm_chat.screens.writing import WritingScreen
from edge_llm_chat.widgets.composer import Composer
from edge_llm_chat.widgets.message import MessageView


class TurnsScreen(WritingScreen):
    """Does it to the message that has the focus, or by a command to the last question or answer."""

    def _last(self, role: Role) -> Turn | None:
        return next((turn for turn in reversed(self.conversation.path()) if turn.role is role), None)

    @work
    async def do_retry(self, _argument: str) -> None:
        if await self.free() and (turn := self._last(Role.USER)) is not None:
            self._start(turn.id)

    @work
    async def do_edit(self, _argument: str) -> None:
        if await self.free() and (turn := self._last(Role.USER)) is not None:
            self._edit(turn)

    def _edit(self, question: Turn) -> None:
        self._editing, self._attached = question.id, list(question.attachments)
        self.composer.write(question.content)
        self.composer.focus()
        self._show_hint()
        self._show_attached()

    def do_copy(self, _argument: str) -> None:
        if (turn := self._last(Role.ASSISTANT)) is not None:
            self._copy(turn.content, "The answer")

    def do_code(self, _argument: str) -> None:
        if (turn := self._last(Role.ASSISTANT)) is not None:
            self._copy_code(turn)

    def _copy_code(self, turn: Turn) -> None:
        blocks = code_blocks(turn.content)
        if blocks:
            self._copy(blocks[-1][1], "The block of code")
        else:
            self.tell("There is no block of code in it")

    def _copy(self, text: str, what: str) -> None:
        self.app.copy_to_clipboard(text)
        self.tell(f"{what} is copied")

    def do_inspect(self, _argument: str) -> None:
        if (turn := self._last(Role.ASSISTANT)) is not None and not self.busy_told():
            self._inspect(turn)

    @work
    async def _inspect(self, turn: Turn) -> None:
        from edge_llm_chat.screens.inspector import InspectorScreen

        if not turn.tokens:
            self.tell("The tokens of this answer are not known: answer again to see them")
            return
        if self.model is None:
            return
        screen = InspectorScreen(turn.tokens, forks=self.model.forks, end_ids=self.model.end_ids)
        prefix = await self.app.push_screen_wait(screen)
        if prefix:
            self._start(turn.parent, prefix)

    async def on_message_view_told(self, event: MessageView.Told) -> None:
        turn = self.conversation.turns.get(event.view.turn.id)
        if turn is None:
            return
        match event.action:
            case "copy":
                self._copy(turn.content, "The message")
            case "copy_code":
                self._copy_code(turn)
            case _ if self.busy_told():
                pass
            case "edit":
                question = (
                    turn if turn.role is Role.USER or turn.parent is None else self.conversation.turns[turn.parent]
                )
                self._edit(question)
            case "regenerate":
                self._start(turn.parent if turn.role is Role.ASSISTANT else turn.id)
            case "inspect" if turn.role is Role.ASSISTANT:
                self._inspect(turn)
            case "previous" | "next":
                await self._step(turn, 1 if event.action == "next" else -1)
            case "delete":
                self._delete_turn(turn)

    async def _step(self, turn: Turn, by: int) -> None:
        """Show the version beside `turn`, and stay on it."""
        if not self.conversation.step(turn.id, by):
            return
        with self.reported():
            self.app.store.save_shown(self.conversation)
        now = self.conversation.shown[turn.parent]
        await self.show_path(follow=False)
        if (view := self.transcript.view_of(now)) is not None:
            view.focus()

    @work
    async def _delete_turn(self, turn: Turn) -> None:
        if await self.app.push_screen_wait(ConfirmScreen("Delete this message and all that follows from it?")):
            gone = self.conversation.remove(turn.id)
            with self.reported():
                self.app.store.remove_turns(self.conversation, gone)
            await self.show_path()
            self.composer.focus()

    def on_composer_went_up(self, event: Composer.WentUp) -> None:
        if event.empty:
            self.do_edit("")
