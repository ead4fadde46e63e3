"""Nothing runs that was not offered, does not fit, or that nobody allowed; results are content."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from edge_llm.errors import ParameterError
from edge_llm.messages import Role, Tool, ToolCall
from edge_llm.toolbox.approval import Approval, Decision, Permission, pin, shown_arguments
from edge_llm.toolbox.builtin import builtin, time_tool
from edge_llm.toolbox.command import Command
from edge_llm.toolbox.runner import MAX_RESULT_CHARACTERS, CallRecord, LocalTool, ToolRunner

SCHEMA = json.dumps(
    {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}
)


class Bench:
    """A tool that counts its runs, and somebody who answers what they were told to."""

    def __init__(self, *answers: Decision, permission: Permission = Permission.WRITE, **options: Any) -> None:
        self.ran: list[Mapping[str, Any]] = []
        self.asked: list[Approval] = []
        self.records: list[CallRecord] = []
        self._answers = list(answers)
        self.local = LocalTool(Tool("say", "Says it.", SCHEMA), self._run, permission)
        self.runner = ToolRunner([self.local], self._approve, record=self.records.append, **options)

    def _run(self, given: Mapping[str, Any]) -> str:
        self.ran.append(given)
        return f"said {given['a']}"

    def _approve(self, approval: Approval) -> Decision:
        self.asked.append(approval)
        return self._answers.pop(0)

    def call(self, arguments: str = '{"a": "x"}', name: str = "say") -> str:
        message = self.runner.run(ToolCall("id1", name, arguments))
        assert message.role is Role.TOOL
        assert (message.name, message.tool_call_id) == (name, "id1")
        return message.content


def test_an_allowed_call_runs_once() -> None:
    bench = Bench(Decision.ONCE, Decision.NO)
    assert bench.call() == "said x"
    assert bench.call() == "error: the user did not allow this call"
    assert bench.ran == [{"a": "x"}]
    assert [record.outcome for record in bench.records] == ["ran", "refused"]
    assert bench.records[0].pin == pin(bench.local.tool)


def test_without_an_approver_nothing_runs() -> None:
    bench = Bench()
    runner = ToolRunner([bench.local])
    assert "did not allow" in runner.run(ToolCall("1", "say", '{"a": "x"}')).content
    assert bench.ran == []


@pytest.mark.parametrize(
    ("name", "arguments", "told", "outcome"),
    [
        ("other", '{"a": "x"}', "no such tool", "unknown"),
        ("say\n", '{"a": "x"}', "no such tool", "unknown"),
        ("say", "{}", "a is missing", "invalid"),
        ("say", '{"a": 1}', "a must be string", "invalid"),
        ("say", '{"a": "x", "approved": true}', "approved is not allowed", "invalid"),
        ("say", "a=x", "no JSON object", "invalid"),
        ("say", "[1]", "no JSON object", "invalid"),
        ("say", '{"a": "x", "a": "y"}', "no JSON object", "invalid"),
        ("say", '{"a": ' * 5000, "no JSON object", "invalid"),
    ],
)
def test_what_does_not_fit_is_not_even_asked_for(name: str, arguments: str, told: str, outcome: str) -> None:
    bench = Bench()
    assert told in bench.call(arguments, name)
    assert (bench.ran, bench.asked) == ([], [])
    assert bench.records[0].outcome == outcome


def test_a_reading_tool_may_be_allowed_for_the_chat() -> None:
    bench = Bench(Decision.CHAT, permission=Permission.READ)
    assert [bench.call(f'{{"a": "{letter}"}}') for letter in "xyz"] == ["said x", "said y", "said z"]
    assert len(bench.asked) == 1


@pytest.mark.parametrize("permission", [Permission.WRITE, Permission.EXEC])
def test_another_is_allowed_for_the_same_arguments_only(permission: Permission) -> None:
    bench = Bench(Decision.CHAT, Decision.ONCE, Decision.ONCE, permission=permission)
    for arguments in ('{"a": "x"}', '{ "a":"\\u0078" }', '{"a": "y"}', '{"a": "y"}'):
        bench.call(arguments)
    assert [json.loads(approval.arguments)["a"] for approval in bench.asked] == ["x", "y", "y"]


def test_never_is_remembered() -> None:
    bench = Bench(Decision.NEVER)
    for letter in "xy":
        assert "did not allow" in bench.call(f'{{"a": "{letter}"}}')
    assert (len(bench.asked), bench.ran) == (1, [])


def test_a_callback_that_gives_something_else_has_not_allowed_it() -> None:
    for odd in (None, True, "yes", "once"):
        bench = Bench(odd)  # type: ignore[arg-type]
        assert "did not allow" in bench.call()


@pytest.mark.parametrize("change", [{"description": "Says it!"}, {"parameters": '{"type": "object"}'}])
def test_a_tool_that_changes_is_asked_for_again(change: dict[str, str]) -> None:
    """A rug pull: the same name, another description or schema."""
    bench = Bench(Decision.CHAT, Decision.NO, permission=Permission.READ)
    bench.call()
    changed = replace(bench.local, tool=replace(bench.local.tool, **change))
    bench.runner.replace([changed])
    assert "did not allow" in bench.call()
    assert [approval.changed for approval in bench.asked] == [False, True]
    bench.runner.replace([bench.local])
    assert bench.call() == "said x"
    assert len(bench.asked) == 2


def test_reading_may_run_unasked_and_nothing_else() -> None:
    bench = Bench(permission=Permission.READ, unasked=[Permission.READ])
    assert bench.call() == "said x"
    assert bench.asked == []
    bench = Bench(Decision.NO, permission=Permission.WRITE, unasked=[Permission.READ])
    assert "did not allow" in bench.call()
    with pytest.raises(ParameterError, match="only tools that read"):
        Bench(unasked=[Permission.EXEC])


def test_tools_cannot_shadow_one_another() -> None:
    bench = Bench()
    with pytest.raises(ParameterError, match="two tools"):
        ToolRunner([bench.local, replace(bench.local, permission=Permission.READ)])


def test_a_schema_that_cannot_be_checked_is_refused() -> None:
    local = LocalTool(Tool("t", "", '{"type": "object", "properties": {"a": {"pattern": "x"}}}'), lambda _: "")
    with pytest.raises(ParameterError, match="pattern"):
        ToolRunner([local])
    assert local.permission is Permission.EXEC


def test_arguments_are_shown_whole_and_nothing_hides_in_them() -> None:
    said = "rm\u202e -rf\u200b \x1b[2K\u2028\U000e0041 日本 é" + "x" * 100_000
    shown = shown_arguments(json.dumps({"a": said}))
    assert json.loads(shown) == {"a": said}
    assert all(escape in shown for escape in ("\\u202e", "\\u200b", "\\u001b", "\\u2028", "\\udb40\\udc41"))
    assert "日本 é" in shown
    assert shown.isprintable()


def test_long_results_are_cut() -> None:
    local = LocalTool(Tool("t"), lambda _: "x" * (MAX_RESULT_CHARACTERS + 5), Permission.READ)
    text = ToolRunner([local], unasked=[Permission.READ]).run(ToolCall("1", "t", "{}")).content
    assert text == "x" * MAX_RESULT_CHARACTERS + f"\n[cut after {MAX_RESULT_CHARACTERS} characters]"


def test_faults_of_tools_are_told_without_their_text() -> None:
    def fails(_: Mapping[str, Any]) -> str:
        raise RuntimeError("a secret path")

    def refuses(_: Mapping[str, Any]) -> str:
        raise ValueError("there is no such file")

    tools = [LocalTool(Tool(name), run, Permission.READ) for name, run in (("fails", fails), ("refuses", refuses))]
    runner = ToolRunner(tools, unasked=[Permission.READ])
    texts = [
        message.content for message in runner.run_all([ToolCall("1", "fails", "{}"), ToolCall("2", "refuses", "")])
    ]
    assert texts == ["error: the tool failed (RuntimeError)", "error: the arguments are no JSON object"]
    assert runner.run(ToolCall("3", "refuses", "{}")).content == "error: there is no such file"


def test_a_function_that_hangs_is_left_behind() -> None:
    release = threading.Event()
    local = LocalTool(Tool("t"), lambda _: str(release.wait(60)), Permission.READ, seconds=0.05)
    runner = ToolRunner([local], unasked=[Permission.READ])
    assert runner.run(ToolCall("1", "t", "{}")).content == "error: it took more than 0.05 seconds"
    release.set()


def test_a_program_as_a_tool() -> None:
    local = LocalTool(Tool("t"), Command(("cat",)), Permission.EXEC)
    runner = ToolRunner([local], lambda _: Decision.ONCE)
    assert runner.run(ToolCall("1", "t", '{"b": 1}')).content == '{"b": 1}'
    broken = ToolRunner([replace(local, run=Command(("/nonexistent",)))], lambda _: Decision.ONCE)
    assert broken.run(ToolCall("1", "t", "{}")).content.startswith("error: it cannot be started")


def test_the_log_has_a_line_without_what_was_said(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(Decision.ONCE)
    with caplog.at_level(logging.DEBUG):
        bench.call('{"a": "canary"}')
        bench.call(name="sa\ny")
    assert "canary" not in caplog.text
    assert [record.getMessage().count("\n") for record in caplog.records] == [0, 0]
    assert "'say' ran (once)" in caplog.records[0].getMessage()


def test_the_tools_that_come_along(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    tools = [
        time_tool(lambda: datetime(2026, 2, 3, 4, 5, 6, tzinfo=UTC)),
        builtin("calculator"),
        builtin(f"read:{tmp_path}"),
    ]
    runner = ToolRunner(tools, unasked=[Permission.READ])
    asked = {"time": "{}", "calculator": '{"expression": "6 * 7"}', "read": '{"path": "a.txt"}'}
    results = [runner.run(ToolCall("1", name, arguments)).content for name, arguments in asked.items()]
    assert results == ["Tuesday, 2026-02-03 04:05:06 UTC", "42", "hello"]
    assert runner.run(ToolCall("1", "read", '{"path": "../x"}')).content.startswith("error: a path stays inside")
    assert [tool.name for tool in runner.tools] == ["time", "calculator", "read"]
    assert (
        datetime.now().strftime("%Y")
        in ToolRunner([builtin("time")], unasked=[Permission.READ]).run(ToolCall("1", "time", "{}")).content
    )


@pytest.mark.parametrize("name", ["", "shell", "read", "read:", "time:x", "read:/nonexistent/folder"])
def test_tools_that_do_not_come_along(name: str) -> None:
    with pytest.raises(ParameterError, match=r"no tool|cannot be opened"):
        builtin(name)
