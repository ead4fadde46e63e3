"""HttpAnswering: the stream of one answer from a server, and what the status of its replies means."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from edge_llm.errors import EdgeLLMError, InputError, RuntimeFailure
from edge_llm.messages import Event
from edge_llm_chat.conversation import whole
from edge_llm_chat.http_events import ChunkReader, json_object, server_events

if TYPE_CHECKING:
    import httpx


class HttpAnswering:
    """One streamed completion, as events."""

    def __init__(
        self, client: httpx.AsyncClient, path: str, body: dict[str, Any], afterwards: Callable[[str], Awaitable[object]]
    ) -> None:
        """What POST `path` streams; `afterwards` is awaited between the last word and the end, with the name
        of the model that has answered."""
        self._client, self._path, self._body, self._afterwards = client, path, body, afterwards
        self._task: asyncio.Task[Any] | None = None
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True
        if self._task is not None:
            self._task.cancel()

    def __aiter__(self) -> AsyncIterator[Event]:
        return self._events()

    async def _events(self) -> AsyncIterator[Event]:
        queue: asyncio.Queue[Event | EdgeLLMError | None] = asyncio.Queue()
        told = ChunkReader(self._body.get("seed"))
        # the stream is read by a task of its own, so that a cancel interrupts any wait for the server
        self._task = asyncio.get_running_loop().create_task(self._pump(queue, told))
        if self._cancelled:
            self._task.cancel()
        try:
            while (item := await queue.get()) is not None:
                if isinstance(item, EdgeLLMError):
                    raise item
                yield item
            yield told.finished(cancelled=self._cancelled)
        finally:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _pump(self, queue: asyncio.Queue[Event | EdgeLLMError | None], told: ChunkReader) -> None:
        import httpx

        try:
            async with self._client.stream("POST", self._path, json=self._body) as response:
                if response.status_code != 200:
                    checked(response.status_code, await response.aread(), response.headers)
                async for data in server_events(response):
                    for event in told.take(data):
                        queue.put_nowait(event)
            await self._afterwards(told.model or self._body["model"])
        except httpx.HTTPError as error:
            if not self._cancelled:
                queue.put_nowait(unreachable("the server", error))
        except EdgeLLMError as error:
            queue.put_nowait(error)
        finally:
            queue.put_nowait(None)


def checked(status: int, content: bytes, headers: Mapping[str, str]) -> dict[str, Any]:
    """The JSON object of a response. Raises what its status means."""
    if status == 200:
        return json_object(content.decode("utf-8", "replace"))
    try:
        fault = json.loads(content)["error"]
        fault = fault if isinstance(fault, str) else fault["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        fault = f"the server answered with status {status}"
    text = whole(str(fault))[:500]
    if status == 401:
        raise InputError(text, hint="give the server's key in OPENAI_API_KEY")
    if status in (429, 503):
        wait = headers.get("retry-after")
        raise RuntimeFailure(text, hint=f"try again in {wait} s" if wait else "try again later")
    raise (InputError if 400 <= status < 500 else RuntimeFailure)(text)


def unreachable(name: str, error: Exception) -> RuntimeFailure:
    return RuntimeFailure(
        f"{name} cannot be reached: {str(error) or type(error).__name__}", hint="is the server running?"
    )
