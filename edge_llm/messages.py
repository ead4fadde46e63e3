"""Conversation values going in and events coming out; pure values, no ids or timestamps of a store.

A `Message` is what somebody said. An event is what the engine says while it answers: zero or more `PromptProgress`,
then deltas, then exactly one `Finished`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum

from edge_llm.errors import ParameterError, quoted

MAX_TOOL_NAME = 64
MAX_DESCRIPTION = 16 << 10
"""characters"""


class Role(StrEnum):
    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class FinishReason(StrEnum):
    """Why an answer ended, in the words of OpenAI's API where it has one."""

    STOP = "stop"
    """an end token or a stop string"""
    LENGTH = "length"
    """max_tokens or the context was reached"""
    TOOL_CALLS = "tool_calls"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    """the request's time was up"""


_TOOL_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{MAX_TOOL_NAME}}}")
TOOL_CHOICES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may ask for. `parameters` is the JSON Schema, as text, of the object of its arguments.

    Raises `ParameterError` for a name that is not 1 to 64 of A-Z, a-z, 0-9, "_", ".", "-", or that is a tool choice. The
    schema is checked by `Request`.
    """

    name: str
    description: str = ""
    parameters: str = '{"type": "object", "properties": {}}'

    def __post_init__(self) -> None:
        if not all(isinstance(text, str) for text in (self.name, self.description, self.parameters)):
            raise ParameterError("a tool's name, description and parameters are texts")
        if _TOOL_NAME.fullmatch(self.name) is None or self.name in TOOL_CHOICES:
            raise ParameterError(
                f"a tool cannot have the name {quoted(self.name)}", hint="1 to 64 letters, digits, and _ . -"
            )
        if len(self.description) > MAX_DESCRIPTION:
            raise ParameterError(f"the description of the tool {self.name} has more than {MAX_DESCRIPTION} characters")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model asks for. `arguments` is a JSON object as text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    `token_ids`, when given, are the ids that produced `content` under the tokenizer with digest `tokenizer_digest`;
    they are used in place of encoding the text again, so that an answer is found in the cache as it was sampled.
    """

    role: Role
    content: str
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    token_ids: tuple[int, ...] | None = None
    tokenizer_digest: str | None = None

    @classmethod
    def system(cls, content: str) -> Message:
        return cls(Role.SYSTEM, content)

    @classmethod
    def user(cls, content: str) -> Message:
        return cls(Role.USER, content)

    @classmethod
    def assistant(cls, content: str) -> Message:
        return cls(Role.ASSISTANT, content)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with its natural log-probability under the model's raw logits; `data` are its bytes (maybe half a character)."""

    token_id: int
    data: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """The token that was chosen at one place, and the most probable alternatives there (best first)."""

    chosen: TokenLogprob
    alternatives: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. `cached_tokens` of the prompt were not computed again; of `draft_tokens` that
    speculation tried, `accepted_draft_tokens` were right and saved a step each; `reasoning_tokens` of the completion were
    spent on its reasoning channel, markers included."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations in seconds, rates in tokens a second, and energy; None where there is nothing to measure.

    ttft_s: from submit to the first token, tokenising and queueing included, loading apart.
    prefill_tokens_per_s: computed prompt tokens only, over the time from the first prefill step to the first token.
    decode_tokens_per_s: (n - 1) / (last - first), sampling included; tpot_s is its inverse.
    joules: this request's part of what the machine needed, where a meter or the config's `watts` tells (docs/engine.md).
    """

    queue_s: float
    ttft_s: float | None
    total_s: float
    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    tpot_s: float | None = None
    joules: float | None = None


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """`done` of `total` prompt tokens are in the cache."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text of the answer. `tokens` are given when logprobs were asked for; they may run ahead of whole characters."""

    text: str
    tokens: tuple[TokenInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More text of the model's reasoning channel."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call: the first piece of an `index` carries id and name, later ones more of the arguments.

    `index` counts the calls of an answer from 0; its calls come one after another.
    """

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the labels that a request asked about.

    `logprob` is the natural log-probability, under the model's raw logits, that the answer begins with the label (or is it,
    where another label begins with it); `probability` its share among the labels of the request.
    """

    label: str
    logprob: float
    probability: float


@dataclass(frozen=True, slots=True)
class Beam:
    """An answer that beam search has found.

    `logprob` is the natural log-probability of its tokens under the model's raw logits, an end token's among them; `score` is
    that divided by their number to the power of the length penalty.
    """

    text: str
    token_ids: tuple[int, ...]
    logprob: float
    score: float


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of an answer. `seed` reproduces it; `token_ids` are its ids; `matched_stop` the stop string met.

    Where the context has slid, `forgotten_tokens` of prompt and answer fell out of it, and `forgotten` are the indices of
    the request's messages of which nothing is left: the end of the answer attends to none of their tokens. A message of
    which the template shows no text counts with its neighbours. Both are empty for a conversation that fits.

    `tool_calls` are the calls that the answer asks for, each whole; the reason is then `tool_calls`, unless it was cut or
    cancelled. `invalid_tool_calls` counts those that could not be read as calls, which were shown as text.

    `embedding` is the vector that was asked for, of length 1; `choices` are the labels, the most probable first. `beams` are
    the best answers that beam search has found, the first of which is the answer.
    """

    reason: FinishReason
    usage: Usage
    timings: Timings
    seed: int
    token_ids: tuple[int, ...] = field(default=(), repr=False)
    matched_stop: str | None = None
    forgotten: tuple[int, ...] = ()
    forgotten_tokens: int = 0
    tool_calls: tuple[ToolCall, ...] = ()
    invalid_tool_calls: int = 0
    embedding: tuple[float, ...] = field(default=(), repr=False)
    choices: tuple[Choice, ...] = ()
    beams: tuple[Beam, ...] = ()


Event = PromptProgress | TextDelta | ReasoningDelta | ToolCallDelta | Finished
