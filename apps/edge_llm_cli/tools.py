"""The tools of `run`: who may run them is asked on the terminal, and nowhere else."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TextIO

from edge_llm.errors import InputError
from edge_llm_cli import console
from edge_llm_cli.answer import Answer

if TYPE_CHECKING:
    from edge_llm.engine.engine import Engine
    from edge_llm.engine.handle import Handle
    from edge_llm.engine.request import RequestOptions
    from edge_llm.messages import Message
    from edge_llm.sampling.params import SamplingParams
    from edge_llm.toolbox.approval import Approval, Decision
    from edge_llm.toolbox.runner import CallRecord, ToolRunner

MAX_ROUNDS = 8
"""answers that call tools, before the model has to answer in words"""
_SHOWN = 200


class Toolbelt:
    """The tools that the command line names, and what became of their calls."""

    def __init__(self, names: list[str], choice: str | None) -> None:
        """Raises `InputError` for a tool that there is not, or a choice without tools."""
        self.records: list[CallRecord] = []
        self._choice = choice or "auto"
        self._runner: ToolRunner | None = None
        if names:
            from edge_llm.toolbox.builtin import builtin
            from edge_llm.toolbox.runner import ToolRunner

            self._runner = ToolRunner(map(builtin, names), ask, record=self._told)
        elif choice is not None:
            raise InputError("--tool-choice needs --tool", hint="for example --tool calculator")

    def converse(
        self,
        engine: Engine,
        messages: list[Message],
        params: SamplingParams,
        read: Callable[[Handle], Answer],
        options: RequestOptions,
    ) -> Answer:
        """The answer in words, after those that call tools."""
        if self._runner is None:
            return read(engine.chat(messages, params, **options))
        choice = self._choice
        for turn in range(MAX_ROUNDS + 1):
            if turn == MAX_ROUNDS:
                choice = "none"
            given: RequestOptions = {**options, "tools": self._runner.tools, "tool_choice": choice}
            result = read(engine.chat(messages, params, **given))
            calls = result.finished.tool_calls
            if not calls or result.interrupted:
                return result
            results = self._runner.run_all(calls)
            messages = [*messages, engine.reply(result.text, result.finished), *results]
            if choice != "auto":
                choice = "auto"  # what had to be called has been
        return result

    def as_objects(self) -> list[dict[str, object]]:
        """The calls for `--json`."""
        return [
            {
                "name": record.name,
                "arguments": json.loads(record.arguments),
                "outcome": record.outcome,
                "result": record.result,
            }
            for record in self.records
        ]

    def _told(self, record: CallRecord) -> None:
        self.records.append(record)
        result = record.result if len(record.result) <= _SHOWN else record.result[: _SHOWN - 3] + "..."
        console.dim_note(f"{record.name} {record.outcome}: {result}")


def ask(approval: Approval) -> Decision:
    """What the person at the terminal says; no without one. Text that is piped in is nobody."""
    from edge_llm.toolbox.approval import Decision

    with _terminal() as streams:
        if streams is None:
            return Decision.NO
        source, screen = streams
        changed = " (which has changed since you allowed it)" if approval.changed else ""
        screen.write(
            f"The model asks to run {approval.tool.name}{changed}. {approval.permission.sentence} It would be given\n"
        )
        screen.write(f"  {approval.arguments}\n")
        screen.write("Allow it? [y] once, [a] in this chat, [n] no (default), [never]: ")
        screen.flush()
        said = source.readline().strip().lower()
    return {"y": Decision.ONCE, "yes": Decision.ONCE, "a": Decision.CHAT, "never": Decision.NEVER}.get(
        said, Decision.NO
    )


@contextlib.contextmanager
def _terminal() -> Iterator[tuple[TextIO, TextIO] | None]:
    """To read from and to write to; None where nobody sits there."""
    if console.is_terminal(sys.stdin) and console.is_terminal(sys.stderr):
        yield sys.stdin, sys.stderr
        return
    with contextlib.ExitStack() as opened:
        try:
            source = opened.enter_context(open("/dev/tty", encoding="utf-8", errors="replace"))
            screen = opened.enter_context(open("/dev/tty", "w", encoding="utf-8", errors="backslashreplace"))
        except OSError:
            yield None
            return
        yield source, screen
