"""From events to OpenAI's response object and the events of its stream."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from edge_llm.messages import Event, ReasoningDelta, TextDelta, TokenInfo, ToolCall, ToolCallDelta
from edge_llm_server.answer import Answer, chat_logprobs, timings
from edge_llm_server.api_error import ApiError
from edge_llm_server.chat_shapes import new_id
from edge_llm_server.response_bodies import ResponseBody
from edge_llm_server.shape import ServerSentEvents


@dataclass(frozen=True, slots=True)
class ResponseReply:
    """What all parts of one reply have in common."""

    model: str
    body: ResponseBody
    id: str = field(default_factory=lambda: new_id("resp_"))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        items = [reasoning_item(new_id("rs_"), "".join(answer.thoughts))] if answer.thoughts else []
        if answer.text or not answer.end.tool_calls:
            tokens = answer.tokens if self.body.wants_logprobs else ()
            items.append(message_item(new_id("msg_"), answer.text, tokens))
        items += [call_item(new_id("fc_"), call) for call in answer.end.tool_calls]
        if _is_cut(answer):
            items[-1]["status"] = "incomplete"
        return self.ended(items, answer)

    def stream(self) -> ResponseStream:
        return ResponseStream(self)

    def ended(self, items: list[dict[str, Any]], answer: Answer) -> dict[str, Any]:
        used = answer.end.usage
        usage = {
            "input_tokens": used.prompt_tokens,
            "input_tokens_details": {"cached_tokens": used.cached_tokens},
            "output_tokens": used.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": used.reasoning_tokens},
            "total_tokens": used.prompt_tokens + used.completion_tokens,
        }
        cut = _is_cut(answer)
        head = self.head("incomplete" if cut else "completed", items)
        details = {"reason": "max_output_tokens"} if cut else None
        numbers = {"timings": timings(answer.end), "seed": answer.end.seed}
        return {**head, "incomplete_details": details, "usage": usage, **numbers}

    def head(self, status: str, items: list[dict[str, Any]], error: dict[str, Any] | None = None) -> dict[str, Any]:
        body = self.body.model_dump(include=_ECHOED, exclude_none=True)
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": error,
            "incomplete_details": None,
            "model": self.model,
            "output": items,
            **_DEFAULTS,
            **body,
            "store": False,
            "usage": None,
        }


def _is_cut(answer: Answer) -> bool:
    return answer.reason == "length"


_ECHOED = {
    *("instructions", "max_output_tokens", "temperature", "top_p", "tools", "tool_choice", "parallel_tool_calls"),
    *("reasoning", "text", "truncation", "metadata", "user", "service_tier", "top_logprobs"),
}
_DEFAULTS: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "temperature": None,
    "top_p": None,
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": None,
    "text": {"format": {"type": "text"}},
    "truncation": "disabled",
    "metadata": {},
    "user": None,
}


def text_part(text: str, tokens: Sequence[TokenInfo] = ()) -> dict[str, Any]:
    logprobs = chat_logprobs(tokens)["content"]
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def message_item(item_id: str, text: str | None, tokens: Sequence[TokenInfo] = ()) -> dict[str, Any]:
    """`text` is None for a message that is only beginning."""
    content, status = ([], "in_progress") if text is None else ([text_part(text, tokens)], "completed")
    return {"id": item_id, "type": "message", "status": status, "role": "assistant", "content": content}


def reasoning_item(item_id: str, text: str | None) -> dict[str, Any]:
    content, status = ([], "in_progress") if text is None else ([_thought(text)], "completed")
    return {"id": item_id, "type": "reasoning", "summary": [], "content": content, "status": status}


def _thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def call_item(item_id: str, call: ToolCall, status: str = "completed") -> dict[str, Any]:
    return {
        "id": item_id,
        "type": "function_call",
        "status": status,
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
    }


class ResponseStream(ServerSentEvents):
    """Encodes events as those of a response: items come one after another, each announced, filled and closed."""

    def __init__(self, reply: ResponseReply) -> None:
        self._reply = reply
        self._number = 0
        self._items: list[dict[str, Any]] = []
        self._open: _Text | _Call | None = None

    def opening(self, index: int) -> str:
        head = self._reply.head("in_progress", [])
        return self._say("response.created", response=head) + self._say("response.in_progress", response=head)

    def event(self, index: int, event: Event) -> str:
        match event:
            case TextDelta(text, tokens) if text or tokens:
                return self._more_text("message", text, tokens if self._reply.body.wants_logprobs else ())
            case ReasoningDelta(text):
                return self._more_text("reasoning", text, ())
            case ToolCallDelta():
                return self._more_call(event)
        return ""

    def ending(self, index: int, answer: Answer) -> str:
        told = ""
        if self._open is None and not self._items:  # an answer without a word is still a message
            told = self._more_text("message", "", ())
        return told + self._close("incomplete" if _is_cut(answer) else "completed")

    def closing(self, answers: Sequence[Answer]) -> str:
        response = self._reply.ended(self._items, answers[0])
        return self._say(f"response.{response['status']}", response=response)

    def error(self, error: ApiError) -> str:
        fault = {"code": "server_error", "message": str(error)}
        return self._say("response.failed", response=self._reply.head("failed", self._items, fault))

    def _more_text(self, kind: str, text: str, tokens: Sequence[TokenInfo]) -> str:
        told = ""
        if not isinstance(self._open, _Text) or self._open.kind != kind:
            told = self._close()
            self._open = _Text(kind, new_id("msg_" if kind == "message" else "rs_"))
            told += self._say("response.output_item.added", output_index=self._place, item=self._open.item(None))
            if kind == "message":
                told += self._part("response.content_part.added", part=text_part(""))
        self._open.pieces.append(text)
        self._open.tokens.extend(tokens)
        if kind == "reasoning":
            return told + self._part("response.reasoning_text.delta", delta=text)
        logprobs = chat_logprobs(tokens)["content"]
        return told + self._part("response.output_text.delta", delta=text, logprobs=logprobs)

    def _more_call(self, event: ToolCallDelta) -> str:
        told = ""
        if event.name is not None:
            told = self._close()
            self._open = _Call(new_id("fc_"), event.id or new_id("call_"), event.name)
            item = call_item(self._open.item_id, ToolCall(self._open.call_id, event.name, ""), "in_progress")
            told += self._say("response.output_item.added", output_index=self._place, item=item)
        if not isinstance(self._open, _Call) or not event.arguments:
            return told
        self._open.pieces.append(event.arguments)
        where = {"item_id": self._open.item_id, "output_index": self._place}
        return told + self._say("response.function_call_arguments.delta", **where, delta=event.arguments)

    def _close(self, status: str = "completed") -> str:
        """The last events of the item that is open."""
        item, told = self._open, ""
        if item is None:
            return ""
        text = "".join(item.pieces)
        if isinstance(item, _Call):
            where = {"item_id": item.item_id, "output_index": self._place}
            told = self._say("response.function_call_arguments.done", **where, name=item.name, arguments=text)
            whole = call_item(item.item_id, ToolCall(item.call_id, item.name, text))
        else:
            whole = item.item(text)
            if item.kind == "reasoning":
                told = self._part("response.reasoning_text.done", text=text)
            else:
                part = whole["content"][0]
                told = self._part("response.output_text.done", text=text, logprobs=part["logprobs"])
                told += self._part("response.content_part.done", part=part)
        whole["status"] = status
        told += self._say("response.output_item.done", output_index=self._place, item=whole)
        self._items.append(whole)
        self._open = None
        return told

    @property
    def _place(self) -> int:
        """Index of the item that is open."""
        return len(self._items)

    def _part(self, kind: str, **fields: Any) -> str:
        assert self._open is not None
        return self._say(kind, item_id=self._open.item_id, output_index=self._place, content_index=0, **fields)

    def _say(self, kind: str, **fields: Any) -> str:
        data = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return f"event: {kind}\ndata: {json.dumps(data)}\n\n"


@dataclass(slots=True)
class _Text:
    """A message or thoughts, being written."""

    kind: str
    item_id: str
    pieces: list[str] = field(default_factory=list)
    tokens: list[TokenInfo] = field(default_factory=list)

    def item(self, text: str | None) -> dict[str, Any]:
        if self.kind == "reasoning":
            return reasoning_item(self.item_id, text)
        return message_item(self.item_id, text, self.tokens)


@dataclass(slots=True)
class _Call:
    """A call, being written."""

    item_id: str
    call_id: str
    name: str
    pieces: list[str] = field(default_factory=list)
