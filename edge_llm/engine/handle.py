"""Handle: the reader's end of one request, for threads and for asyncio."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

from edge_llm.errors import EdgeLLMError
from edge_llm.messages import Event, Finished, TextDelta


class Mailbox:
    """Events on their way from the engine to one reader.

    Not bounded: an answer is bounded by its context, and a slow reader must never stop the step that others wait for.
    """

    def __init__(self) -> None:
        self._items: deque[Event | EdgeLLMError] = deque()
        self._ready = threading.Condition()
        self._wake: Callable[[], None] | None = None

    def put(self, item: Event | EdgeLLMError) -> None:
        """Add an event; any thread."""
        with self._ready:
            self._items.append(item)
            self._ready.notify()
            wake, self._wake = self._wake, None
        if wake is not None:
            wake()

    def get(self) -> Event | EdgeLLMError:
        """The next event, waiting for it."""
        with self._ready:
            while not self._items:
                self._ready.wait()
            return self._items.popleft()

    async def get_async(self) -> Event | EdgeLLMError:
        """As `get`, for a task of a running event loop. A task that is cancelled while it waits loses no event."""
        import asyncio

        while True:
            with self._ready:
                if self._items:
                    return self._items.popleft()
                loop = asyncio.get_running_loop()
                arrived = loop.create_future()
                self._wake = partial(_wake, loop, arrived)
            await arrived


def _wake(loop: Any, arrived: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the loop was closed: nobody reads any more
        loop.call_soon_threadsafe(_resolve, arrived)


def _resolve(arrived: Any) -> None:
    if not arrived.done():
        arrived.set_result(None)


class Handle(Iterator[Event], AsyncIterator[Event]):
    """Events of one request, for one reader: `for event in handle` or `async for event in handle`.

    The last event is `Finished`, also after `cancel`. A request that fails raises its `EdgeLLMError` instead. A handle
    that nobody holds any more cancels its request.
    """

    def __init__(self, mailbox: Mailbox, cancel: Callable[[], None], owner: object = None) -> None:
        """`cancel` asks the engine to end the request; `owner` is kept alive until the request is over."""
        self._mailbox = mailbox
        self._cancel: Callable[[], None] | None = cancel
        self._owner = owner
        self.finished: Finished | None = None
        """the last event, once it was read"""

    def __iter__(self) -> Handle:
        return self

    def __next__(self) -> Event:
        if self._cancel is None:
            raise StopIteration
        return self._read(self._mailbox.get())

    def __aiter__(self) -> Handle:
        return self

    async def __anext__(self) -> Event:
        if self._cancel is None:
            raise StopAsyncIteration
        return self._read(await self._mailbox.get_async())

    def cancel(self) -> None:
        """End the request within a step; what was said stays readable. Any thread; does nothing once it is over."""
        if self._cancel is not None:
            self._cancel()

    close = cancel  # as a generator's: for contextlib.closing

    def text(self) -> str:
        """The rest of the answer's text, read to its end. Raises the request's error."""
        return "".join(event.text for event in self if isinstance(event, TextDelta))

    def result(self) -> Finished:
        """The last event, read up to it. Raises the request's error."""
        for _ in self:
            pass
        assert self.finished is not None, "an answer ends with Finished or an error"
        return self.finished

    def __del__(self) -> None:
        self.cancel()

    def _read(self, item: Event | EdgeLLMError) -> Event:
        if isinstance(item, EdgeLLMError | Finished):
            self._cancel = self._owner = None
        if isinstance(item, EdgeLLMError):
            raise item
        if isinstance(item, Finished):
            self.finished = item
        return item
