"""Supervisor: keeps an engine's process running, and leads what it says to whoever waits for it."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from edge_llm.config import EngineConfig
from edge_llm.engine.child_process import ChildProcess
from edge_llm.engine.codec import WireError
from edge_llm.engine.handle import Mailbox, Wakes
from edge_llm.engine.info import EngineInfo
from edge_llm.engine.protocol import Answer, Cancel, Close, Closed, Failed, Happened, Loading, Open, Ready, Reply
from edge_llm.engine.wire import frame
from edge_llm.errors import EdgeLLMError, EngineStoppedError, ParameterError
from edge_llm.messages import Finished
from edge_llm.metrics import Statistics

GRACE_S = 5.0
"""how long a process may take to end before it is killed"""
_LONGEST_LOAD_S = 60.0
"""how long a request waits for a process that is started again"""
_DYING_S = 0.5
"""likewise, if nobody told it to end: readers wait for the reason"""
_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 30.0
_STEADY_S = 60.0
"""a process that has lived for so long did not die of its start"""


class Phase(StrEnum):
    LOADING = "loading"
    READY = "ready"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class EngineState:
    """What an engine's process is doing: while it loads, `done` of `total` of `what`; why it stopped, unless it was closed."""

    phase: Phase
    what: str = ""
    done: int = 0
    total: int = 0
    error: EdgeLLMError | None = None


class RestartPolicy:
    """How long to wait before a process is started again: not at all, then twice as long each time."""

    def __init__(self) -> None:
        self._deaths = 0

    def delay(self, lived_s: float) -> float:
        """Seconds, after a process has ended `lived_s` seconds after it was ready (0: it never was)."""
        self._deaths = 1 if lived_s >= _STEADY_S else self._deaths + 1
        return 0.0 if self._deaths == 1 else min(_FIRST_DELAY_S * 2 ** min(self._deaths - 2, 30), _LONGEST_DELAY_S)


