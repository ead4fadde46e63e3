"""launch: `edge-llm chat --web`, from its options to chats in a browser, until it is told to stop."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import signal
import socket
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_llm_server.settings import LOOPBACK_NAMES, is_loopback

from edge_llm.config import EngineConfig
from edge_llm.errors import InputError, ParameterError, quoted
from edge_llm.install.catalog import DEFAULT_MODEL
from edge_llm.install.importer import resolve
from edge_llm_chat.backend import Progress
from edge_llm_chat.launch import LOCAL, Wish, check, shared_socket
from edge_llm_chat.web.tab import Tab

_URL = re.compile(r"https?://([A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")
_LIBRARIES = ("textual_serve", "fastapi", "uvicorn")
_EVERY_ADDRESS = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class WebAddress:
    """Where browsers find the chat. Raises `ParameterError` for what is none, or would be found by no browser."""

    host: str = "127.0.0.1"
    """to listen on"""
    port: int = 8081
    """0: any that is free"""
    url: str | None = None
    """how browsers call it, if that is something else: the address of a proxy, or another name of this machine"""

    def __post_init__(self) -> None:
        if self.url is not None and not _URL.fullmatch(self.url):
            raise ParameterError(
                f"{quoted(self.url)} is no address of a page", hint="for example https://chat.example.org"
            )
        if self.url is None and self.host in _EVERY_ADDRESS:
            raise ParameterError(
                f"{self.host} is no address that a browser could open",
                hint="say by --web-url which one it is, for example --web-url http://192.168.1.5:8081",
            )

    def origins(self, port: int) -> Sequence[str]:
        """All that browsers may call it when it listens on `port`; the link leads to the first."""
        if self.url is not None:
            return [self.url.lower()]
        own = f"[{self.host}]" if ":" in self.host else self.host
        names = [own, *LOOPBACK_NAMES] if is_loopback(self.host) else [own]
        return [f"http://{name.lower()}" + ("" if port == 80 else f":{port}") for name in names]


def launch_web(
    model: str | None,
    config: EngineConfig,
    wish: Wish,
    address: WebAddress,
    *,
    note: Callable[[str], None],
    progress: Progress,
) -> None:
    """Serve until Ctrl-C or SIGTERM; `note` is given lines for whoever started it.

    Raises `ParameterError` for a wish that cannot be met, `InputError` where libraries are missing or nothing can be
    listened on, and what fetching and loading a model raise.
    """
    missing = [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"the chat in a browser needs {', '.join(missing)}", hint='pip install "edge-llm[web]"')
    check(wish)
    from edge_llm_server.sockets import tcp_socket

    try:
        listener = tcp_socket(address.host, address.port)
    except InputError as error:
        raise InputError(str(error), hint=(error.hint or "").replace("--", "--web-")) from None
    with listener:
        source = _shared_server(model, config, wish) or resolve(model or DEFAULT_MODEL, progress)
        if isinstance(source, Path) and config.draft_model is not None:
            resolve(config.draft_model, progress)  # fetched now, where it is seen
        asyncio.run(_serve(source, config, wish, address, listener, note))


def _shared_server(model: str | None, config: EngineConfig, wish: Wish) -> Tab | None:
    """The given server, or this user's own if one runs that may answer; else tabs need one of their own."""
    if wish.server is not None:
        key = os.environ.get("OPENAI_API_KEY")
        return Tab(wish, config.private, _slides(config), wish.server, model=model, key=key)
    socket = shared_socket(model, config, wish)
    return None if socket is None else Tab(wish, config.private, _slides(config), LOCAL, socket)


def _slides(config: EngineConfig) -> bool:
    return config.context_policy == "slide"


async def _serve(
    source: Tab | Path,
    config: EngineConfig,
    wish: Wish,
    address: WebAddress,
    listener: socket.socket,
    note: Callable[[str], None],
) -> None:
    """Chats that ask the server of `source`, or one of our own with the model in this folder. Raises what ends that."""
    from edge_llm_chat.web.engine_server import EngineServer

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
    if isinstance(source, Tab):
        await _offer(source, address, listener, note, stop)
        return
    note(f"loading {source.name}")
    async with EngineServer(source, config) as server:
        if await _first(stop.wait(), server.ready()):
            return
        tab = Tab(wish, config.private, _slides(config), LOCAL, server.socket)
        await _first(_offer(tab, address, listener, note, stop), server.ended())


async def _offer(
    tab: Tab, address: WebAddress, listener: socket.socket, note: Callable[[str], None], stop: asyncio.Event
) -> None:
    """Chats until `stop`."""
    from edge_llm_chat.web.access import Access
    from edge_llm_chat.web.session import Session
    from edge_llm_chat.web.site import Site

    command, environment = tab.command(), tab.environment()
    origins = address.origins(listener.getsockname()[1])
    access = Access(origins)
    site = Site(
        access,
        lambda websocket: Session(command, environment, websocket),
        lambda link: note(f"a browser came that has no key; if it is yours, open {link}"),
    )
    async with site.serving(listener):
        if not is_loopback(address.host) and not access.secure:
            note("what is said can be read by others in this network: the connection is not encrypted")
        note(f"open {access.new_link()}")
        note("the link works once, for one browser; Ctrl-C ends the chats")
        await stop.wait()


async def _first(*waits: Coroutine[Any, Any, object]) -> bool:
    """Wait for the first to end, and end the others; whether that was the first one. Raises what it raised."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        return tasks[0] in done
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
