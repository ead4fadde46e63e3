"""LocalBackend: a model in this process, loaded behind the screen."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_llm.errors import EdgeLLMError, EngineStoppedError
from edge_llm.messages import Message
from edge_llm_chat.aside import aside
from edge_llm_chat.backend import Answering, Ask, ModelChoice, ModelInfo, Progress

if TYPE_CHECKING:
    from edge_llm.config import EngineConfig
    from edge_llm.engine.client import ThreadClient
    from edge_llm.engine.core import EngineCore

_CLOSE_S = 2.0
"""how long an end may wait for a loading to notice it"""


class _Cancelled(Exception):  # noqa: N818 - it is the way out of a loading, not an error
    """Raised inside a loading that nobody waits for any more."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    core: EngineCore
    client: ThreadClient


class LocalBackend:
    """`ChatBackend` over an engine of our own. Heavy imports happen on the thread that loads."""

    def __init__(self, model: str, configure: Callable[[], EngineConfig]) -> None:
        """`model` as for `Engine.load`; `configure` is called on the loading thread and may raise `ParameterError`."""
        self.wanted = model
        self._configure = configure
        self._loaded: _Loaded | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    async def load(self, progress: Progress) -> ModelInfo:
        try:
            return await aside(lambda: self._load(progress))
        except _Cancelled:
            raise EngineStoppedError("the loading was stopped") from None

    def _load(self, progress: Progress) -> ModelInfo:
        def report(stage: str, done: int, total: int) -> None:
            if self._closed.is_set():
                raise _Cancelled
            progress(stage, done, total)

        self._thread = threading.current_thread()
        report("starting", 0, 0)
        config = self._configure()
        from edge_llm.engine.assembly import open_engine
        from edge_llm.engine.client import ThreadClient
        from edge_llm.install.importer import resolve

        folder = resolve(self.wanted, report)
        report("loading", 0, 0)
        core = open_engine(folder, config, report)
        client = ThreadClient(core)
        self._loaded = _Loaded(core, client)
        if self._closed.is_set():
            client.close()
            raise _Cancelled
        info = client.info
        return ModelInfo(
            name=info.name,
            context=info.context,
            tokenizer_digest=info.tokenizer_digest,
            inspects=True,
            forks=True,
            end_ids=frozenset(core.intake.manifest.tokens.eos),
        )

    async def answer(self, ask: Ask) -> Answering:
        return await asyncio.to_thread(self._submit, ask)

    def _submit(self, ask: Ask) -> Answering:
        from edge_llm.engine.request import Request

        loaded = self._ready()
        if not ask.prefix:
            return loaded.client.submit(
                Request.chat(ask.messages, ask.params, tools=ask.tools, tool_choice=ask.tool_choice)
            )
        ids = loaded.client.tokenize(Request.chat(ask.messages, tools=ask.tools))
        ids += [token.token_id for token in ask.prefix]
        return loaded.client.submit(Request(token_ids=tuple(ids), params=ask.params))

    async def models(self) -> list[ModelChoice]:
        from edge_llm_chat.models import choices

        return await asyncio.to_thread(choices)

    async def count(self, messages: tuple[Message, ...]) -> int | None:
        return await asyncio.to_thread(self._count, messages)

    def _count(self, messages: tuple[Message, ...]) -> int | None:
        from edge_llm.engine.request import Request

        if self._loaded is None:
            return None
        try:
            return len(self._ready().client.tokenize(Request.chat(messages)))
        except EdgeLLMError:
            return None

    def notice(self) -> str:
        return "" if self._loaded is None else self._loaded.client.info.chat_notice

    def kv_bytes(self) -> int | None:
        if self._loaded is None or self._closed.is_set():
            return None
        return self._loaded.core.cache.used_bytes

    async def close(self) -> None:
        self._closed.set()
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        if self._loaded is not None:
            self._loaded.client.close()
        elif self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _ready(self) -> _Loaded:
        if self._loaded is None or self._closed.is_set():
            raise EngineStoppedError("the model is not loaded")
        return self._loaded
