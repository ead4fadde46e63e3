"""From the chunks of a streamed completion to events. What a server sends is hostile input: every field is looked at."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from edge_llm.errors import GenerationError
from edge_llm.messages import (
    Event,
    Finished,
    FinishReason,
    ReasoningDelta,
    TextDelta,
    Timings,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from edge_llm_chat.conversation import whole
from edge_llm_chat.wire_logprobs import token_infos

if TYPE_CHECKING:
    import httpx

MOST_EVENT_BYTES = 4 << 20
Otherwise = TypeVar("Otherwise", int, None)


class ChunkReader:
    """What the chunks of one answer have told so far."""

    def __init__(self, seed: object) -> None:
        self.model = ""
        """that answers, as the server calls it"""
        self._started = time.monotonic()
        self._first: float | None = None
        self._last = self._started
        self._pieces = 0
        self._seed = seed if isinstance(seed, int) else 0
        self._reason = FinishReason.STOP
        self._usage: Mapping[str, Any] = {}
        self._timings: Mapping[str, Any] = {}
        self._calls: dict[int, list[str]] = {}
        self._forgotten = 0
        self._gone: tuple[int, ...] = ()

    def take(self, data: Mapping[str, Any]) -> list[Event]:
        """The events of a chunk. Raises `GenerationError` for one that tells of an error."""
        if isinstance(data.get("error"), dict):
            raise GenerationError(whole(str(data["error"].get("message", "the server failed"))))
        self.model = whole(data["model"]) if isinstance(data.get("model"), str) else self.model
        self._usage = data["usage"] if isinstance(data.get("usage"), dict) else self._usage
        self._timings = data["timings"] if isinstance(data.get("timings"), dict) else self._timings
        self._seed = data["seed"] if isinstance(data.get("seed"), int) else self._seed
        self._forgotten = integer(data.get("forgotten_tokens"), self._forgotten)
        if isinstance(gone := data.get("forgotten_messages"), list):
            self._gone = tuple(index for index in gone if isinstance(index, int))
        choices = data.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            return []
        choice = choices[0]
        with contextlib.suppress(ValueError):
            self._reason = FinishReason(str(choice.get("finish_reason")))
        delta = {"content": choice["text"]} if "text" in choice else choice.get("delta")  # of a completion, of a chat
        events = self._deltas(delta, choice.get("logprobs"))
        if events:
            self._last = time.monotonic()
            self._first = self._first or self._last
            self._pieces += len(events)
        return events

    def _deltas(self, delta: object, logprobs: object) -> list[Event]:
        if not isinstance(delta, dict):
            return []
        events: list[Event] = []
        for key in ("reasoning_content", "reasoning"):
            if isinstance(delta.get(key), str) and delta[key]:
                events.append(ReasoningDelta(whole(delta[key])))
                break
        tokens = token_infos(logprobs)
        text = delta.get("content")
        if (isinstance(text, str) and text) or tokens:
            events.append(TextDelta(whole(text) if isinstance(text, str) else "", tokens))
        calls = delta.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            if isinstance(call, dict) and isinstance(call.get("index"), int):
                events.append(self._call(call))
        return events

    def _call(self, call: Mapping[str, Any]) -> ToolCallDelta:
        function = call["function"] if isinstance(call.get("function"), dict) else {}
        name, arguments, identity = function.get("name"), function.get("arguments"), call.get("id")
        known = self._calls.setdefault(call["index"], ["", "", ""])
        for place, part in enumerate((identity, name, arguments)):
            known[place] += whole(part) if isinstance(part, str) else ""
        delta = ToolCallDelta(call["index"], str(arguments or ""))
        return ToolCallDelta(call["index"], delta.arguments, known[0], known[1]) if isinstance(name, str) else delta

    def finished(self, *, cancelled: bool) -> Finished:
        """The end, with the server's own figures where it tells them, else with ours."""
        ttft = None if self._first is None else self._first - self._started
        duration = self._last - (self._first or self._last)
        completed = integer(self._usage.get("completion_tokens"), self._pieces)
        rate = self._timings.get("predicted_per_second")
        if not isinstance(rate, int | float):
            rate = (completed - 1) / duration if duration > 0 and completed > 1 else None
        details = self._usage.get("prompt_tokens_details")
        cached = integer(details.get("cached_tokens"), 0) if isinstance(details, dict) else 0
        return Finished(
            FinishReason.CANCELLED if cancelled else self._reason,
            Usage(integer(self._usage.get("prompt_tokens"), 0), completed, cached),
            Timings(0.0, ttft, self._last - self._started, decode_tokens_per_s=rate, tpot_s=1 / rate if rate else None),
            self._seed,
            forgotten=self._gone,
            forgotten_tokens=self._forgotten,
            tool_calls=tuple(ToolCall(*parts) for _, parts in sorted(self._calls.items())) if not cancelled else (),
        )


async def server_events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events, until [DONE]. Raises `GenerationError` for what is none."""
    async for line in response.aiter_lines():
        if len(line) > MOST_EVENT_BYTES:
            raise GenerationError("the server sent an event that is too large")
        if not line.startswith("data:"):
            continue  # comments keep the connection alive
        text = line[5:].strip()
        if text == "[DONE]":
            return
        yield json_object(text)


def json_object(text: str) -> dict[str, Any]:
    """Raises `GenerationError` for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise GenerationError("the server sent something that is no JSON object")
    return value


def integer(value: object, otherwise: Otherwise) -> int | Otherwise:
    """What a server has counted, where it is such a number: what a float cannot hold would end the program that shows it."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53 else otherwise
