"""ChatBackend: where answers come from. The screens know nothing else of models."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from edge_llm.messages import Event, Message, TokenLogprob, Tool
from edge_llm.sampling.params import SamplingParams

Progress = Callable[[str, int, int], None]
"""called with (what is going on, done, total), from any thread"""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is known of the model that answers."""

    name: str
    context: int | None = None
    """tokens that it sees at once; None: unknown"""
    tokenizer_digest: str | None = None
    inspects: bool = False
    """it tells the alternatives of each token"""
    forks: bool = False
    """it can go on from a chosen beginning of an answer"""
    end_ids: frozenset[int] = frozenset()
    """tokens that end an answer"""


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """A model that could be loaded; `detail` says what it would take."""

    name: str
    detail: str = ""
    weights: int = 0
    """bytes that a token's computation reads; 0: unknown"""


@dataclass(frozen=True, slots=True)
class Ask:
    """A conversation to answer. The answer begins with `prefix`, if there is one, and goes on from there."""

    messages: tuple[Message, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    prefix: tuple[TokenLogprob, ...] = ()
    tools: tuple[Tool, ...] = ()
    """what the model may ask to run"""
    tool_choice: str = "auto"
    """or `none`: answer in words"""


class Answering(AsyncIterable[Event], Protocol):
    """Events of one answer, `Finished` last; raises `EdgeLLMError`. A `Handle` of the engine is one."""

    def cancel(self) -> None:
        """End within a step; what was said is kept, and `Finished` still comes. Any thread, any number of times."""
        ...


class ChatBackend(Protocol):
    """A model to talk with. `load` comes first, once; everything is called from the event loop."""

    @property
    def wanted(self) -> str:
        """What the user asked for: a model's name or a server's address, to show before it is loaded."""
        ...

    async def load(self, progress: Progress) -> ModelInfo:
        """Make ready to answer. Raises `EdgeLLMError`."""
        ...

    async def answer(self, ask: Ask) -> Answering:
        """Start an answer. Raises what `EngineClient.submit` raises. With a prefix, the events tell only what follows it."""
        ...

    async def models(self) -> list[ModelChoice]:
        """What could be loaded instead."""
        ...

    async def count(self, messages: tuple[Message, ...]) -> int | None:
        """Tokens that these messages are to the model; None if that is not known."""
        ...

    def notice(self) -> str:
        """One sentence that the user should know of the model that answers now, as after a fallback; empty: nothing."""
        ...

    def kv_bytes(self) -> int | None:
        """Bytes of keys and values that are held; None if that is not known."""
        ...

    async def close(self) -> None:
        """Stop everything, also a loading that goes on. Idempotent; takes two seconds at most."""
        ...
