"""Generate: the reply to a request for answers, whole or as a stream of server-sent events.

Everything that can be wrong with the request is said before the first byte. Whatever way it ends, by the last word, an error
or a client that is gone, its requests end within a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any

from starlette.responses import Response

from edge_llm.engine.handle import Handle
from edge_llm.engine.info import EngineInfo
from edge_llm.engine.request import Request
from edge_llm.errors import EdgeLLMError
from edge_llm.messages import Event, Finished, FinishReason
from edge_llm_server.answer import Answer
from edge_llm_server.api_error import ApiError
from edge_llm_server.engines import Engines
from edge_llm_server.exchange import STATE, Exchange
from edge_llm_server.security import Receive, Send
from edge_llm_server.shape import Shape
from edge_llm_server.translate import parameter_of


class Generate(Response):
    """A response that asks the engine and tells what it says."""

    background = None

    def __init__(  # not Response's: nothing of it is known yet
        self,
        engines: Engines,
        model: str,
        requests: Sequence[Request],
        shape: Callable[[EngineInfo], Shape],
        *,
        param: str,
        stream: bool,
    ) -> None:
        """`param` is the field of the body that a prompt which is too long came from."""
        self._engines, self._model, self._requests, self._shape = engines, model, requests, shape
        self._param, self._stream, self._ping_s = param, stream, engines.ping_s

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        exchange: Exchange = scope[STATE]
        async with self._engines.use(self._model, requests=len(self._requests)) as client:
            exchange.model = client.info.name
            try:
                handles = await self._engines.submit(client, self._requests)
            except EdgeLLMError as error:
                raise ApiError.of(error, parameter_of(error) or self._param) from None
            answers = [Answer() for _ in handles]
            try:
                async with _watched(receive, handles) as gone:
                    told = self._told(handles, answers, gone)
                    tell = self._tell_pieces if self._stream else self._tell_whole
                    await tell(self._shape(client.info), answers, told, send)
            finally:
                self._engines.forget(handles)
                _count(exchange, answers)

    async def _told(
        self, handles: Sequence[Handle], answers: Sequence[Answer], gone: asyncio.Event
    ) -> AsyncIterator[tuple[int, Event] | None]:
        """All events with the index of their answer, gathered into `answers`; None where nothing was said for long.

        Raises `ApiError` for an answer that fails, or that somebody other than the client ended.
        """
        events = _of_one(handles[0], self._ping_s) if len(handles) == 1 else _of_many(handles, self._ping_s)
        try:
            async for item in events:
                if item is None:
                    yield None
                    continue
                index, event = item
                answers[index].add(event)
                if isinstance(event, Finished) and not gone.is_set():
                    _check_end(event)
                yield item
        except EdgeLLMError as error:
            raise ApiError.of(error, self._param) from None
        finally:
            await events.aclose()

    async def _tell_whole(self, shape: Shape, answers: Sequence[Answer], told: AsyncIterator[Any], send: Send) -> None:
        async for _ in told:
            pass
        content = json.dumps(shape.whole(answers)).encode("ascii")
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode("ascii"))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async def _tell_pieces(
        self,
        shape: Shape,
        answers: Sequence[Answer],
        told: AsyncIterator[tuple[int, Event] | None],
        send: Send,
    ) -> None:
        encoder = shape.stream()

        async def say(text: str) -> None:
            if text:
                await send({"type": "http.response.body", "body": text.encode(), "more_body": True})

        headers = [(b"content-type", encoder.media_type.encode("ascii")), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await say("".join(encoder.opening(index) for index in range(len(answers))))
        try:
            async for item in told:
                if item is None:
                    await say(encoder.ping())
                    continue
                index, event = item
                text = encoder.event(index, event)
                if isinstance(event, Finished):
                    text += encoder.ending(index, answers[index])
                await say(text)
            await say(encoder.closing(answers))
        except ApiError as error:
            await say(encoder.error(error))
        await send({"type": "http.response.body", "body": b""})


def _check_end(end: Finished) -> None:
    """Raises `ApiError` where the client is owed an answer that it did not get."""
    if end.reason is FinishReason.CANCELLED:
        raise ApiError.unavailable("the server is stopping", 5.0)
    if end.reason is FinishReason.TIMEOUT and not end.usage.completion_tokens:
        raise ApiError.unavailable("the time of the request was up before its answer began", 5.0)


@contextlib.asynccontextmanager
async def _watched(receive: Receive, handles: Sequence[Handle]) -> AsyncIterator[asyncio.Event]:
    """Ends the requests as soon as the client is gone; gives an event that is set then."""
    gone = asyncio.Event()

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        gone.set()
        for handle in handles:
            handle.cancel()

    watching = asyncio.create_task(watch())
    try:
        yield gone
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching


async def _of_one(handle: Handle, ping_s: float) -> AsyncGenerator[tuple[int, Event] | None]:
    while True:
        try:
            async with asyncio.timeout(ping_s):
                event = await anext(handle)
        except TimeoutError:
            yield None
            continue
        except StopAsyncIteration:
            return
        yield 0, event


async def _of_many(handles: Sequence[Handle], ping_s: float) -> AsyncGenerator[tuple[int, Event] | None]:
    arrived: asyncio.Queue[tuple[int, Event | EdgeLLMError]] = asyncio.Queue()

    async def pass_on(index: int, handle: Handle) -> None:
        try:
            async for event in handle:
                arrived.put_nowait((index, event))
        except EdgeLLMError as error:
            arrived.put_nowait((index, error))

    tasks = [asyncio.create_task(pass_on(index, handle)) for index, handle in enumerate(handles)]
    left = len(handles)
    try:
        while left:
            try:
                async with asyncio.timeout(ping_s):
                    index, event = await arrived.get()
            except TimeoutError:
                yield None
                continue
            if isinstance(event, EdgeLLMError):
                raise event
            left -= isinstance(event, Finished)
            yield index, event
    finally:
        for task in tasks:
            task.cancel()


def _count(exchange: Exchange, answers: Sequence[Answer]) -> None:
    for answer in answers:
        if answer.finished is not None:
            used = answer.finished.usage
            exchange.count(
                prompt_tokens=used.prompt_tokens,
                cached_tokens=used.cached_tokens,
                completion_tokens=used.completion_tokens,
            )
