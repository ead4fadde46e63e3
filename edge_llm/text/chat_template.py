"""From messages to the text of a prompt: the one place where chat templates are rendered.

What a template does is kept as it is (SmolLM2's adds a system message of its own, Gemma's joins the system message to
the first user turn, Mistral's refuses turns that do not alternate): nothing is merged or mended before or after.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from edge_llm.errors import ParameterError, quoted
from edge_llm.messages import Message, Role, ToolCall
from edge_llm.text.prompt import SCAFFOLD, PromptText, RenderedPrompt, origin_of_message
from edge_llm.text.template_budget import Budget
from edge_llm.text.template_sandbox import Sandbox

Scalar = bool | int | float | str | None

COMMON_VARIABLES = frozenset(("enable_thinking", "reasoning_effort", "thinking"))
"""variables that callers may give to any template, whether it reads them or not"""
_INTERNAL = frozenset(("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"))
_MAX_INPUT_DEPTH = 48


class ChatTemplate:
    """A compiled chat template.

    `bos_token` and `eos_token` are the texts the template knows by these names; `clock` is what `strftime_now` shows.
    Raises `TemplateError` if the source is broken, too large, or uses what chat templates do not need.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._sandbox = Sandbox(source, clock)
        tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._tokens = {name: PromptText.of(token, SCAFFOLD) for name, token in tokens.items() if token is not None}
        self.digest = hashlib.blake2b(source.encode("utf-8", "surrogatepass"), digest_size=32).hexdigest()
        """BLAKE2b-256 of the source, in hex"""

    @property
    def variables(self) -> frozenset[str]:
        """Names that `render` takes in `variables`."""
        return (self._sandbox.reads | COMMON_VARIABLES) - _INTERNAL

    def reads(self, name: str) -> bool:
        """Whether the template looks this variable up."""
        return name in self._sandbox.reads

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Scalar] | None = None,
    ) -> RenderedPrompt:
        """The prompt of a conversation. `tools` are JSON-like definitions as OpenAI's API has them.

        Raises `TemplateError`, with the template's own reason where it has one, if the template refuses the
        conversation or breaks its budget, and `ParameterError` for a variable that may not be given.
        """
        given = self._checked(variables or {})
        data = {
            "messages": [_message(message, origin_of_message(i)) for i, message in enumerate(messages)],
            "tools": None if tools is None else [dict(tool) for tool in tools],
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        budget = Budget(_characters(data) + _characters(given))
        text = self._sandbox.render({**given, **data, **self._tokens}, budget)
        return RenderedPrompt(str.__str__(text), text.origins, tuple(messages))

    def _checked(self, variables: Mapping[str, Scalar]) -> dict[str, Scalar]:
        for name, value in variables.items():
            if name not in self.variables:
                raise ParameterError(
                    f"the chat template has no variable {quoted(str(name))} to set",
                    hint=f"it has: {', '.join(sorted(self.variables))}",
                )
            if not (value is None or isinstance(value, bool | int | float | str)):
                raise ParameterError(f"the template variable {name} must be a text, a number, a boolean or null")
        return dict(variables)


def _message(message: Message, origin: str) -> dict[str, Any]:
    """A message as templates know it: what is not there has no key; an answer that only calls tools has content ""."""
    if not isinstance(message.content, str):
        raise ParameterError("the content of a message must be text")
    if message.role not in tuple(Role):
        raise ParameterError(f"a message cannot have the role {quoted(str(message.role))}")
    shown: dict[str, Any] = {
        "role": PromptText.of(Role(message.role).value, SCAFFOLD),
        "content": PromptText.of(message.content, origin),
    }
    if message.name is not None:
        shown["name"] = message.name
    if message.tool_calls:
        shown["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    return shown


def _tool_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _arguments(call.arguments)}}


def _arguments(text: str) -> Any:
    """The object that the JSON text means, as templates expect it; else the text itself."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _characters(value: Any) -> int:
    """Characters of all texts in a JSON-like value. Raises `ParameterError` if it is something else or too deep."""
    total = 0
    pending = [(value, 0)]
    while pending:
        item, depth = pending.pop()
        if depth > _MAX_INPUT_DEPTH:
            raise ParameterError(f"messages and tools may nest {_MAX_INPUT_DEPTH} levels, not more")
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, dict):
            pending.extend((part, depth + 1) for pair in item.items() for part in pair)
        elif isinstance(item, list | tuple):
            pending.extend((part, depth + 1) for part in item)
        elif not (item is None or isinstance(item, bool | int | float)):
            raise ParameterError(f"messages and tools are JSON values, not {type(item).__name__}")
    return total
