"""`run --tool`: each call is asked for on the terminal; what is piped in allows nothing."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from edge_llm.messages import Finished, FinishReason, Message, ReasoningDelta, Role, TextDelta, Timings, ToolCall, Usage
from tests.cli.conftest import ROOT
from tests.cli.stub import StubEngine, opener

SUM = ToolCall("id1", "calculator", '{"expression": "6  *  7"}')


class CallingEngine(StubEngine):
    """Asks for `calls`, one an answer, then says what the last result was."""

    def __init__(self, *calls: ToolCall) -> None:
        super().__init__([])
        self.calls = list(calls)

    def reply(self, text: str, finished: Finished) -> Message:
        return Message(Role.ASSISTANT, text, tool_calls=finished.tool_calls)

    def _say(self, mailbox, cancelled, params) -> None:  # type: ignore[no-untyped-def]
        mailbox.put(ReasoningDelta("Hm."))
        call = self.calls.pop(0) if self.calls else None
        if call is None:
            messages = self.asked[-1][0]
            assert isinstance(messages, list)
            mailbox.put(TextDelta(f"It is: {messages[-1].content}"))
        reason = FinishReason.STOP if call is None else FinishReason.TOOL_CALLS
        timings = Timings(0.0, 0.01, 0.1)
        mailbox.put(Finished(reason, Usage(7, 3), timings, 5, tool_calls=() if call is None else (call,)))


@pytest.fixture
def calling(monkeypatch: pytest.MonkeyPatch) -> CallingEngine:
    from edge_llm_cli import answer

    engine = CallingEngine(SUM)
    monkeypatch.setattr(answer, "opened", opener(engine))
    return engine


def test_nobody_is_asked_where_nobody_sits(invoke, calling, monkeypatch) -> None:
    """Piped text that says yes is a prompt, not an answer."""
    from edge_llm_cli import tools

    monkeypatch.setattr(tools, "open", lambda *_, **__: (_ for _ in ()).throw(OSError()), raising=False)
    result = invoke("run", "How much?", "--tool", "calculator", piped="y\ny\n")
    assert result.exit_code == 0
    assert result.stdout == "It is: error: the user did not allow this call\n"
    assert "calculator refused" in result.stderr


def test_the_model_is_offered_what_was_named(invoke, calling, tmp_path: Path) -> None:
    calling.calls = []
    flags = ("--tool", "time", "--tool", f"read:{tmp_path}", "--tool-choice", "required", "--reasoning", "off")
    assert invoke("run", "Hi", *flags).exit_code == 0
    (options,) = calling.requested
    assert [tool.name for tool in options["tools"]] == ["time", "read"]
    assert (options["tool_choice"], options["reasoning"]) == ("required", False)


def test_after_a_call_the_model_may_answer_in_words(invoke, calling, monkeypatch) -> None:
    from edge_llm_cli import tools

    from edge_llm.toolbox.approval import Decision

    monkeypatch.setattr(tools, "ask", lambda approval: Decision.ONCE)
    result = invoke("run", "How much?", "--tool", "calculator", "--tool-choice", "required", "--json")
    value = json.loads(result.stdout)
    assert value["text"] == "It is: 42"
    assert value["reasoning"] == "Hm."
    assert value["tool_calls"] == [
        {"name": "calculator", "arguments": {"expression": "6  *  7"}, "outcome": "ran", "result": "42"}
    ]
    assert [options["tool_choice"] for options in calling.requested] == ["required", "auto"]
    messages = calling.asked[1][0]
    assert [message.role for message in messages] == [Role.USER, Role.ASSISTANT, Role.TOOL]
    assert messages[1].tool_calls == (SUM,)


def test_rounds_of_calls_end(invoke, calling, monkeypatch) -> None:
    from edge_llm_cli import tools

    calling.calls = [SUM] * 100
    assert invoke("run", "How much?", "--tool", "calculator", "--json").exit_code == 0
    choices = [options["tool_choice"] for options in calling.requested]
    assert choices == ["auto"] * tools.MAX_ROUNDS + ["none"]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--tool", "shell"), "no tool 'shell'"),
        (("--tool", "read:/nonexistent"), "cannot be opened"),
        (("--tool-choice", "required"), "--tool-choice needs --tool"),
        (("--raw", "--tool", "time"), "chat template"),
        (("--reasoning", "maybe"), "on or off"),
    ],
)
def test_what_cannot_be(invoke, calling, flags: tuple[str, ...], reason: str) -> None:
    result = invoke("run", "Hi", *flags)
    assert result.exit_code == 2
    assert reason in result.stderr


def on_a_terminal(typed: str) -> str:
    """What a person sees who answers the question with `typed`."""
    parent, child = pty.openpty()
    code = (
        "from edge_llm_cli import answer, main; from tests.cli.test_tools import CallingEngine, SUM; import sys;"
        "from tests.cli.stub import opener; answer.opened = opener(CallingEngine(SUM));"
        "sys.argv = ['edge-llm', 'run', 'How much?', '--tool', 'calculator']; main.run()"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'apps'}{os.pathsep}{ROOT}"}
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=child,
        stdout=child,
        stderr=child,
        env=environment,
        cwd=ROOT,
        start_new_session=True,
    )
    os.close(child)
    seen, answered, deadline = "", False, time.monotonic() + 60
    while time.monotonic() < deadline:
        if select.select([parent], [], [], 0.5)[0]:
            try:
                data = os.read(parent, 4096)
            except OSError:  # the other end is closed
                break
            seen += data.decode("utf-8", "replace")
        if "[never]: " in seen and not answered:
            os.write(parent, typed.encode())
            answered = True
    os.close(parent)
    assert process.wait(60) == 0
    return seen.replace("\r\n", "\n")


@pytest.mark.parametrize(
    ("typed", "result"), [("y\n", "It is: 42"), ("\n", "did not allow"), ("no\n", "did not allow")]
)
def test_a_person_is_asked_with_all_arguments(typed: str, result: str) -> None:
    seen = on_a_terminal(typed)
    assert (
        'The model asks to run calculator. It changes nothing. It would be given\n  {"expression": "6  *  7"}\n' in seen
    )
    assert result in seen