class Supervisor:
    """One thread that starts the process, reads what it says, buries it and starts it again.

    `request` and `stop` may be called from any thread.
    """

    def __init__(
        self,
        folder: Path,
        config: EngineConfig,
        *,
        on_state: Callable[[EngineState], None] | None,
        reply_timeout_s: float,
        start: Callable[[], ChildProcess] = ChildProcess,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.info: EngineInfo | None = None
        self.statistics: Statistics | None = None
        """what the engine had done when it was closed"""
        self._open = Open(str(folder), config)
        self._on_state = on_state
        self._reply_timeout_s = reply_timeout_s
        self._start = start
        self._clock = clock
        self._pid = os.getpid()
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._phase = Phase.LOADING
        self._child: ChildProcess | None = None
        self._closing = False
        self._error: EdgeLLMError | None = None
        self._replies: dict[int, SimpleQueue[Answer | EdgeLLMError]] = {}
        self._readers: dict[int, Mailbox] = {}
        self._thread = threading.Thread(target=self._run, name="edge-llm supervisor", daemon=True)
        self._thread.start()

    def wait_until_loaded(self) -> None:
        """Wait for the first start. Raises what `open_engine` raises, and `EngineStoppedError`."""
        with self._changed:
            self._changed.wait_for(lambda: self._phase is not Phase.LOADING)
            if self.info is None:
                raise self._error or EngineStoppedError("the engine is closed")

    def request(
        self, message: Callable[[int], object], reader: Mailbox | None = None
    ) -> tuple[Answer, Callable[[], None]]:
        """Send the message of a number and wait for its reply; `reader` gets the events of this number.

        Gives the answer, and what cancels the request. Raises the error that is the reply, `ParameterError` for what
        cannot be sent, and `EngineStoppedError`. A process that does not reply in time hangs, and is killed.
        """
        if os.getpid() != self._pid:
            raise EngineStoppedError("the engine does not run in this process")
        number = next(self._numbers)
        try:
            data = frame([message(number)])
        except WireError as error:
            raise ParameterError(f"the request cannot be sent to the engine: {error}") from None
        reply: SimpleQueue[Answer | EdgeLLMError] = SimpleQueue()
        with self._changed:
            child = self._ready_child()
            self._replies[number] = reply
            if reader is not None:
                self._readers[number] = reader
        child.channel.send(data)
        cancel = partial(child.channel.send, Cancel(number))
        try:
            answer = reply.get(timeout=self._reply_timeout_s)
        except Empty:
            with self._changed:
                if self._child is child:
                    self._phase = Phase.LOADING  # whoever asks now waits for the next one
            child.kill()
            answer = EngineStoppedError("the engine's process hangs; it is started again")
        except BaseException:
            self._forget(number)
            cancel()
            raise
        if isinstance(answer, EdgeLLMError):
            self._forget(number)
            raise answer
        return answer, cancel

    def stop(self, *, drain: bool = False) -> None:
        """End the process, at once or when its requests are done; a second call cuts a first one short."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            if self._child is not None and self._phase is Phase.READY:
                self._child.channel.send(Close(drain))
            elif self._child is not None:
                self._child.kill()  # it only loads
        if threading.current_thread() is self._thread:  # a garbage collection may run anywhere
            return
        self._thread.join(None if drain else GRACE_S)
        with self._changed:
            if self._child is not None:
                self._child.kill()
        self._thread.join()

    def _ready_child(self) -> ChildProcess:
        """The process, once it is ready; the lock is held."""
        self._changed.wait_for(lambda: self._closing or self._phase is not Phase.LOADING, _LONGEST_LOAD_S)
        if self._closing:
            raise EngineStoppedError("the engine is closed")
        if self._child is None or self._phase is not Phase.READY:
            raise EngineStoppedError(
                str(self._error or "the engine is still loading"), hint="it is started again; try later"
            )
        return self._child

    def _forget(self, number: int) -> None:
        with self._changed:
            self._replies.pop(number, None)
            self._readers.pop(number, None)

    # --- the thread ---

    def _run(self) -> None:
        error: EdgeLLMError | None = None
        try:
            error = self._lives()
        finally:  # whatever it was, nobody may wait for an answer that never comes
            with self._changed:
                error = None if self._closing else error
                self._closing, self._phase, self._error = True, Phase.STOPPED, error
                self._changed.notify_all()
            self._fail_all(EngineStoppedError("the engine is closed"))
        self._tell(EngineState(Phase.STOPPED, error=error))

    def _lives(self) -> EdgeLLMError:
        """One process after the other, until the end or a first one that never was ready; why the last one ended."""
        policy = RestartPolicy()
        while True:
            lived_s, error = self._one_life()
            with self._changed:
                if self._closing or self.info is None:
                    return error
                delay_s = policy.delay(lived_s)
            if delay_s:
                self._enter(EngineState(Phase.STOPPED, error=error))
            self._fail_all(error)
            with self._changed:
                if self._changed.wait_for(lambda: self._closing, delay_s):
                    return error

    def _one_life(self) -> tuple[float, EdgeLLMError]:
        """A process from its start to its end: how long it was ready, in seconds, and why it ended."""
        self._enter(EngineState(Phase.LOADING))
        try:
            child = self._start()
        except EngineStoppedError as error:
            return 0.0, error
        child.channel.send(self._open)
        with self._changed:
            self._child = child
            if self._closing:
                child.kill()
        ready_at, reason, heard_all = None, None, False
        try:
            while reason is None and (values := child.channel.receive()):
                reason = self._take_all(values)
                if ready_at is None and self._phase is Phase.READY:
                    ready_at = self._clock()
            heard_all = reason is None
        except WireError as error:
            reason = EngineStoppedError(f"the engine's process does not keep to the protocol: {error}")
        finally:
            with self._changed:
                self._child, self._phase = None, Phase.LOADING
            if not heard_all:
                child.kill()
            how = child.end(GRACE_S if self._closing else _DYING_S)
        return 0.0 if ready_at is None else self._clock() - ready_at, reason or how

    def _take_all(self, messages: list[Any]) -> EdgeLLMError | None:
        """As `_take`; readers are woken together."""
        reason, wakes = None, Wakes()
        try:
            for message in messages:
                reason = self._take(message, wakes) or reason
        finally:
            wakes.send()
        return reason

    def _take(self, message: Any, wakes: Wakes) -> EdgeLLMError | None:
        """What a message means; the error if it is the last one."""
        match message:
            case Happened(number, event):
                fatal = self._fatal(event)
                last = isinstance(event, Finished | EdgeLLMError)
                with self._changed:
                    reader = self._readers.pop(number, None) if last else self._readers.get(number)
                if reader is not None:
                    reader.put(event, wakes)
                return fatal
            case Reply(number, answer):
                fatal = self._fatal(answer)
                with self._changed:
                    reply = self._replies.pop(number, None)
                if reply is not None:
                    reply.put(answer)
                return fatal
            case Loading(what, done, total):
                self._tell(EngineState(Phase.LOADING, what, done, total))
            case Ready(info):
                self.info = info
                self._enter(EngineState(Phase.READY))
            case Failed(error):
                return error
            case Closed(statistics):
                self.statistics = statistics
            case _:
                raise WireError(f"{type(message).__name__} is not from an engine")
        return None

    def _fatal(self, said: object) -> EngineStoppedError | None:
        """An engine that says so is of no use any more, though its process still runs."""
        with self._changed:
            if self._closing or not isinstance(said, EngineStoppedError):
                return None
            self._phase = Phase.LOADING  # before anybody hears of it and asks again
            return said

    def _enter(self, state: EngineState) -> None:
        with self._changed:
            self._phase, self._error = state.phase, state.error
            self._changed.notify_all()
        self._tell(state)

    def _tell(self, state: EngineState) -> None:
        if self._on_state is not None:
            self._on_state(state)

    def _fail_all(self, error: EdgeLLMError) -> None:
        with self._changed:
            waiting: list[Callable[[EdgeLLMError], None]] = [reply.put for reply in self._replies.values()]
            waiting += [reader.put for reader in self._readers.values()]
            self._replies.clear()
            self._readers.clear()
        for put in waiting:
            # an error of its own for each: a raised one collects its raiser's traceback
            put(EngineStoppedError(str(error), hint=error.hint))
