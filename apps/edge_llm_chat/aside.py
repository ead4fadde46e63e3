"""aside(function): its result, from a thread that the end of the program does not wait for."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def aside(function: Callable[[], T]) -> T:
    """As `asyncio.to_thread`, whose threads are joined at the end however long they take: a download, a question to the user."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(result: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        result: T | None = None
        failure: BaseException | None = None
        try:
            result = function()
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(tell, result, failure)

    threading.Thread(target=work, name="edge-llm aside", daemon=True).start()
    return await done
