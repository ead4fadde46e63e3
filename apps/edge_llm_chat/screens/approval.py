"""ApprovalScreen: may this tool run, with exactly these arguments?"""

from __future__ import annotations

from concurrent.futures import Future
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from edge_llm.text.terminal import clean, clean_line
from edge_llm.toolbox.approval import Approval, Decision
from edge_llm_chat.screens.shown import WIDE


class ApprovalScreen(ModalScreen[None]):
    """Asks for a decision; whatever is not a clear yes is no. However the screen goes, `decision` ends: a thread waits for it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "decide('once')", "Yes, this once", id="approval.once"),
        Binding("c", "decide('chat')", "Yes, in this chat", id="approval.chat"),
        Binding("n,enter", "decide('no')", "No", id="approval.no"),
        Binding("v", "decide('never')", "Never in this chat", id="approval.never"),
        Binding("escape", "decide('')", "No, and stop", id="approval.stop"),
    ]

    def __init__(self, approval: Approval) -> None:
        super().__init__()
        self._approval = approval
        self.decision: Future[Decision | None] = Future()
        """None: stop altogether"""

    def compose(self) -> ComposeResult:
        asked = self._approval
        with VerticalScroll(classes="dialog", id="approval") as dialog:  # all of it can be seen in the lowest window
            dialog.border_title = "The model asks to run a tool"
            yield Static(
                Content.assemble(
                    (clean_line(asked.tool.name), "bold"), "  ", (asked.permission.sentence, "$foreground-muted")
                ),
                markup=False,
            )
            yield Static(clean(asked.tool.description), classes="description", markup=False)
            if asked.changed:
                yield Static(Content.styled("It has changed since you allowed it.", "$text-warning"), markup=False)
            yield Static(clean(asked.arguments), markup=False, id="arguments")

    def on_resize(self, event: events.Resize) -> None:
        keys = "y once · c in this chat · n no · v never · Escape stops"
        self.query_one("#approval").border_subtitle = (
            keys if event.size.width >= WIDE else "y once · c chat · n no · v never"
        )

    def action_decide(self, decision: str) -> None:
        if not self.decision.done():
            self.decision.set_result(Decision(decision) if decision else None)
        self.dismiss()

    def on_unmount(self) -> None:
        if not self.decision.done():
            self.decision.set_result(None)
