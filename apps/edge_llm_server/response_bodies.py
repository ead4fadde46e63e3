"""What clients of OpenAI's Responses API send, and the same in the words of its chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from edge_llm.engine.request import Request
from edge_llm_server.api_error import ApiError
from edge_llm_server.fields import refusals
from edge_llm_server.schemas import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    Body,
    ChatBody,
    Generation,
    OtherPart,
    Text,
    TextPart,
    Word,
)
from edge_llm_server.translate import Caller, chat_requests, checked

LOGPROBS = "message.output_text.logprobs"
NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
}
"""what fields of OpenAI's chat are called here"""


class RefusedPart(Body):
    type: Literal["refusal"]
    refusal: Text


class InputMessage(Body):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart | RefusedPart | OtherPart], Field(max_length=MAX_PARTS)]


class InputCall(Body):
    type: Literal["function_call"]
    call_id: Word
    name: Word
    arguments: Text


class InputResult(Body):
    type: Literal["function_call_output"]
    call_id: Word
    output: Text | Annotated[list[TextPart | OtherPart], Field(max_length=MAX_PARTS)]


class InputThoughts(Body):
    """Of an earlier answer: templates leave them out, and so is it here."""

    type: Literal["reasoning"]


Item = InputCall | InputResult | InputThoughts | InputMessage | OtherPart


class ResponseTool(Body):
    type: Literal["function"]
    name: Word
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenTool(Body):
    type: Literal["function"]
    name: Word


class TextOptions(Body):
    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(Body):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Word | None = None


class ResponseBody(Generation):
    """POST /v1/responses. Nothing is stored: whoever goes on sends the conversation again."""

    input: Text | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: Text | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: Annotated[list[Word], Field(max_length=16)] | None = None
    text: TextOptions | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    metadata: Annotated[dict[str, Text], Field(max_length=16)] | None = None
    user: Text | None = None
    previous_response_id: Word | None = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None
    max_tool_calls: int | None = None

    def as_chat(self) -> dict[str, Any]:
        """The fields of OpenAI's chat. Raises `ApiError` for what would change the answer and is not done."""
        for name in ("previous_response_id", "conversation", "prompt", "background", "max_tool_calls"):
            if getattr(self, name):
                raise ApiError.invalid(
                    f"{name} is not supported: nothing is stored here", name, "unsupported_parameter"
                )
        if self.text is not None and self.text.verbosity not in (None, "medium"):
            raise ApiError.invalid("text.verbosity is not supported", "text", "unsupported_parameter")
        if self.response_format is not None:
            raise ApiError.invalid("a response's format is given in text.format", "response_format")
        if self.n not in (None, 1):
            raise ApiError.invalid("a response has one answer", "n", "unsupported_parameter")
        fields: dict[str, Any] = {
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "tool_choice": self._tool_choice(),
            "response_format": self._format(),
            "reasoning_effort": self.reasoning.effort if self.reasoning is not None else None,
            "logprobs": self.wants_logprobs,
            "top_logprobs": self.top_logprobs if self.wants_logprobs else None,
        }
        fields |= self.model_dump(include={*Generation.model_fields, "parallel_tool_calls"}, exclude_none=True)
        if self.tools:
            fields["tools"] = [_tool(tool) for tool in self.tools]
        return fields

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    def _messages(self) -> list[dict[str, Any]]:
        opening = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            return [*opening, {"role": "user", "content": self.input}]
        return opening + _messages(self.input)

    def _tool_choice(self) -> Any:
        if isinstance(self.tool_choice, ChosenTool):
            return {"type": "function", "function": {"name": self.tool_choice.name}}
        return self.tool_choice

    def _format(self) -> dict[str, Any] | None:
        form = self.text.format if self.text is not None else None
        if form is None or form.get("type") != "json_schema":
            return form
        return {"type": "json_schema", "json_schema": {name: form[name] for name in form if name != "type"}}


def response_requests(body: ResponseBody, caller: Caller) -> list[Request]:
    """The one request. Raises `ApiError`."""
    with refusals(names=NAMES):
        return chat_requests(checked(ChatBody, body.as_chat()), caller)


def _tool(tool: ResponseTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _messages(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Calls become part of the assistant's message before them, as a chat has it."""
    messages: list[dict[str, Any]] = []
    for item in items:
        match item:
            case InputMessage():
                messages.append({"role": item.role, "content": _content(item.content)})
            case InputCall():
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": None})
                call = {"name": item.name, "arguments": item.arguments}
                messages[-1].setdefault("tool_calls", []).append(
                    {"id": item.call_id, "type": "function", "function": call}
                )
            case InputResult():
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)})
            case OtherPart():
                raise ApiError.invalid(f"an item of the type {item.type!a} cannot be read", "input")
    if not messages:
        raise ApiError.invalid("there is nothing to answer", "input")
    return messages


def _content(content: Text | list[Any]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [part.model_dump() for part in content]
