"""A server in this process, on a real socket, over an engine that says what it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from edge_llm_server.batches import Batches
from edge_llm_server.cards import ModelCard
from edge_llm_server.exchange import Log
from edge_llm_server.serving import Serving
from edge_llm_server.settings import ServerSettings

from edge_llm.engine.client import EngineClient, ThreadClient
from edge_llm.engine.core import EngineCore
from edge_llm.engine.host import EngineHost
from edge_llm.errors import StorageError
from edge_llm.install.golden import Golden
from tests.engine.fakes import make_core


def card(name: str) -> ModelCard:
    return ModelCard(
        name=name,
        digest="ab" * 32,
        size=123_456,
        architecture="llama",
        parameters=135_000_000,
        types=("Q4_1", "Q8_0"),
        context=4096,
        embedding=64,
        chats=True,
        thinks=True,
        modified=1.8e9,
    )


def host_of(folders: dict[str, Path], load: Callable[[Path], EngineClient]) -> EngineHost:
    """Room for all of them, for ever."""
    return EngineHost(folders, load, bytes_of=lambda _: 1, budget_bytes=1 << 30, keep_alive_s=math.inf)


class Running:
    """A server that runs; `log` is what it has logged."""

    def __init__(self, serving: Serving, stream: io.StringIO, cores: list[EngineCore]) -> None:
        self.serving, self._stream, self.cores = serving, stream, cores
        self.url = f"http://127.0.0.1:{serving.port}"

    @property
    def core(self) -> EngineCore:
        return self.cores[0]

    @property
    def log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._stream.getvalue().splitlines()]


@contextlib.contextmanager
def running(
    core: Callable[[], EngineCore] = make_core,
    *,
    load: Callable[[Path], EngineClient] | None = None,
    most_requests: int = 1 << 30,
    wait: bool = True,
    batches: Path | StorageError | None = None,
    goldens: Mapping[str, Golden] = MappingProxyType({}),
    **settings: Any,
) -> Iterator[Running]:
    """A server of the model `fake`, which `core` makes, until the end of the block."""
    cores: list[EngineCore] = []

    def load_core(_folder: Path) -> EngineClient:
        cores.append(core())
        return ThreadClient(cores[-1])

    values = {"models": ("fake",), "port": 0, "grace_s": 2.0, **settings}
    made = ServerSettings(**values)
    stream, ready, failures = io.StringIO(), threading.Event(), []
    host = host_of({name: Path(name) for name in made.models}, load or load_core)
    serving = Serving(
        made,
        host,
        {name: card(name) for name in made.models},
        batches=Batches(batches, host, Log(stream)) if isinstance(batches, Path) else batches,
        goldens=goldens,
        log=Log(stream),
        most_requests=most_requests,
    )

    def run() -> None:
        try:
            asyncio.run(serving.run(ready.set))
        except BaseException as error:
            failures.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run, name="server under test")
    thread.start()
    try:
        if wait:
            assert ready.wait(30)
        yield Running(serving, stream, cores)
    finally:
        serving.stop()
        thread.join(30)
        assert not thread.is_alive()
    if failures:
        raise failures[0]
