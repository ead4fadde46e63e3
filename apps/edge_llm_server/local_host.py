"""LocalHost: engines on threads of this process, each loaded when it is first asked for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from edge_llm.engine.client import EngineClient
from edge_llm.engine.info import EngineInfo


class LocalHost:
    """Never unloads; for programs that end with their server."""

    def __init__(self, folders: Mapping[str, Path], load: Callable[[Path], EngineClient]) -> None:
        self._folders, self._load = dict(folders), load
        self._locks = {name: threading.Lock() for name in folders}
        self._clients: dict[str, EngineClient] = {}

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[EngineClient]:
        with self._locks[name]:
            if name not in self._clients:
                self._clients[name] = self._load(self._folders[name])
        yield self._clients[name]

    def loaded(self) -> tuple[EngineInfo, ...]:
        return tuple(client.info for client in self._clients.values())

    def close(self, *, drain: bool = False) -> None:
        for client in self._clients.values():
            client.close(drain=drain)
