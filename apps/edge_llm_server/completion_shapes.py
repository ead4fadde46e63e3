"""From events to OpenAI's text_completion."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from edge_llm.messages import Event, ReasoningDelta, TextDelta
from edge_llm_server.answer import Answer, labels, legacy_logprobs, timings, token_text, usage
from edge_llm_server.chat_shapes import FINGERPRINT, new_id
from edge_llm_server.shape import ServerSentEvents


@dataclass(frozen=True, slots=True)
class CompletionReply:
    """What all parts of one reply have in common. `echoes` are the prompts, said again before each of their answers."""

    model: str
    prompts: int
    echoes: tuple[str, ...] = ()
    """one for each choice, or none"""
    logprobs: bool = False
    usage_wanted: bool = False
    id: str = field(default_factory=lambda: new_id("cmpl-"))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "text": (self.echoes[index] if self.echoes else "") + answer.text,
                "logprobs": legacy_logprobs(answer.tokens) if self.logprobs else None,
                "finish_reason": answer.reason,
                **labels(answer.end),
            }
            for index, answer in enumerate(answers)
        ]
        end = answers[0].end
        numbers = {"usage": usage(answers, prompts=self.prompts), "timings": timings(end), "seed": end.seed}
        return {**self.head(), "choices": choices, **numbers}

    def stream(self) -> CompletionStream:
        return CompletionStream(self)

    def head(self) -> dict[str, Any]:
        kind = "text_completion"
        names = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**names, "system_fingerprint": FINGERPRINT}


class CompletionStream(ServerSentEvents):
    """Encodes events as parts of a text_completion."""

    def __init__(self, reply: CompletionReply) -> None:
        self._reply = reply
        self._before = f'data: {json.dumps(reply.head())[:-1]}, "choices": [{{"index": '
        self._after = ', "usage": null}\n\n' if reply.usage_wanted else "}\n\n"
        self._offsets: dict[int, int] = {}

    def opening(self, index: int) -> str:
        return self._chunk(index, self._reply.echoes[index]) if self._reply.echoes else ""

    def event(self, index: int, event: Event) -> str:
        match event:
            case TextDelta(text, tokens):
                if not self._reply.logprobs:
                    return self._chunk(index, text)
                offset = self._offsets.get(index, 0)
                self._offsets[index] = offset + sum(len(token_text(info.chosen)) for info in tokens)
                return self._chunk(index, text, json.dumps(legacy_logprobs(tokens, offset)))
            case ReasoningDelta(text):  # a text that is continued has no channels; were there one, it is text
                return self._chunk(index, text)
        return ""

    def ending(self, index: int, answer: Answer) -> str:
        return self._chunk(index, "", reason=f'"{answer.reason}"')

    def closing(self, answers: Sequence[Answer]) -> str:
        text = ""
        if self._reply.usage_wanted:
            numbers = usage(answers, prompts=self._reply.prompts)
            text = f"data: {json.dumps({**self._reply.head(), 'choices': [], 'usage': numbers})}\n\n"
        return text + "data: [DONE]\n\n"

    def _chunk(self, index: int, text: str, logprobs: str = "null", reason: str = "null") -> str:
        fields = f'{index}, "text": {json.dumps(text)}, "logprobs": {logprobs}, "finish_reason": {reason}}}]'
        return f"{self._before}{fields}{self._after}"
