"""Serving: a server's life, from its sockets to the last reply."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import uvicorn

from edge_llm.engine.host import EngineHost
from edge_llm.errors import StorageError
from edge_llm.install.golden import Golden
from edge_llm_server.app import create_app
from edge_llm_server.batches import Batches
from edge_llm_server.cards import ModelCard
from edge_llm_server.connection import MAX_HEAD_BYTES, protocol_class
from edge_llm_server.engines import Engines
from edge_llm_server.exchange import Log
from edge_llm_server.limits import Limits
from edge_llm_server.quality_watch import QualityWatch
from edge_llm_server.security import Door, Guard
from edge_llm_server.service import Service
from edge_llm_server.settings import LOOPBACK_NAMES, ServerSettings
from edge_llm_server.sockets import tcp_socket, unix_socket

_GRACE_SLACK_S = 0.3
"""after the grace: for streams to say that they were cut"""
_LOOK_S = 0.05
"""between looks whether all answers have ended"""


class Serving:
    """Answers on its sockets from `run` until `stop`; `port` is known at once."""

    def __init__(
        self,
        settings: ServerSettings,
        host: EngineHost,
        cards: Mapping[str, ModelCard],
        *,
        batches: Batches | StorageError | None = None,
        goldens: Mapping[str, Golden] = MappingProxyType({}),
        log: Log | None = None,
        most_requests: int = 1 << 30,
    ) -> None:
        """`cards` are those of the models by name, and `goldens` what they said when they were imported, for the quality
        watch. `batches` (an error: why there are none) are closed with the server. Raises `InputError` where it cannot listen."""
        self.settings = settings
        self._cards, self._batches = cards, batches
        self.log = log or Log()
        self._quality = QualityWatch(goldens, self.log)
        self.engines = Engines(host, settings, most_requests=most_requests)
        self._listeners = [tcp_socket(settings.host, settings.port)]
        self.port: int = self._listeners[0].getsockname()[1]
        self._servers: list[_Server] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: Exception | None = None
        self._draining: asyncio.Task[None] | None = None

    async def run(self, on_ready: Callable[[], None] | None = None) -> None:
        """Until `stop`. `on_ready` is called once the first model is loaded; raises its error if it cannot be."""
        self._loop = asyncio.get_running_loop()
        service = Service(self.settings, self.engines, self._cards, self._batches, quality=self._quality.found)
        limits = Limits(self.settings)
        app = create_app(service)
        doors = [Door(self.settings.allowed_hosts(self.port), trusted=False)]
        if self.settings.uds is not None and (listener := unix_socket(self.settings.uds)) is not None:
            self._listeners.append(listener)
            doors.append(Door(doors[0].hosts | frozenset(LOOPBACK_NAMES), trusted=True))
        for door in doors:
            config = uvicorn.Config(
                Guard(app, self.settings, door, limits, self.log, service.counts),
                http=protocol_class(self.settings),
                loop="asyncio",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            )
            self._servers.append(_Server(config))
        loading = asyncio.create_task(self._load(on_ready))
        with self._signals(), _libraries_log(self.log):
            self.log("listening", port=self.port, uds=len(doors) > 1)
            serving = zip(self._servers, self._listeners, strict=True)
            await asyncio.gather(*(server.serve([listener]) for server, listener in serving))
        loading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await loading
        if len(doors) > 1 and self.settings.uds is not None:
            self.settings.uds.unlink(missing_ok=True)
        if isinstance(self._batches, Batches):
            await asyncio.to_thread(self._batches.close)
        await asyncio.to_thread(self.engines.close)
        self.log("stopped")
        if self._failure is not None:
            raise self._failure

    async def _load(self, on_ready: Callable[[], None] | None) -> None:
        try:
            await self.engines.start()
        except Exception as error:
            self._failure = error
            self._stop()
            return
        self.log("ready", model=self.engines.names[0])
        if on_ready is not None:
            on_ready()
        if self.settings.quality_watch_s is not None:
            await self._quality.run(self.engines, self.settings.quality_watch_s)

    def stop(self) -> None:
        """End within the grace; called again, at once. Any thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended already
                self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        again, self.engines.draining = self.engines.draining, True
        if again:
            self.engines.cancel_all()
            self._close_doors(0.0, force=True)
        elif self._loop is not None:
            self.log("stopping")
            self._draining = self._loop.create_task(self._drain())

    async def _drain(self) -> None:
        """Until the last answer or the end of the grace /health is answered, /ready and all new requests with 503."""
        assert self._loop is not None
        end = self._loop.time() + self.settings.grace_s
        while self.engines.busy and self._loop.time() < end:
            await asyncio.sleep(min(_LOOK_S, max(0.0, end - self._loop.time())))
        self.engines.cancel_all()
        self._close_doors(max(0.0, end - self._loop.time()))

    def _close_doors(self, within_s: float, *, force: bool = False) -> None:
        for server in self._servers:
            server.config.timeout_graceful_shutdown = within_s + _GRACE_SLACK_S  # type: ignore[assignment]
            server.should_exit = True
            server.force_exit = server.force_exit or force

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)


class _Server(uvicorn.Server):
    """Leaves signals to `Serving`: there may be two servers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        await self._serve(sockets)


@contextlib.contextmanager
def _libraries_log(log: Log) -> Iterator[None]:
    """What uvicorn and asyncio have to say goes into our log; of errors only the kind: they may hold what somebody wrote."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            kind: Any = record.exc_info[0].__name__ if record.exc_info and record.exc_info[0] else None
            log("connection", message=str(record.msg).strip()[:100], **({"fault": kind} if kind else {}))

    handlers = {"uvicorn.error": Handler(logging.WARNING), "asyncio": Handler(logging.ERROR)}
    for name, handler in handlers.items():
        logging.getLogger(name).addHandler(handler)
        logging.getLogger(name).propagate = False
    try:
        yield
    finally:
        for name, handler in handlers.items():
            logging.getLogger(name).removeHandler(handler)
            logging.getLogger(name).propagate = True
