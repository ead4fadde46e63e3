"""From events to the replies of Ollama's chat and generate: one JSON object a line, durations in nanoseconds."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from edge_llm.messages import Event, Finished, ReasoningDelta, TextDelta, TokenInfo, TokenLogprob
from edge_llm_server.answer import Answer, logprob, token_text
from edge_llm_server.api_error import ApiError

Words = Callable[[str, str, list[dict[str, Any]]], dict[str, Any]]
"""from text, thoughts and tool calls to the fields that hold them"""


def chat_words(text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thinking:
        message["thinking"] = thinking
    return {"message": {**message, "tool_calls": calls} if calls else message}


def generate_words(text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    return {"response": text, "thinking": thinking} if thinking else {"response": text}


@dataclass(frozen=True, slots=True)
class OllamaReply:
    """What all lines of one reply have in common."""

    model: str
    words: Words
    logprobs: bool = False

    def head(self) -> dict[str, Any]:
        return {"model": self.model, "created_at": now()}

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        said = self.words(answer.text, "".join(answer.thoughts), _calls(answer.end))
        logprobs = {"logprobs": _logprobs(answer.tokens)} if self.logprobs else {}
        return {**self.head(), **said, **logprobs, **_end(answer.end)}

    def stream(self) -> OllamaStream:
        return OllamaStream(self)


class OllamaStream:
    """Encodes events as lines."""

    media_type = "application/x-ndjson"

    def __init__(self, reply: OllamaReply) -> None:
        self._reply = reply

    def opening(self, index: int) -> str:
        return ""

    def event(self, index: int, event: Event) -> str:
        match event:
            case TextDelta(text, tokens):
                logprobs = {"logprobs": _logprobs(tokens)} if self._reply.logprobs else {}
                return self._line({**self._reply.words(text, "", []), **logprobs, "done": False})
            case ReasoningDelta(text):
                return self._line({**self._reply.words("", text, []), "done": False})
            case Finished(tool_calls=calls) if calls:
                return self._line({**self._reply.words("", "", _calls(event)), "done": False})
        return ""

    def ending(self, index: int, answer: Answer) -> str:
        return self._line({**self._reply.words("", "", []), **_end(answer.end)})

    def closing(self, answers: Sequence[Answer]) -> str:
        return ""

    def ping(self) -> str:
        return self._line({**self._reply.words("", "", []), "done": False})

    def error(self, error: ApiError) -> str:
        return json.dumps({"error": str(error)}) + "\n"

    def _line(self, fields: dict[str, Any]) -> str:
        return json.dumps({**self._reply.head(), **fields}) + "\n"


def loaded(model: str, words: Words) -> dict[str, Any]:
    """The reply to a request that only wanted the model loaded."""
    return {"model": model, "created_at": now(), **words("", "", []), "done": True, "done_reason": "load"}


def now() -> str:
    seconds, nanoseconds = divmod(time.time_ns(), 10**9)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{nanoseconds:09d}Z"


def _calls(end: Finished) -> list[dict[str, Any]]:
    """Arguments are an object here, and not its text."""
    return [
        {"id": call.id, "function": {"name": call.name, "arguments": json.loads(call.arguments)}}
        for call in end.tool_calls
    ]


def _logprobs(tokens: Sequence[TokenInfo]) -> list[dict[str, Any]]:
    def entry(token: TokenLogprob) -> dict[str, Any]:
        return {"token": token_text(token), "logprob": logprob(token), "bytes": list(token.data)}

    return [{**entry(info.chosen), "top_logprobs": [entry(other) for other in info.alternatives]} for info in tokens]


def _end(end: Finished) -> dict[str, Any]:
    """Why it ended and how long it took. The model was loaded before: its time is 0."""
    usage, times = end.usage, end.timings
    computed = usage.prompt_tokens - usage.cached_tokens
    prefill_s = computed / times.prefill_tokens_per_s if times.prefill_tokens_per_s else 0.0
    decode_s = times.tpot_s * (usage.completion_tokens - 1) if times.tpot_s else 0.0
    return {
        "done": True,
        "done_reason": "stop" if end.reason in ("stop", "tool_calls") else "length",
        "total_duration": int(times.total_s * 1e9),
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": int(prefill_s * 1e9),
        "eval_count": usage.completion_tokens,
        "eval_duration": int(decode_s * 1e9),
    }
