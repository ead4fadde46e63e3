"""Answer: one answer while it comes, from a backend's events to a turn and to what a screen wants to show of it."""

from __future__ import annotations

import codecs
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from edge_llm.errors import EdgeLLMError, GenerationError
from edge_llm.messages import (
    Event,
    Finished,
    PromptProgress,
    ReasoningDelta,
    TextDelta,
    TokenInfo,
    TokenLogprob,
    ToolCallDelta,
)
from edge_llm_chat.backend import Answering, Ask, ChatBackend

BUCKET_S = 0.25
BUCKETS = 16


class Speed:
    """Tokens a second over the last few seconds, for a line of little bars."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = clock()
        self._buckets: deque[tuple[int, int]] = deque(maxlen=BUCKETS)  # (number of the bucket, tokens)
        self.tokens = 0

    def count(self, tokens: int) -> None:
        self.tokens += tokens
        number = int((self._clock() - self._started) / BUCKET_S)
        if self._buckets and self._buckets[-1][0] == number:
            tokens += self._buckets.pop()[1]
        self._buckets.append((number, tokens))

    def rates(self) -> tuple[float, ...]:
        """Of each complete bucket, oldest first."""
        if len(self._buckets) < 2:
            return ()
        counts = dict(list(self._buckets)[:-1])
        first, last = min(counts), max(counts)
        return tuple(counts.get(number, 0) / BUCKET_S for number in range(max(first, last - BUCKETS + 1), last + 1))


@dataclass
class Answer:
    """`run` reads the events; `changed` is called after each. Text and reasoning that were not taken yet wait in `pending`."""

    changed: Callable[[], None] = lambda: None
    text: str = ""
    reasoning: str = ""
    tokens: list[TokenInfo] = field(default_factory=list)
    progress: PromptProgress | None = None
    finished: Finished | None = None
    error: EdgeLLMError | None = None
    calling: str = ""
    """the tool whose call is being written"""
    stopping: bool = False
    speed: Speed = field(default_factory=Speed)
    _source: Answering | None = None
    _taken: int = 0
    _taken_reasoning: int = 0

    async def run(self, backend: ChatBackend, ask: Ask) -> None:
        """Until the answer's end; an error becomes `error`."""
        joined = _Joined(ask.prefix) if ask.prefix else None
        try:
            self._source = await backend.answer(ask)
            if self.stopping:
                self._source.cancel()
            async for event in self._source:
                self._take(event, joined)
                self.changed()
        except EdgeLLMError as error:
            self.error = error
        except Exception as error:  # a fault of ours or of a server's answer: it ends this answer, not the chat
            self.error = GenerationError(f"the answer failed: {error!r}")
        finally:
            if self._source is not None and self.finished is None:
                self._source.cancel()

    def stop(self) -> None:
        """End it as soon as possible, also before it has begun."""
        self.stopping = True
        if self._source is not None:
            self._source.cancel()

    def pending(self) -> tuple[str, str]:
        """Text and reasoning since the last call."""
        text, reasoning = self.text[self._taken :], self.reasoning[self._taken_reasoning :]
        self._taken, self._taken_reasoning = len(self.text), len(self.reasoning)
        return text, reasoning

    def _take(self, event: Event, joined: _Joined | None) -> None:
        match event:
            case PromptProgress():
                self.progress = event
            case TextDelta(text=text, tokens=tokens):
                self.tokens += tokens
                self.text += text if joined is None else joined.feed(tokens)
                self.speed.count(len(tokens) or 1)
            case ReasoningDelta(text=text):
                self.reasoning += text
                self.speed.count(1)
            case ToolCallDelta(name=name):
                self.calling = name or self.calling
                self.speed.count(1)
            case Finished():
                self.finished = event


class _Joined:
    """The text of an answer that goes on from given tokens: made of bytes, so that a character cut in two is whole again."""

    def __init__(self, prefix: tuple[TokenLogprob, ...]) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in prefix:
            self._decoder.decode(token.data)

    def feed(self, tokens: tuple[TokenInfo, ...]) -> str:
        return "".join(self._decoder.decode(token.chosen.data) for token in tokens)


def text_of(tokens: tuple[TokenLogprob, ...]) -> str:
    """The whole characters of these tokens."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return "".join(decoder.decode(token.data) for token in tokens)
