"""launch: what the command line needs to open the full-screen chat."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from edge_llm import paths
from edge_llm.config import EngineConfig
from edge_llm.errors import InputError
from edge_llm.install.catalog import DEFAULT_MODEL
from edge_llm.sampling.params import SamplingParams
from edge_llm_chat.app import ChatApp, Start
from edge_llm_chat.backend import ChatBackend
from edge_llm_chat.local_backend import LocalBackend
from edge_llm_chat.preferences import Preferences
from edge_llm_chat.running_server import running_server
from edge_llm_chat.store import Store

LOCAL = "http://localhost"
"""what a server on a unix socket is called"""


@dataclass(frozen=True, slots=True)
class Wish:
    """Which conversation to open, and what it is to be like."""

    last: bool = False
    resume: bool = False
    system: str | None = None
    parameters: dict[str, float | int] = field(default_factory=dict)
    """of SamplingParams, where the user gave one"""
    tools: tuple[str, ...] = ()
    """names of `edge_llm.toolbox.builtin`"""
    server: str | None = None
    """address of an OpenAI-compatible server to ask instead of a model of our own"""
    shared: bool = False
    """our own server may answer, if one runs: nothing was said of the engine that it would not follow"""


def launch(model: str | None, config: EngineConfig, wish: Wish) -> None:
    """Run the chat until the user leaves. Raises `ParameterError` and `StorageError` before the screen is taken."""
    open_chat(_connector(model, config, wish), model, wish, private=config.private)


def open_chat(connect: Callable[[str | None], ChatBackend], model: str | None, wish: Wish, *, private: bool) -> None:
    """`launch`, with what gives the backend of a model."""
    check(wish)
    preferences = Preferences.load()
    store, notice = _opened_store(wish, private=private)
    try:
        conversation = store.last() if wish.last else None
        if wish.last and conversation is None:
            raise InputError("there is no conversation to go on with", hint="edge-llm chat begins one")
        start = Start(conversation, wish.resume, wish.system, wish.parameters, private, wish.tools, notice)
        app = ChatApp(connect(model), store, start, connect=connect, preferences=preferences)
        app.run()
        if app.return_code:
            raise SystemExit(app.return_code)
    finally:
        store.close()


def _opened_store(wish: Wish, *, private: bool) -> tuple[Store, str]:
    """Where the chat is kept, and what to say of that. Raises `StorageError`."""
    folder = paths.data_dir() / "chats"
    wants_earlier = wish.last or wish.resume
    if not private and not wants_earlier and (reason := paths.obstacle(folder)) is not None:
        return Store.open(private=True), f"This chat is not kept, and earlier ones are not shown: {reason}"
    known = private or folder.exists()
    store = Store.open(private=private)
    return store, "" if known else f"Chats are kept in {store.path}; --private keeps nothing"


def check(wish: Wish) -> None:
    """Says what is wrong with a wish while there are lines to say it on. Raises `ParameterError`."""
    SamplingParams(**wish.parameters)  # type: ignore[arg-type]
    if wish.tools:
        from edge_llm.toolbox.builtin import builtin

        for name in wish.tools:
            builtin(name)


def _connector(model: str | None, config: EngineConfig, wish: Wish) -> Callable[[str | None], ChatBackend]:
    """What gives the backend of a model: by its name, or of the default one. Raises `InputError` for a bad address."""
    socket = shared_socket(model, config, wish)
    if wish.server is None and socket is None:
        return lambda name: LocalBackend(name or DEFAULT_MODEL, lambda: config)
    from edge_llm_chat.http_backend import HttpBackend

    slides = config.context_policy == "slide"
    if socket is not None:
        return lambda name: HttpBackend(LOCAL, model=name, socket=socket, name="your server", slides=slides)
    key, url = os.environ.get("OPENAI_API_KEY"), wish.server or ""
    return lambda name: HttpBackend(url, model=name, key=key, slides=slides)


def shared_socket(model: str | None, config: EngineConfig, wish: Wish) -> Path | None:
    """The socket of this user's own server, if one runs that may answer what this chat asks."""
    # what a private chat says must not get into the prefix cache of a server
    shares = wish.shared and wish.server is None and model is None and not config.private
    return running_server() if shares else None
