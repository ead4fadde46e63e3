"""Handle: the reader's end of one request, for threads and for asyncio."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NamedTuple

from edge_llm.errors import EdgeLLMError
from edge_llm.messages import Event, Finished, TextDelta


class Mailbox:
    """Events on their way from the engine to one reader.

    Not bounded: an answer is bounded by its context, and a slow reader must never stop the step that others wait for.
    """

    def __init__(self) -> None:
        self._items: deque[Event | EdgeLLMError] = deque()
        self._ready = threading.Condition()
        self._waiting: _Waiting | None = None

    def put(self, item: Event | EdgeLLMError, wakes: Wakes | None = None) -> None:
        """Add an event; any thread. A task that waits for it is woken at once, or with the others of `wakes`."""
        with self._ready:
            self._items.append(item)
            self._ready.notify()
            waiting, self._waiting = self._waiting, None
        if waiting is not None:
            if wakes is not None:
                wakes.add(waiting)
            else:
                _wake(waiting.loop, [waiting.arrived])

    def get(self) -> Event | EdgeLLMError:
        """The next event, waiting for it."""
        with self._ready:
            while not self._items:
                self._ready.wait()
            return self._items.popleft()

    async def get_async(self, most: int = 1) -> list[Event | EdgeLLMError]:
        """As `get`, for a task of a running event loop: what is there, at least one event and at most so many. A task that
        is cancelled while it waits loses none."""
        import asyncio

        while True:
            with self._ready:
                if self._items:
                    return [self._items.popleft() for _ in range(min(most, len(self._items)))]
                loop = asyncio.get_running_loop()
                arrived = loop.create_future()
                self._waiting = _Waiting(loop, arrived)
            await arrived


class _Waiting(NamedTuple):
    """A task that waits: its event loop, and the future that lets it go on."""

    loop: Any
    arrived: Any


class Wakes:
    """Tasks that have something to read, to be woken together: to wake an event loop costs more than to read an event."""

    def __init__(self) -> None:
        self._arrived: dict[Any, list[Any]] = {}

    def add(self, waiting: _Waiting) -> None:
        self._arrived.setdefault(waiting.loop, []).append(waiting.arrived)

    def send(self) -> None:
        """Wake them; once."""
        for loop, arrived in self._arrived.items():
            _wake(loop, arrived)


def _wake(loop: Any, arrived: list[Any]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop was closed: nobody reads any more
        loop.call_soon_threadsafe(_resolve, arrived)


def _resolve(arrived: list[Any]) -> None:
    for one in arrived:
        if not one.done():
            one.set_result(None)


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
        self._failure: EdgeLLMError | None = None
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
        (item,) = await self._mailbox.get_async()
        return self._read(item)

    async def some(self, most: int) -> list[Event]:
        """The events that are there, waiting for one and at most so many; none after the last. Raises the request's error
        once those before it were read."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            return [self._read(failure)]
        if self._cancel is None:
            return []
        *items, last = await self._mailbox.get_async(most)
        events = [self._read(item) for item in items]
        if events and isinstance(last, EdgeLLMError):
            self._failure = last
            return events
        return [*events, self._read(last)]

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
