"""Meanwhile: something is opened in a thread of its own, while the caller opens something else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar, cast


class Closeable(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=Closeable)


class Meanwhile(Generic[T]):
    """Opens something, from now on. (`concurrent.futures` would do, and costs a start ten milliseconds.)"""

    def __init__(self, opening: Callable[[], T]) -> None:
        self._opening = opening
        self._opened: T | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="edge-llm opening", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._opened = self._opening()
        except BaseException as failure:  # result() tells it
            self._failure = failure

    def result(self) -> T:
        """What was opened, as soon as it is. Raises what opening raised."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        return cast(T, self._opened)

    def close(self) -> None:
        """Close what was opened, if it could be. Interrupts are raised once it is: it may use what the caller closes next."""
        interrupt: KeyboardInterrupt | None = None
        while self._thread.is_alive():
            try:
                self._thread.join()
            except KeyboardInterrupt as error:
                interrupt = error
        if self._opened is not None:
            self._opened.close()
        if interrupt is not None:
            raise interrupt
