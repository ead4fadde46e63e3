"""TaskPool: tasks that were read ahead, given out so that prompts that begin alike come one after the other."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from functools import partial

from edge_llm_batch.task import Task

MAX_TASKS = 1024
MAX_BYTES = 8 << 20


def _place(task: Task) -> tuple[str, int]:
    return task.key, task.line.number


class TaskPool:
    """Filled by one thread, emptied by the tasks of an event loop; never holds more than it may.

    Tasks go out in the order of their keys from the last one onwards, then from the first again.
    """

    def __init__(self, *, max_tasks: int = MAX_TASKS, max_bytes: int = MAX_BYTES) -> None:
        self._max_tasks, self._max_bytes = max_tasks, max_bytes
        self._changed = threading.Condition()
        self._tasks: list[Task] = []
        self._bytes = 0
        self._last = ("", 0)
        self._ended = False
        self._failure: BaseException | None = None
        self._waiting: list[Callable[[], object]] = []

    def fill(self, tasks: Iterable[Task]) -> None:
        """Take tasks until their end, or until the pool is closed; what goes wrong is told to who empties it."""
        failure = None
        try:
            for task in tasks:
                if not self._put(task):
                    break
        except BaseException as error:
            failure = error
        with self._changed:
            self._failure = failure
            self._ended = True
            self._wake()

    async def get(self) -> Task | None:
        """The next task, waiting for it; None after the last. Raises what went wrong while the pool was filled."""
        while True:
            with self._changed:
                if self._tasks:
                    return self._take()
                if self._failure is not None:
                    raise self._failure
                if self._ended:
                    return None
                loop = asyncio.get_running_loop()
                arrived = loop.create_future()
                self._waiting.append(partial(loop.call_soon_threadsafe, _resolve, arrived))
            await arrived

    def close(self) -> None:
        """Take nothing more."""
        with self._changed:
            self._ended = True
            self._wake()

    def empty(self) -> None:
        """Take nothing more, and give out nothing more."""
        with self._changed:
            self._tasks.clear()
            self._bytes = 0
            self._ended = True
            self._wake()

    def _put(self, task: Task) -> bool:
        with self._changed:
            while not self._ended and self._tasks and not self._fits(task):
                self._changed.wait()
            if self._ended:
                return False
            insort(self._tasks, task, key=_place)
            self._bytes += task.size
            self._wake()
        return True

    def _fits(self, task: Task) -> bool:
        return len(self._tasks) < self._max_tasks and self._bytes + task.size <= self._max_bytes

    def _take(self) -> Task:
        index = bisect_left(self._tasks, self._last, key=_place)
        task = self._tasks.pop(index if index < len(self._tasks) else 0)
        self._last = _place(task)
        self._bytes -= task.size
        self._changed.notify_all()
        return task

    def _wake(self) -> None:
        self._changed.notify_all()
        waiting, self._waiting = self._waiting, []
        for wake in waiting:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
                wake()


def _resolve(arrived: asyncio.Future[None]) -> None:
    if not arrived.done():
        arrived.set_result(None)
