"""From events to OpenAI's chat.completion and chat.completion.chunk."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from edge_llm.messages import Event, ReasoningDelta, TextDelta, ToolCallDelta
from edge_llm_server.answer import Answer, chat_logprobs, labels, timings, usage
from edge_llm_server.shape import ServerSentEvents

FINGERPRINT = "edge_llm"


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)


@dataclass(frozen=True, slots=True)
class ChatReply:
    """What all parts of one reply have in common."""

    model: str
    logprobs: bool = False
    usage_wanted: bool = False
    """a last chunk with the usage"""
    service_tier: str | None = None
    id: str = field(default_factory=lambda: new_id("chatcmpl-"))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """A `chat.completion` of complete answers."""
        choices = [
            {
                "index": index,
                "message": _message(answer),
                "logprobs": chat_logprobs(answer.tokens) if self.logprobs else None,
                "finish_reason": answer.reason,
                **labels(answer.end),
            }
            for index, answer in enumerate(answers)
        ]
        return {**self.head("chat.completion"), "choices": choices, "usage": usage(answers), **_tail(answers)}

    def stream(self) -> ChatStream:
        return ChatStream(self)

    def head(self, kind: str) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        tier = {} if self.service_tier is None else {"service_tier": self.service_tier}
        return {**head, "system_fingerprint": FINGERPRINT, **tier}


class ChatStream(ServerSentEvents):
    """Encodes events as chunks. What does not change from token to token is written once."""

    def __init__(self, reply: ChatReply) -> None:
        self._reply = reply
        head = json.dumps(reply.head("chat.completion.chunk"))
        self._before = f'data: {head[:-1]}, "choices": [{{"index": '
        self._after = ', "usage": null}\n\n' if reply.usage_wanted else "}\n\n"

    def opening(self, index: int) -> str:
        """The chunk in which the assistant takes the floor."""
        return self._chunk(index, '{"role": "assistant", "content": ""}')

    def event(self, index: int, event: Event) -> str:
        """The chunk of a delta; nothing for what clients are not told."""
        match event:
            case TextDelta(text, tokens):
                logprobs = json.dumps(chat_logprobs(tokens)) if self._reply.logprobs else "null"
                return self._chunk(index, f'{{"content": {json.dumps(text)}}}', logprobs)
            case ReasoningDelta(text):
                return self._chunk(index, f'{{"reasoning_content": {json.dumps(text)}}}')
            case ToolCallDelta():
                return "".join(self._chunk(index, json.dumps({"tool_calls": [piece]})) for piece in _call_pieces(event))
        return ""

    def ending(self, index: int, answer: Answer) -> str:
        """The chunk that says why the answer has ended."""
        return self._chunk(index, "{}", reason=f'"{answer.reason}"')

    def closing(self, answers: Sequence[Answer]) -> str:
        """What comes after all answers."""
        text = ""
        if self._reply.usage_wanted:
            head = self._reply.head("chat.completion.chunk")
            text = f"data: {json.dumps({**head, 'choices': [], 'usage': usage(answers), **_tail(answers)})}\n\n"
        return text + "data: [DONE]\n\n"

    def _chunk(self, index: int, delta: str, logprobs: str = "null", reason: str = "null") -> str:
        fields = f'{index}, "delta": {delta}, "logprobs": {logprobs}, "finish_reason": {reason}}}]'
        return f"{self._before}{fields}{self._after}"


def _message(answer: Answer) -> dict[str, Any]:
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in answer.end.tool_calls
    ]
    text = answer.text
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
    if answer.thoughts:
        message["reasoning_content"] = "".join(answer.thoughts)
    return {**message, "tool_calls": calls} if calls else message


def _call_pieces(event: ToolCallDelta) -> list[dict[str, Any]]:
    """First the name without arguments, then pieces of them: clients tell a new call from more of one by that."""
    pieces: list[dict[str, Any]] = []
    if event.name is not None:
        function = {"name": event.name, "arguments": ""}
        pieces.append({"index": event.index, "id": event.id, "type": "function", "function": function})
    if event.arguments:
        pieces.append({"index": event.index, "function": {"arguments": event.arguments}})
    return pieces


def _tail(answers: Sequence[Answer]) -> dict[str, Any]:
    """What llama-server's clients read beside OpenAI's fields, and what repeats the answer."""
    end = answers[0].end
    tail: dict[str, Any] = {"timings": timings(end), "seed": end.seed}
    if forgotten := max(answer.end.forgotten_tokens for answer in answers):
        tail["forgotten_tokens"] = forgotten
        tail["forgotten_messages"] = list(end.forgotten)
    return tail
