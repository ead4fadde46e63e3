"""What Ollama's clients send, and the same in the words of OpenAI's chat, which everything else here understands."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from edge_llm_server.api_error import ApiError
from edge_llm_server.schemas import MAX_MESSAGES, MAX_TOOLS, Body, Ids, Text, Word

_SAME_OPTIONS = (
    *("seed", "top_k", "top_p", "min_p", "typical_p", "temperature", "repeat_penalty", "presence_penalty"),
    *("frequency_penalty", "mirostat", "mirostat_tau", "mirostat_eta", "stop", "tfs_z", "repeat_last_n"),
)
_LOADING_OPTIONS = frozenset(
    ("numa", "num_ctx", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap",
     "use_mlock", "embedding_only", "num_thread", "num_keep")
)  # fmt: skip
"""how Ollama would load a model; a context that is too small is an error here, never a silent cut"""
NAMES = {
    "max_tokens": "num_predict",
    "response_format": "format",
    "chat_template_kwargs": "think",
    "truncation": "truncate",
}
"""what fields of OpenAI's chat are called here"""


class CalledFunction(Body):
    name: Word
    arguments: dict[str, Any] = Field(default_factory=dict)


class Called(Body):
    id: Word | None = None
    function: CalledFunction


class OllamaMessage(Body):
    role: Literal["system", "user", "assistant", "tool"]
    content: Text | None = None
    thinking: Text | None = None
    images: Annotated[list[Any], Field(max_length=MAX_TOOLS)] | None = None
    tool_calls: Annotated[list[Called], Field(max_length=MAX_TOOLS)] | None = None
    tool_name: Word | None = None
    tool_call_id: Word | None = None


class OllamaBody(Body):
    """What /api/chat and /api/generate share."""

    model: Word
    stream: bool | None = None
    options: dict[str, Any] | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    keep_alive: float | Word | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    truncate: bool | None = None
    shift: bool | None = None

    def options_for_chat(self) -> dict[str, Any]:
        """The options as fields of OpenAI's body. Raises `ApiError` for what would change the answer and is not done."""
        given = self.options or {}
        fields = {name: given[name] for name in _SAME_OPTIONS if given.get(name) is not None}
        fields |= _length(given)
        for name, value in given.items():
            plain = name in _SAME_OPTIONS or name in _LOADING_OPTIONS or name == "num_predict"
            if not plain and value is not None and (name, value) != ("penalize_newline", True):
                raise ApiError.invalid(f"the option {name[:40]!a} is not supported", "options", "unsupported_parameter")
        if isinstance(self.format, dict):
            fields["response_format"] = {"type": "json_object", "schema": self.format}
        elif self.format:
            fields["response_format"] = {"type": "json_object"}
        if self.think is not None:
            fields["chat_template_kwargs"] = {"enable_thinking": bool(self.think)}
        if self.truncate or self.shift:
            fields["truncation"] = "auto"
        return {**fields, "logprobs": self.logprobs, "top_logprobs": self.top_logprobs}


def _length(given: Mapping[str, Any]) -> dict[str, Any]:
    value = given.get("num_predict")
    if value in (-1, -2):  # without an end, and until the context is full: the same here
        return {}
    return {} if value is None else {"max_tokens": value}


class OllamaChatBody(OllamaBody):
    """POST /api/chat. Without messages it only loads the model."""

    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None

    def as_chat(self) -> dict[str, Any]:
        """The fields of OpenAI's body."""
        fields = {**self.options_for_chat(), "messages": _messages(self.messages or ())}
        return {**fields, "tools": self.tools} if self.tools else fields


class OllamaGenerateBody(OllamaBody):
    """POST /api/generate. Without a prompt it only loads the model."""

    prompt: Text | None = None
    system: Text | None = None
    raw: bool | None = None
    suffix: Text | None = None
    template: Text | None = None
    context: Ids | Annotated[list[int], Field(max_length=0)] | None = None
    images: Annotated[list[Any], Field(max_length=MAX_TOOLS)] | None = None

    def as_chat(self) -> dict[str, Any]:
        """The fields of OpenAI's chat or, if `raw`, of its completion."""
        for name in ("suffix", "template", "context", "images"):
            if getattr(self, name):
                raise ApiError.invalid(f"{name} is not supported", name, "unsupported_parameter")
        fields = self.options_for_chat()
        if self.raw:
            if self.think:
                raise ApiError.invalid("a raw prompt has no switch for thinking", "think")
            top = self.top_logprobs or 0
            return {
                **fields,
                "prompt": self.prompt,
                "logprobs": top if self.logprobs else None,
                "chat_template_kwargs": None,
            }
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {**fields, "messages": [*system, {"role": "user", "content": self.prompt}]}


def _messages(given: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """Ollama's calls have no ids: results belong to the calls before them, by name and then by order."""
    messages: list[dict[str, Any]] = []
    open_calls: list[tuple[str, str]] = []
    for number, message in enumerate(given):
        if message.images:
            raise ApiError.invalid("images cannot be read: text only", "messages")
        entry: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.tool_calls:
            calls = [(call.id or f"call_{number}_{i}", call.function) for i, call in enumerate(message.tool_calls)]
            open_calls += [(id_, function.name) for id_, function in calls]
            entry["tool_calls"] = [
                {"id": id_, "type": "function", "function": {"name": f.name, "arguments": json.dumps(f.arguments)}}
                for id_, f in calls
            ]
        if message.role == "tool":
            answered = _answered(message, open_calls)
            entry["tool_call_id"] = answered
            if message.tool_name is not None:
                entry["name"] = message.tool_name
        messages.append(entry)
    return messages


def _answered(message: OllamaMessage, open_calls: list[tuple[str, str]]) -> str:
    """The id of the call that a result answers; it is taken out."""
    for wanted in (message.tool_call_id, message.tool_name, None):
        for call in open_calls:
            if wanted is None or wanted in call:
                open_calls.remove(call)
                return call[0]
    return message.tool_call_id or "call"


class ShowBody(Body):
    """POST /api/show."""

    model: Word | None = None
    name: Word | None = None
