"""Request: what a caller asks of an engine; plain values, so that it can cross a process border."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self, TypedDict, Unpack

from edge_llm.config import CONTEXT_POLICIES
from edge_llm.errors import ParameterError
from edge_llm.messages import Message
from edge_llm.sampling.grammar import Grammar
from edge_llm.sampling.params import SamplingParams


class RequestOptions(TypedDict, total=False):
    """The fields of a `Request` that say how it is answered, beside its sampling."""

    context_policy: str | None
    response_format: Grammar | None
    cache: bool
    namespace: str


@dataclass(frozen=True, slots=True)
class Request:
    """Exactly one of `messages` (a chat to answer), `text` (to continue as it is) and `token_ids` (likewise).

    Raises `ParameterError` otherwise.
    """

    messages: tuple[Message, ...] | None = None
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    context_policy: str | None = None
    """what happens past the context: `error`, `slide`, or None for what the engine's config says"""
    response_format: Grammar | None = None
    """what the whole answer must look like"""
    cache: bool = True
    """rows of its tokens may be taken from, and left to, other requests of the same `namespace`"""
    namespace: str = ""

    def __post_init__(self) -> None:
        if sum(given is not None for given in (self.messages, self.text, self.token_ids)) != 1:
            raise ParameterError("a request takes exactly one of messages, text and token_ids")
        if self.text is not None and not isinstance(self.text, str):
            raise ParameterError(f"the text to continue must be a str, not {type(self.text).__name__}")
        if self.messages is not None and not all(isinstance(message, Message) for message in self.messages):
            raise ParameterError("messages must be Message values", hint="for example [Message.user('Hello')]")
        if self.response_format is not None and not isinstance(self.response_format, Grammar):
            raise ParameterError("response_format must be a Grammar", hint="for example Grammar.json_schema({...})")
        if self.messages == ():
            raise ParameterError("there are no messages to answer")
        if self.context_policy is not None and self.context_policy not in CONTEXT_POLICIES:
            raise ParameterError(f"context_policy must be {' or '.join(CONTEXT_POLICIES)}, not {self.context_policy!r}")
        if not isinstance(self.cache, bool) or not isinstance(self.namespace, str):
            raise ParameterError("cache must be True or False, and namespace a str")

    @classmethod
    def chat(
        cls, messages: Iterable[Message], params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> Self:
        """Answer a conversation."""
        return cls(messages=tuple(messages), params=params or SamplingParams(), **options)

    @classmethod
    def completion(cls, text: str, params: SamplingParams | None = None, **options: Unpack[RequestOptions]) -> Self:
        """Continue a text, without a template."""
        return cls(text=text, params=params or SamplingParams(), **options)
