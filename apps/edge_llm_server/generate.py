"""Generate: the reply to a request for answers, whole or as a stream of server-sent events.

Everything that can be wrong with the request is said before the first byte. Whatever way it ends, by the last word, an error
or a client that is gone, its requests end within a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any, cast

from starlette.responses import Response

from edge_llm.engine.client import EngineClient
from edge_llm.engine.handle import Handle
from edge_llm.engine.info import EngineInfo
from edge_llm.engine.request import Request
from edge_llm.errors import EdgeLLMError, QueueFullError
from edge_llm.messages import Event, Finished, FinishReason
from edge_llm_server.answer import Answer
from edge_llm_server.api_error import ApiError
from edge_llm_server.engines import Engines
from edge_llm_server.exchange import STATE, Exchange, place_of
from edge_llm_server.fields import NO_NAMES, Names, refusal
from edge_llm_server.security import Receive, Send
from edge_llm_server.shape import Encoder, Shape, StreamShape

_EVENTS_A_TURN = 8
_Batch = list[tuple[int, Event]]
"""events with the index of their answer"""


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
        names: Names = NO_NAMES,
    ) -> None:
        """`param` is the field of the body that a prompt which is too long came from, `names` what the client calls others;
        to `stream` takes a `StreamShape`."""
        self._engines, self._model, self._requests, self._shape = engines, model, requests, shape
        self._param, self._stream, self._names = param, stream, names

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        exchange: Exchange = scope[STATE]
        answers = [Answer() for _ in self._requests]
        engine = self._engines.use(
            self._model,
            exchange.key,
            answers=len(self._requests),
            together=self._stream,
            in_background=all(request.priority == "batch" for request in self._requests),
        )
        async with _listener(receive, self._engines) as listener, engine as client:
            exchange.model = client.info.name
            shape = self._shape(client.info)
            try:
                if self._stream:
                    await self._tell_pieces(cast("StreamShape", shape), client, answers, listener, send, exchange)
                else:
                    await self._gather(client, answers, listener)
                    await _tell_whole(shape.whole(answers), send)
            finally:
                _count(exchange, answers)

    async def _submit(self, client: EngineClient, requests: Sequence[Request], listener: _Listener) -> list[Handle]:
        try:
            handles = await self._engines.submit(client, requests, wanted=lambda: not listener.gone)
        except QueueFullError:
            raise
        except EdgeLLMError as error:
            raise refusal(error, self._param, self._names) from None
        listener.add(handles)
        return handles

    async def _gather(self, client: EngineClient, answers: Sequence[Answer], listener: _Listener) -> None:
        """All answers, no more at a time than the engine has slots. Raises `ApiError` for the first that fails."""
        room = asyncio.Semaphore(client.info.slots)
        tasks = [
            asyncio.create_task(self._read(client, request, answer, listener, room))
            for request, answer in zip(self._requests, answers, strict=True)
        ]
        try:
            await asyncio.gather(*tasks)
        except EdgeLLMError as error:
            raise ApiError.of(error, self._param) from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(
        self, client: EngineClient, request: Request, answer: Answer, listener: _Listener, room: asyncio.Semaphore
    ) -> None:
        async with room:
            while True:
                try:
                    (handle,) = await self._submit(client, [request], listener)
                    break
                except QueueFullError as error:
                    if not listener.begun or listener.gone:
                        raise
                    await asyncio.sleep(error.retry_after_s)  # the others of this request are in it already
            async for event in handle:
                answer.add(event)
            if not listener.gone:
                _check_end(answer.end)

    async def _tell_pieces(
        self,
        shape: StreamShape,
        client: EngineClient,
        answers: Sequence[Answer],
        listener: _Listener,
        send: Send,
        exchange: Exchange,
    ) -> None:
        encoder = shape.stream()
        try:
            handles = await self._submit(client, self._requests, listener)
        except QueueFullError as error:
            raise ApiError.of(error) from None
        headers = [(b"content-type", encoder.media_type.encode("ascii")), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        voice = _Voice(send)
        await voice.say("".join(encoder.opening(index) for index in range(len(answers))))
        try:
            async with (
                voice.kept_alive(encoder.ping(), self._engines.ping_s),
                contextlib.aclosing(_events(handles)) as batches,
            ):
                async for batch in batches:
                    await _tell(batch, encoder, answers, listener, voice)
            last = encoder.closing(answers)
        except (ApiError, EdgeLLMError) as error:
            exchange.fault = place_of(error)  # what has begun with a 200 has no status that says so
            told = error if isinstance(error, ApiError) else ApiError.of(error, self._param)
            last = encoder.error(told)
        await send({"type": "http.response.body", "body": last.encode()})


async def _tell(batch: _Batch, encoder: Encoder, answers: Sequence[Answer], listener: _Listener, voice: _Voice) -> None:
    """Say events in one piece. Raises `ApiError` for an answer that somebody other than the client ended."""
    text = ""
    try:
        for index, event in batch:
            answers[index].add(event)
            last = isinstance(event, Finished)
            if last and not listener.gone:
                _check_end(answers[index].end)
            text += encoder.event(index, event)
            if last:
                text += encoder.ending(index, answers[index])
    finally:
        await voice.say(text)


class _Voice:
    """The pieces of a stream on their way."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._time = asyncio.get_running_loop().time
        self._last = self._time()

    async def say(self, text: str) -> None:
        if text:
            self._last = self._time()
            await self._send({"type": "http.response.body", "body": text.encode(), "more_body": True})

    @contextlib.asynccontextmanager
    async def kept_alive(self, ping: str, ping_s: float) -> AsyncIterator[None]:
        """Says `ping` wherever nothing was said for `ping_s` within the block."""

        async def keep() -> None:
            while True:
                left_s = self._last + ping_s - self._time()
                if left_s <= 0:
                    await self.say(ping)
                else:
                    await asyncio.sleep(left_s)

        keeping = asyncio.create_task(keep())
        try:
            yield
        finally:
            keeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeping


