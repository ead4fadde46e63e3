"""ToolRunner: runs what a model asks for, if somebody allows it. The model is taken for an attacker.

Nothing is offered that was not registered, nothing runs that does not fit its schema or that nobody approved, and what a
tool says goes back to the model as content. Approval comes from a callback of the program, never from any text.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from edge_llm.errors import ParameterError, quoted
from edge_llm.messages import Message, Role, Tool, ToolCall
from edge_llm.text.tool_calls import canonical_arguments
from edge_llm.toolbox.approval import Approval, Approver, Decision, Permission, pin, shown_arguments
from edge_llm.toolbox.command import Command, CommandFailedError
from edge_llm.toolbox.schema_check import SchemaCheck

MAX_RESULT_CHARACTERS = 16 << 10
DEFAULT_SECONDS = 10.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LocalTool:
    """A tool and what runs it: a function of ours, which gets the arguments and raises `ValueError` with what a model
    should know; or a `Command`. A function is trusted to end: only a program can be killed.

    `permission` says what it may do at worst.
    """

    tool: Tool
    run: Callable[[Mapping[str, Any]], str] | Command
    permission: Permission = Permission.EXEC
    seconds: float = DEFAULT_SECONDS


@dataclass(frozen=True, slots=True)
class CallRecord:
    """What became of one call. `outcome` is `ran`, `failed`, `invalid`, `unknown` or `refused`."""

    name: str
    arguments: str
    outcome: str
    decision: Decision | None
    seconds: float
    result: str
    pin: str | None = None


class ToolRunner:
    """The tools of one chat. Used by one thread.

    Without `approve` nothing runs but what `unasked` allows, and that can only be reading. `record` is told of every call;
    the log of this module has a line for each without arguments and results.
    """

    def __init__(
        self,
        tools: Iterable[LocalTool],
        approve: Approver | None = None,
        *,
        unasked: Iterable[Permission] = (),
        record: Callable[[CallRecord], None] | None = None,
    ) -> None:
        """Raises as `replace`; also `ParameterError` if `unasked` allows more than reading."""
        self._unasked = frozenset(unasked)
        if not self._unasked <= {Permission.READ}:
            raise ParameterError("only tools that read may run unasked")
        self._approve, self._record = approve, record
        self._tools: dict[str, tuple[LocalTool, SchemaCheck]] = {}
        self._pins: dict[str, str] = {}
        self._answers: dict[tuple[str, ...], Decision] = {}
        self.replace(tools)

    @property
    def tools(self) -> tuple[Tool, ...]:
        """For `Request.tools`."""
        return tuple(local.tool for local, _ in self._tools.values())

    def replace(self, tools: Iterable[LocalTool]) -> None:
        """Have these tools instead. One that is described as before keeps its approvals, a changed one loses them.

        Raises `ParameterError` for two of one name, or a schema that cannot be checked in full.
        """
        made: dict[str, tuple[LocalTool, SchemaCheck]] = {}
        for local in tools:
            if local.tool.name in made:
                raise ParameterError(f"two tools have the name {local.tool.name}")
            made[local.tool.name] = (local, SchemaCheck(local.tool.parameters))
        self._tools = made

    def run(self, call: ToolCall) -> Message:
        """The result of a call for the model, which may be that there is none, and why."""
        started = time.monotonic()
        outcome, decision, text, pinned = self._outcome(call)
        seconds = time.monotonic() - started
        _log.info("tool %s %s (%s) in %.3f s: %d characters", quoted(call.name), outcome, decision, seconds, len(text))
        if self._record is not None:
            self._record(CallRecord(call.name, call.arguments, outcome, decision, seconds, text, pinned))
        return Message(Role.TOOL, text, name=call.name, tool_call_id=call.id)

    def run_all(self, calls: Iterable[ToolCall]) -> list[Message]:
        """The results of calls, in their order; they run one after another."""
        return [self.run(call) for call in calls]

    def _outcome(self, call: ToolCall) -> tuple[str, Decision | None, str, str | None]:
        """(outcome, decision, text for the model, pin)."""
        local, check = self._tools.get(call.name, (None, None))
        if local is None or check is None:
            return "unknown", None, "error: there is no such tool", None
        pinned = pin(local.tool)
        try:
            arguments = canonical_arguments(call.arguments)
        except (ValueError, RecursionError):
            return "invalid", None, "error: the arguments are no JSON object", pinned
        given = _object(arguments)
        fault = check.fault(given)
        if fault is not None:
            return "invalid", None, f"error: {_cut(fault)}", pinned
        decision = self._decision(local, arguments, pinned)
        if decision in (Decision.NO, Decision.NEVER):
            return "refused", decision, "error: the user did not allow this call", pinned
        ran, text = _result(local, arguments, given)
        return ("ran" if ran else "failed"), decision, text, pinned

    def _decision(self, local: LocalTool, arguments: str, pinned: str) -> Decision:
        """What was answered before, else what is answered now; only what was allowed pins the tool."""
        if local.permission in self._unasked:
            return Decision.ONCE
        reads = local.permission is Permission.READ
        keys = [(pinned,), (pinned, arguments)]
        known = next((self._answers[key] for key in keys if key in self._answers), None)
        if known is not None:
            return known
        if self._approve is None:
            return Decision.NO
        changed = self._pins.get(local.tool.name, pinned) != pinned
        decision = self._approve(Approval(local.tool, local.permission, shown_arguments(arguments), changed))
        if decision is Decision.NEVER or (decision is Decision.CHAT and reads):
            self._answers[pinned,] = decision
        elif decision is Decision.CHAT:
            self._answers[pinned, arguments] = decision
        elif decision is not Decision.ONCE:
            return Decision.NO  # whatever else a callback gives
        if decision is not Decision.NEVER:
            self._pins[local.tool.name] = pinned
        return decision


def _object(text: str) -> dict[str, Any]:
    """What `canonical_arguments` has written."""
    value = json.loads(text)
    assert isinstance(value, dict)
    return value


def _result(local: LocalTool, arguments: str, given: Mapping[str, Any]) -> tuple[bool, str]:
    """(whether it went well, what the model is told)."""
    if isinstance(local.run, Command):
        try:
            return True, _cut(local.run.run(arguments, seconds=local.seconds, most_bytes=4 * MAX_RESULT_CHARACTERS))
        except CommandFailedError as error:
            return False, f"error: {error}"
    return _called(local.run, given, local.seconds)


def _called(function: Callable[[Mapping[str, Any]], str], given: Mapping[str, Any], seconds: float) -> tuple[bool, str]:
    """As `_result`, for a function: on a thread that nobody waits for after `seconds`."""
    results: list[tuple[bool, str]] = []

    def work() -> None:
        try:
            results.append((True, _cut(str(function(given)))))
        except ValueError as error:
            results.append((False, f"error: {_cut(str(error))}"))
        except Exception as error:  # a fault of the tool; its text may hold what a model should not see
            results.append((False, f"error: the tool failed ({type(error).__name__})"))

    thread = threading.Thread(target=work, name="edge-llm tool", daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else (False, f"error: it took more than {seconds:g} seconds")


def _cut(text: str) -> str:
    if len(text) <= MAX_RESULT_CHARACTERS:
        return text
    return f"{text[:MAX_RESULT_CHARACTERS]}\n[cut after {MAX_RESULT_CHARACTERS} characters]"
