"""EngineClient: the only door to an engine. ThreadClient opens it for callers in the same process."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from edge_llm.engine.handle import Handle, Mailbox
from edge_llm.engine.info import EngineInfo
from edge_llm.engine.request import Request
from edge_llm.errors import EngineStoppedError
from edge_llm.metrics import Statistics

if TYPE_CHECKING:  # whoever only talks to an engine elsewhere does not load what one is made of
    from edge_llm.engine.core import EngineCore
    from edge_llm.engine.sequence import Emit, Sequence


class EngineClient(Protocol):
    """Takes requests and answers each exactly once. Every method may be called from any thread."""

    @property
    def info(self) -> EngineInfo:
        """What the engine is."""
        ...

    def submit(self, request: Request) -> Handle:
        """Start a request.

        What is wrong with it is said here, before anything runs: raises `ParameterError`, `TemplateError`,
        `ContextLengthError`, `QueueFullError` with the time after which to try again, and `EngineStoppedError`.
        """
        ...

    def tokenize(self, request: Request) -> list[int]:
        """The tokens of its prompt, the chat template's included, however many. Raises `ParameterError`, `TemplateError`,
        `EngineStoppedError`."""
        ...

    def detokenize(self, token_ids: Iterable[int]) -> str:
        """The text of tokens, special ones included; U+FFFD for bytes that are no text. Raises `ParameterError`,
        `EngineStoppedError`."""
        ...

    def statistics(self) -> Statistics:
        """What the engine has done since it was loaded, also after `close`."""
        ...

    def close(self, *, drain: bool = False) -> None:
        """Cancel all requests, or with `drain` wait until they are done; then free the model. Idempotent."""
        ...


class ThreadClient:
    """An engine on a thread of its own. Requests are checked and tokenised on the caller's thread."""

    def __init__(self, core: EngineCore, after_step: Callable[[], None] = lambda: None) -> None:
        """`after_step` is called on the engine's thread whenever events may have been emitted."""
        self._core = core
        self._worker = _Worker(core, after_step)
        # at the interpreter's exit too: no step may run while modules are taken apart
        self._finalizer = weakref.finalize(self, self._worker.stop)

    def submit(self, request: Request) -> Handle:
        mailbox = Mailbox()
        return Handle(mailbox, self.start(request, mailbox.put), owner=self)

    def start(self, request: Request, emit: Emit) -> Callable[[], None]:
        """As `submit`, but `emit` is called with the events, on the engine's thread; gives what cancels the request."""
        sequence = self._core.prepare(request, emit)
        self._worker.submit(sequence)
        return sequence.cancel

    @property
    def info(self) -> EngineInfo:
        return self._core.info

    def tokenize(self, request: Request) -> list[int]:
        return self._core.intake.prompt(request)[0]

    def detokenize(self, token_ids: Iterable[int]) -> str:
        return self._core.intake.detokenize(token_ids)

    def statistics(self) -> Statistics:
        return self._core.statistics()

    def close(self, *, drain: bool = False) -> None:
        self._worker.stop(drain=drain)
        self._finalizer.detach()


class _Worker:
    """The thread that runs the steps; without work it sleeps, and nothing wakes it but a request or the end."""

    def __init__(self, core: EngineCore, after_step: Callable[[], None]) -> None:
        self._core, self._after_step = core, after_step
        self._changed = threading.Condition()
        self._closing = False
        self._draining = False
        self._end: str | None = None
        self._thread = threading.Thread(target=self._run, name="edge-llm engine", daemon=True)
        self._thread.start()

    def submit(self, sequence: Sequence) -> None:
        if not self._thread.is_alive():  # also in a forked child, which has no such thread
            raise EngineStoppedError(self._end or "the engine does not run in this process")
        with self._changed:
            if self._end is not None or self._closing or self._draining:
                raise EngineStoppedError(self._end or "the engine is closed")
            self._core.enqueue(sequence)
            self._changed.notify()

    def stop(self, *, drain: bool = False) -> None:
        if not self._thread.is_alive():
            return
        with self._changed:
            self._draining = True
            self._closing = self._closing or not drain
            self._changed.notify()
        if threading.current_thread() is not self._thread:  # a garbage collection may run anywhere
            self._thread.join()

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            while self._wait_for_work():
                self._core.step()
                self._after_step()
        except BaseException as error:  # whatever it was, nobody may wait for an answer that never comes
            failure = error
        with self._changed:
            self._end = "the engine is closed" if failure is None else f"the engine has stopped: {failure!r}"
        self._core.close(failure)
        self._after_step()

    def _wait_for_work(self) -> bool:
        """Sleep until there is something to do; False once it is time to end."""
        with self._changed:
            while not self._closing:
                if self._core.has_work:
                    return True
                if self._draining:
                    return False
                self._changed.wait()
            return False
