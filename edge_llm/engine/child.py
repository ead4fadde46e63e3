"""The process that holds an engine for another one: started by `ChildProcess`, it ends with whoever started it."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from edge_llm import machine
from edge_llm.engine.assembly import open_engine
from edge_llm.engine.channel import Channel
from edge_llm.engine.client import ThreadClient
from edge_llm.engine.codec import WireError
from edge_llm.engine.core import EngineCore
from edge_llm.engine.protocol import (
    Answer,
    Cancel,
    Close,
    Closed,
    Detokenize,
    Failed,
    Happened,
    Loading,
    Measure,
    Open,
    Ready,
    Reply,
    Submit,
    Tokenize,
)
from edge_llm.engine.request import Request
from edge_llm.engine.wire import frame
from edge_llm.errors import EdgeLLMError, GenerationError, ParameterError
from edge_llm.messages import Event, Finished

_INTAKE_THREADS = 4
"""requests that are checked and tokenised side by side: a long one delays no short one and no cancel"""
_MUCH_BYTES = 1 << 20
"""of a reply, for which several times as much was held"""


def main(descriptor: int) -> None:
    """Serve the engine's other side, which the socket `descriptor` leads to, until it closes it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # meant for everybody at once; our parent tells us when to end
    _leave_nothing_behind()
    code = 0
    try:
        _serve(Channel(socket.socket(fileno=descriptor)))
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)  # threads may be in the middle of anything, and nobody waits for it


def _leave_nothing_behind() -> None:
    faulthandler.enable()
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file would hold what was said
    machine.end_with_parent(at_once=True)  # even if this process can no longer read that the connection is closed


def _serve(channel: Channel) -> None:
    match channel.receive():
        case [Open(folder, config)]:
            pass
        case _:
            return
    try:
        core = open_engine(Path(folder), config, lambda what, done, total: channel.send(Loading(what, done, total)))
    except EdgeLLMError as error:
        channel.send(Failed(error))
        channel.finish()
        return
    service = _Service(channel, core)
    while values := channel.receive():
        for value in values:
            service.take(value)


class _Request:
    """What ends a request, which may be asked for before it has started."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stop: Callable[[], None] | None = None
        self._cancelled = False

    def started(self, stop: Callable[[], None]) -> None:
        with self._lock:
            self._stop = stop
            if self._cancelled:
                stop()

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            if self._stop is not None:
                self._stop()


class _Service:
    """Does what is asked of an engine, and sends what becomes of it."""

    def __init__(self, channel: Channel, core: EngineCore) -> None:
        self._channel = channel
        self._said: list[Happened] = []  # of the engine's thread, since its last step
        self._client = ThreadClient(core, self._tell)
        self._pool = ThreadPoolExecutor(_INTAKE_THREADS, "edge-llm intake")
        self._requests: dict[int, _Request] = {}
        channel.send(Ready(self._client.info))

    def take(self, message: object) -> None:
        match message:
            case Submit(number, request):
                entry = self._requests[number] = _Request()
                self._later(number, partial(self._start, number, request, entry))
            case Cancel(number):
                running = self._requests.get(number)
                if running is not None:
                    running.cancel()
            case Tokenize(number, request):
                self._later(number, lambda: tuple(self._client.tokenize(request)))
            case Detokenize(number, token_ids):
                self._later(number, lambda: self._client.detokenize(token_ids))
            case Measure(number):
                self._later(number, self._client.statistics)
            case Close(drain):
                # while requests are waited for, they can still be cancelled
                threading.Thread(target=self._close, args=(drain,), daemon=True).start()
            case _:
                raise WireError(f"{type(message).__name__} is not for an engine")

    def _later(self, number: int, work: Callable[[], Answer]) -> None:
        self._pool.submit(self._reply, number, work)

    def _reply(self, number: int, work: Callable[[], Answer]) -> None:
        answer: Answer | EdgeLLMError
        try:
            answer = work()
        except EdgeLLMError as error:
            answer = error
        except Exception as error:
            answer = GenerationError(f"the request failed: {error!r}")
        try:
            data = frame([Reply(number, answer)])
        except WireError as error:
            data = frame([Reply(number, ParameterError(f"the answer cannot be sent: {error}", hint="ask for less"))])
        self._channel.send(data)
        if self._channel.received_much() or len(data) > _MUCH_BYTES:
            machine.return_freed_memory_later()

    def _start(self, number: int, request: Request, entry: _Request) -> None:
        try:
            entry.started(self._client.start(request, partial(self._emit, number)))
        except BaseException:
            self._requests.pop(number, None)
            raise

    def _emit(self, number: int, event: Event | EdgeLLMError) -> None:
        if isinstance(event, Finished | EdgeLLMError):
            self._requests.pop(number, None)
        self._said.append(Happened(number, event))

    def _tell(self) -> None:
        """Events of all requests of a step go out together."""
        said, self._said = self._said, []
        if said:
            self._channel.send_now(said)

    def _close(self, drain: bool) -> None:
        self._client.close(drain=drain)
        self._channel.send(Closed(self._client.statistics()))
        self._channel.finish()
