"""A backend that answers by script, and what tests of the chat share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from edge_llm_chat.backend import Ask, ModelChoice, ModelInfo, Progress

from edge_llm.errors import EdgeLLMError
from edge_llm.messages import (
    Event,
    Finished,
    FinishReason,
    Message,
    PromptProgress,
    ReasoningDelta,
    TextDelta,
    Timings,
    TokenInfo,
    TokenLogprob,
    Usage,
)

DIGEST = "d" * 16


def token(text: str, logprob: float = -0.1) -> TokenLogprob:
    data = text.encode("utf-8", "replace")
    return TokenLogprob(sum(data), data, logprob)


def info(text: str, *others: tuple[str, float], logprob: float = -0.1) -> TokenInfo:
    """The token of `text` and its alternatives, itself among them."""
    chosen = token(text, logprob)
    ranked = sorted([chosen, *(token(*other) for other in others)], key=lambda one: -one.logprob)
    return TokenInfo(chosen, tuple(ranked))


def words(text: str) -> list[str]:
    """The text in pieces that begin with a space."""
    pieces = text.split(" ")
    return [pieces[0], *(f" {piece}" for piece in pieces[1:])]


class FakeAnswering:
    """The script of one answer, released event by event: at once, or each by `step`."""

    def __init__(self, events: Sequence[Event | EdgeLLMError], *, held: bool = False) -> None:
        self._events = list(events)
        self._released = asyncio.Semaphore(0)
        self._held = held
        self.cancelled = 0
        self._said = 0

    def step(self, events: int = 1) -> None:
        for _ in range(events):
            self._released.release()

    def release(self) -> None:
        self._held = False
        self._released.release()

    def cancel(self) -> None:
        self.cancelled += 1
        self._released.release()

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        if self._held and not self.cancelled:
            await self._released.acquire()
        else:
            await asyncio.sleep(0)
        if self.cancelled and self._events:
            self._events = []
            return finished(FinishReason.CANCELLED, self._said)
        if not self._events:
            raise StopAsyncIteration
        event = self._events.pop(0)
        if isinstance(event, EdgeLLMError):
            raise event
        self._said += isinstance(event, TextDelta)
        return event


def finished(reason: FinishReason = FinishReason.STOP, tokens: int = 3, **more: object) -> Finished:
    timings = Timings(queue_s=0.0, ttft_s=0.041, total_s=0.5, decode_tokens_per_s=96.0, tpot_s=1 / 96)
    usage = Usage(prompt_tokens=40, completion_tokens=tokens, cached_tokens=30)
    return Finished(reason, usage, timings, seed=7, token_ids=tuple(range(tokens)), **more)  # type: ignore[arg-type]


def answer_of(text: str | Sequence[str], *, reasoning: str = "", **more: object) -> list[Event]:
    """The events of an answer that says `text` word by word, or in these pieces."""
    pieces = words(text) if isinstance(text, str) else list(text)
    thoughts = [ReasoningDelta(piece) for piece in words(reasoning)] if reasoning else []
    said = [TextDelta(piece, (info(piece, (" other", -2.0)),)) for piece in pieces]
    return [PromptProgress(40, 40), *thoughts, *said, finished(tokens=len(pieces), **more)]


class FakeBackend:
    """Gives the scripts in `answers` in turn, the last for ever; `asked` keeps what was asked."""

    def __init__(
        self,
        *answers: Sequence[Event | EdgeLLMError] | str,
        held: bool = False,
        name: str = "fake-1b",
        context: int | None = 8192,
        load: Callable[[Progress], EdgeLLMError | None] | None = None,
        loading: asyncio.Event | None = None,
        notice: str = "",
    ) -> None:
        """With `held`, an answer's events come by `step` only; the model is there once `loading` is set."""
        self.wanted = name
        self._answers = [answer_of(answer) if isinstance(answer, str) else answer for answer in answers or ("Hello.",)]
        self._held, self._load, self._loading = held, load, loading
        self._context, self.told = context, notice
        self.asked: list[Ask] = []
        self.answers: list[FakeAnswering] = []
        self.closed = False

    async def load(self, progress: Progress) -> ModelInfo:
        progress("loading", 1, 4)
        if self._loading is not None:
            await self._loading.wait()
        if self._load is not None and (error := self._load(progress)) is not None:
            raise error
        return ModelInfo(self.wanted, self._context, DIGEST, inspects=True, forks=True)

    async def answer(self, ask: Ask) -> FakeAnswering:
        self.asked.append(ask)
        script = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if len(script) == 1 and isinstance(script[0], EdgeLLMError):
            raise script[0]
        self.answers.append(FakeAnswering(script, held=self._held))
        return self.answers[-1]

    async def models(self) -> list[ModelChoice]:
        return [ModelChoice(self.wanted, "here", 100), ModelChoice("other-2b", "200 MB to download", 200)]

    async def count(self, messages: tuple[Message, ...]) -> int | None:
        return sum(len(message.content.split()) + 4 for message in messages)

    def notice(self) -> str:
        return self.told

    def kv_bytes(self) -> int | None:
        return 4_800_000

    async def close(self) -> None:
        self.closed = True