async def _tell_whole(content: dict[str, Any], send: Send) -> None:
    data = json.dumps(content).encode("ascii")
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode("ascii"))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": data})


class _Listener:
    """Hears when the client is gone, and then ends its requests."""

    def __init__(self) -> None:
        self.handles: list[Handle] = []
        self.gone = False

    @property
    def begun(self) -> bool:
        """Whether the engine has taken any of them."""
        return bool(self.handles)

    def add(self, handles: Sequence[Handle]) -> None:
        self.handles.extend(handles)
        if self.gone:
            self.leave()

    def leave(self) -> None:
        self.gone = True
        for handle in self.handles:
            handle.cancel()


@contextlib.asynccontextmanager
async def _listener(receive: Receive, engines: Engines) -> AsyncIterator[_Listener]:
    """For the time of a reply, after which all of its requests end."""
    listener = _Listener()

    async def listen() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        listener.leave()

    listening = asyncio.create_task(listen())
    try:
        yield listener
    finally:
        listening.cancel()
        engines.forget(listener.handles)
        with contextlib.suppress(asyncio.CancelledError):
            await listening


def _check_end(end: Finished) -> None:
    """Raises `ApiError` where the client is owed an answer that it did not get."""
    if end.reason is FinishReason.CANCELLED:
        raise ApiError.unavailable("the server is stopping", 5.0)
    if end.reason is FinishReason.TIMEOUT and not end.usage.completion_tokens:
        raise ApiError.unavailable("the time of the request was up before its answer began", 5.0)


async def _events(handles: Sequence[Handle]) -> AsyncGenerator[_Batch]:
    """All events, as many at a time as are there. Raises the error of the first answer that fails."""
    batches = _of_one(handles[0]) if len(handles) == 1 else _of_many(handles)
    told = 0
    async with contextlib.aclosing(batches):
        async for batch in batches:
            yield batch
            told += len(batch)
            if told >= _EVENTS_A_TURN:
                told = 0
                await asyncio.sleep(0)  # events that are all there already would keep the loop from everybody else


async def _of_one(handle: Handle) -> AsyncGenerator[_Batch]:
    while events := await handle.some(_EVENTS_A_TURN):
        yield [(0, event) for event in events]


async def _of_many(handles: Sequence[Handle]) -> AsyncGenerator[_Batch]:
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
            index, event = await arrived.get()
            if isinstance(event, EdgeLLMError):
                raise event
            left -= isinstance(event, Finished)
            yield [(index, event)]
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
