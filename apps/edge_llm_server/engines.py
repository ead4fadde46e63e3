"""Engines: which model answers a request, and whether it may now. The event loop's side of an engine host."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from typing import Any, TypeVar, cast

from edge_llm.engine.client import EngineClient
from edge_llm.engine.handle import Handle
from edge_llm.engine.host import EngineHost
from edge_llm.engine.info import EngineInfo
from edge_llm.engine.request import Request
from edge_llm.errors import EdgeLLMError, QueueFullError, quoted
from edge_llm.metrics import Statistics
from edge_llm_server.api_error import ApiError
from edge_llm_server.keys import Scope
from edge_llm_server.seats import Seats
from edge_llm_server.settings import ServerSettings

R = TypeVar("R")
_MAX_THREADS = 64


class Engines:
    """Every method that waits is for the event loop; the work is done on threads."""

    def __init__(self, host: EngineHost, settings: ServerSettings, *, most_requests: int = 1 << 30) -> None:
        """`most_requests` of one model are let in: as many as its engine answers and queues. More are refused before
        anything of them is read."""
        self._host, self._settings = host, settings
        keys = sum(key.scope is Scope.ALL for key in settings.keys)
        self._seats = {name: Seats(most_requests, shared=keys > 1) for name in settings.models}
        self._threads = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="edge-llm server")
        self._handles: set[Handle] = set()
        self.draining = False
        """no new request is taken"""
        self.ready = False
        """the first model, or the one in its stead, has been loaded"""

    @property
    def ping_s(self) -> float:
        """How long a stream may say nothing."""
        return self._settings.ping_s

    @property
    def names(self) -> tuple[str, ...]:
        return self._settings.models

    def name_of(self, wanted: str | None) -> str:
        """The name of a model that is served. Raises `ApiError` 404."""
        if not wanted:
            return self.names[0]
        if wanted not in self._settings.models:
            raise ApiError(
                404,
                f"there is no model {quoted(wanted)} here, only: {', '.join(self.names)}",
                param="model",
                code="model_not_found",
            )
        return wanted

    @property
    def busy(self) -> bool:
        """Whether a request of any model is here."""
        return not all(seats.empty for seats in self._seats.values())

    async def start(self) -> None:
        """Load the first model. Raises its `EdgeLLMError`."""
        manager, _ = await self._entered(self.names[0], wait_s=None)
        await self.run(manager.__exit__, None, None, None)

    @asynccontextmanager
    async def use(
        self, name: str, owner: str = "", *, answers: int = 1, together: bool = True, in_background: bool = False
    ) -> AsyncIterator[EngineClient]:
        """The engine of a served model, held while the block runs, for the key `owner`.

        As many `answers` are wanted of it, all `together` or as many at a time as it has slots; `in_background` when nothing
        else waits. Raises `ApiError`: 503 while it loads or the server drains, 429 if too many requests are here already.
        """
        if self.draining:
            raise ApiError.unavailable("the server is stopping", 5.0)
        if answers > 1 and not together:
            answers = min(answers, next((info.slots for info in self._host.loaded() if info.name == name), 1))
        with self._seats[name].taken(owner, answers=answers, in_background=in_background):
            manager, client = await self._entered(name, self._settings.load_wait_s)
            try:
                if self.draining:
                    raise ApiError.unavailable("the server is stopping", 5.0)
                yield client
            finally:
                manager.__exit__(None, None, None)

    async def _entered(
        self, name: str, wait_s: float | None
    ) -> tuple[AbstractContextManager[EngineClient], EngineClient]:
        """The model's engine or that of the fallback, held. Raises `ApiError` if it takes longer than `wait_s`."""
        try:
            entered = await self._enter(name, wait_s)
        except EdgeLLMError as error:
            fallback = self._settings.fallback
            if fallback is None or fallback == name:
                if wait_s is None:
                    raise
                if isinstance(error, QueueFullError):
                    raise ApiError.of(error) from None
                raise ApiError.unavailable(f"the model {name} cannot be loaded: {error}") from None
            entered = await self._enter(fallback, wait_s)
        self.ready = True
        return entered

    async def _enter(
        self, name: str, wait_s: float | None
    ) -> tuple[AbstractContextManager[EngineClient], EngineClient]:
        ready = self._host.open_ready(name)
        if ready is not None:
            return ready, ready.__enter__()
        manager = self._host.open(name)
        entering = _in_background(manager.__enter__)
        try:
            return manager, await asyncio.wait_for(asyncio.shield(entering), wait_s)
        except TimeoutError:
            entering.add_done_callback(_left(manager))
            raise ApiError.unavailable(f"the model {name} is being loaded", 2.0) from None
        except asyncio.CancelledError:
            entering.add_done_callback(_left(manager))
            raise

    async def run(self, work: Callable[..., R], *arguments: Any) -> R:
        """`work` on a thread, for what may take longer than the loop can wait."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    async def submit(
        self, client: EngineClient, requests: Collection[Request], *, wanted: Callable[[], bool]
    ) -> list[Handle]:
        """Starts all of the requests or, if one is refused, none. Raises `EdgeLLMError`, and `ApiError` once none of them is
        `wanted` any more: a prompt of megabytes is work before it is a request."""
        handles = await self.run(_submit_all, client, requests, wanted)
        self._handles.update(handles)
        return handles

    def forget(self, handles: Iterable[Handle]) -> None:
        """These are over; those that are not end within a step."""
        for handle in handles:
            handle.cancel()
            self._handles.discard(handle)

    def cancel_all(self) -> None:
        """End every answer that is being given."""
        for handle in self._handles:
            handle.cancel()

    def loaded(self) -> tuple[EngineInfo, ...]:
        return self._host.loaded()

    def statistics(self) -> dict[str, Statistics]:
        """What the loaded engines have done, by model; not for the event loop."""
        return self._host.statistics()

    def close(self) -> None:
        """End all engines."""
        self._host.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


def _in_background(work: Callable[[], R]) -> asyncio.Future[R]:
    """`work` on a thread that the end of the process does not wait for: a model may take minutes to load."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[R] = loop.create_future()

    def settle(result: R | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(cast("R", result))

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as caught:
            error = caught
        with suppress(RuntimeError):  # the loop has ended: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="edge-llm loading", daemon=True).start()
    return done


def _left(manager: AbstractContextManager[EngineClient]) -> Callable[[asyncio.Future[EngineClient]], None]:
    def leave(entering: asyncio.Future[EngineClient]) -> None:
        if not entering.cancelled() and entering.exception() is None:
            manager.__exit__(None, None, None)

    return leave


def _submit_all(client: EngineClient, requests: Collection[Request], wanted: Callable[[], bool]) -> list[Handle]:
    handles: list[Handle] = []
    try:
        for request in requests:
            if not wanted():
                raise ApiError(499, "the client is gone")
            handles.append(client.submit(request))
    except BaseException:
        for handle in handles:
            handle.cancel()
        raise
    return handles
