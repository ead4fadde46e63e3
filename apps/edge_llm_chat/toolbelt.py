"""Toolbelt: the tools of one chat. Every call is shown whole and runs only if the user allows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from edge_llm.messages import Message, Tool, ToolCall
from edge_llm_chat.aside import aside

if TYPE_CHECKING:
    from edge_llm.toolbox.approval import Approval, Decision
    from edge_llm.toolbox.runner import ToolRunner

MAX_ROUNDS = 8
"""answers in a row that may call tools, before the model has to answer in words"""


class Toolbelt:
    """Nothing is loaded for a chat without tools."""

    def __init__(self, approve: Callable[[Approval], Decision]) -> None:
        """`approve` asks the user; it is called on a thread and may wait."""
        self._approve = approve
        self._runner: ToolRunner | None = None
        self.names: tuple[str, ...] = ()

    def take(self, names: Sequence[str]) -> None:
        """Have these tools (`edge_llm.toolbox.builtin.NAMES`) and no others. Raises `ParameterError`."""
        from edge_llm.toolbox.builtin import builtin
        from edge_llm.toolbox.runner import ToolRunner

        tools = [builtin(name) for name in names]
        if self._runner is None:
            self._runner = ToolRunner(tools, self._approve)
        else:
            self._runner.replace(tools)
        self.names = tuple(names)

    def forget(self) -> None:
        """A new chat begins: what was allowed in the last one is not any more."""
        names, self._runner = self.names, None
        if names:
            self.take(names)

    @property
    def tools(self) -> tuple[Tool, ...]:
        return self._runner.tools if self._runner is not None else ()

    async def run(self, call: ToolCall) -> Message:
        """What the model is told of a call: its result, or why there is none."""
        runner = self._runner
        assert runner is not None, "no tools, no calls"
        return await aside(lambda: runner.run(call))
