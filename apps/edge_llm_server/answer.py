"""Answer: the events of one request, gathered; and what of it goes into a reply whatever its shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edge_llm.messages import (
    Event,
    Finished,
    FinishReason,
    ReasoningDelta,
    TextDelta,
    TokenInfo,
    TokenLogprob,
    ToolCallDelta,
)

LEAST_LOGPROB = -9999.0
"""what OpenAI's API gives for a token that is hardly possible; JSON has no infinity"""
_REASONS: Mapping[FinishReason, str] = {
    FinishReason.STOP: "stop",
    FinishReason.TOOL_CALLS: "tool_calls",
}


@dataclass(slots=True)
class Answer:
    """What was said so far, and the end of it."""

    pieces: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    tokens: list[TokenInfo] = field(default_factory=list)
    called: bool = False
    finished: Finished | None = None

    def add(self, event: Event) -> None:
        match event:
            case TextDelta(text, tokens):
                self.pieces.append(text)
                self.tokens.extend(tokens)
            case ReasoningDelta(text):
                self.thoughts.append(text)
            case ToolCallDelta():
                self.called = True
            case Finished():
                self.finished = event

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def end(self) -> Finished:
        assert self.finished is not None, "the answer has not ended"
        return self.finished

    @property
    def reason(self) -> str:
        """OpenAI's finish_reason. What was cut by a limit of tokens or time says so."""
        return _REASONS.get(self.end.reason, "length")


def usage(answers: Sequence[Answer], *, prompts: int = 1) -> dict[str, Any]:
    """OpenAI's usage. The answers to one prompt share it: it is counted once for each of the `prompts`, and as cached where
    its first answer found it."""
    ends = [answer.end.usage for answer in answers]
    firsts = ends[:: max(1, len(ends) // prompts)]
    prompt, completion = sum(end.prompt_tokens for end in firsts), sum(end.completion_tokens for end in ends)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(end.cached_tokens for end in firsts)},
        "completion_tokens_details": {"reasoning_tokens": sum(end.reasoning_tokens for end in ends)},
    }


def labels(end: Finished) -> dict[str, Any]:
    """How probable each label was that the request offered, the most probable first; nothing where it offered none."""
    if not end.choices:
        return {}
    scored = [{"label": one.label, "probability": one.probability, "logprob": one.logprob} for one in end.choices]
    return {"label_probabilities": scored}


def timings(end: Finished) -> dict[str, Any]:
    """llama-server's `timings`, in milliseconds and tokens a second; what was not measured is null."""
    usage, times = end.usage, end.timings
    computed = usage.prompt_tokens - usage.cached_tokens
    prompt_ms = computed / times.prefill_tokens_per_s * 1000 if times.prefill_tokens_per_s else None
    tpot_ms = times.tpot_s * 1000 if times.tpot_s else None
    return {
        "cache_n": usage.cached_tokens,
        "prompt_n": computed,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / computed if prompt_ms and computed else None,
        "prompt_per_second": times.prefill_tokens_per_s,
        "predicted_n": usage.completion_tokens,
        "predicted_ms": tpot_ms * (usage.completion_tokens - 1) if tpot_ms else None,
        "predicted_per_token_ms": tpot_ms,
        "predicted_per_second": times.decode_tokens_per_s,
        "queue_ms": times.queue_s * 1000,
        "ttft_ms": None if times.ttft_s is None else times.ttft_s * 1000,
        "draft_n": usage.draft_tokens,
        "draft_n_accepted": usage.accepted_draft_tokens,
        **({} if times.joules is None else {"joules": times.joules}),
    }


def token_text(token: TokenLogprob) -> str:
    return token.data.decode("utf-8", "replace")


def logprob(token: TokenLogprob) -> float:
    return token.logprob if token.logprob > LEAST_LOGPROB else LEAST_LOGPROB


def chat_logprobs(tokens: Sequence[TokenInfo]) -> dict[str, Any]:
    """The `logprobs` of a chat's choice. A token may be a part of a character: its bytes are exact, its text is not."""

    def entry(token: TokenLogprob) -> dict[str, Any]:
        return {"token": token_text(token), "bytes": list(token.data), "logprob": logprob(token)}

    content = [{**entry(info.chosen), "top_logprobs": [entry(other) for other in info.alternatives]} for info in tokens]
    return {"content": content, "refusal": None}


def legacy_logprobs(tokens: Sequence[TokenInfo], offset: int = 0) -> dict[str, Any]:
    """The `logprobs` of a completion's choice; `offset` is where its text begins, in characters."""
    texts = [token_text(info.chosen) for info in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    tops = [{token_text(other): logprob(other) for other in reversed(info.alternatives)} for info in tokens]
    return {
        "tokens": texts,
        "token_logprobs": [logprob(info.chosen) for info in tokens],
        "top_logprobs": tops if any(tops) else None,
        "text_offset": offsets,
    }
