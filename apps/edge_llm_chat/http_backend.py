"""HttpBackend: a model behind any OpenAI-compatible server, by its URL or our own server's unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from edge_llm.errors import EngineStoppedError, InputError, RuntimeFailure
from edge_llm.messages import Message
from edge_llm_chat.backend import Answering, Ask, ModelChoice, ModelInfo, Progress
from edge_llm_chat.conversation import whole
from edge_llm_chat.http_answering import HttpAnswering, checked, unreachable
from edge_llm_chat.http_bodies import message_body, parameters_body, tool_body
from edge_llm_chat.http_events import integer

if TYPE_CHECKING:
    import httpx

_CONNECT_S, _READ_S, _FIGURE_S = 5.0, 600.0, 1.0
_LOAD_S, _RETRY_S = 600.0, 2.0
"""how long a model may take to be loaded, and between two questions whether it is"""
_MOST_NOTICE = 500
"""characters: more would be on the screen for minutes"""


class HttpBackend:
    """`ChatBackend` over HTTP. Nothing is sent anywhere but to this server."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        key: str | None = None,
        socket: Path | None = None,
        name: str = "",
        slides: bool = True,
    ) -> None:
        """`url` is the server's base, with or without /v1; `socket` the unix socket that it answers on; a server of ours is
        asked to let a conversation go on past the context, if it `slides`.

        Raises `InputError` for a URL that is none.
        """
        base = url.rstrip("/").removesuffix("/v1")
        if not base.startswith(("http://", "https://")):
            raise InputError(f"{url!r} is not the address of a server", hint="for example http://127.0.0.1:8000")
        self.wanted = model or name or base.split("://", 1)[1]
        self._base, self._model, self._key, self._socket = base, model, key, socket
        self._slides, self._ours = slides, False
        self._kv_bytes: int | None = None
        self._notice = ""
        self._client: httpx.AsyncClient | None = None
        self._answers: WeakSet[HttpAnswering] = WeakSet()

    async def load(self, progress: Progress) -> ModelInfo:
        """Ask the server for its models, and wait while it loads one."""
        import httpx

        progress("connecting", 0, 0)
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        transport = httpx.AsyncHTTPTransport(uds=str(self._socket)) if self._socket else None
        timeout = httpx.Timeout(_READ_S, connect=_CONNECT_S)
        # no proxy and no .netrc of the environment: what is asked here goes to this server and to nobody else
        self._client = httpx.AsyncClient(
            base_url=self._base, headers=headers, transport=transport, timeout=timeout, trust_env=False
        )
        document = await self._send("GET", "/v1/models")
        listed = [
            item for item in document.get("data", ()) if isinstance(item, dict) and isinstance(item.get("id"), str)
        ]
        if self._model is None and not listed:
            raise InputError(f"{self.wanted} offers no model", hint="name one with --model")
        chosen = next((item for item in listed if item["id"] == self._model), listed[0] if listed else {})
        if self._model is not None and listed and chosen.get("id") != self._model:
            names = ", ".join(whole(item["id"]) for item in listed[:8])
            raise InputError(f"the server has no model {self._model!r}", hint=f"it has: {names}")
        self._model = whole(self._model or chosen["id"])
        self._ours = any(item.get("owned_by") == "edge_llm" for item in listed)
        name = self._model
        if self._ours:
            progress("loading", 0, 0)
            name = await self._answering()
            chosen = await self._look(name)
        context = next(
            (size for key in ("max_model_len", "context_length") if (size := integer(chosen.get(key), None))), None
        )
        # others may not know logprobs, and do not tell the ids of tokens
        return ModelInfo(name, context, inspects=self._ours, forks=self._ours)

    async def _answering(self) -> str:
        """Wait until a server of ours has loaded the model; gives the name of that or of the fallback in its stead."""
        until = time.monotonic() + _LOAD_S  # a load that fails late is begun again by who asks, and would be for ever
        while True:
            response = await self._request("POST", "/api/generate", {"model": self._model})
            waits = response.status_code == 503 and "retry-after" in response.headers
            if not waits or time.monotonic() > until:
                return whole(str(self._read(response).get("model") or self._model))
            await asyncio.sleep(_RETRY_S)

    async def answer(self, ask: Ask) -> Answering:
        if self._client is None or self._model is None:
            raise EngineStoppedError("the server is not connected")
        params = parameters_body(ask.params)
        asked: dict[str, Any]
        if ask.prefix:
            path, asked = "/v1/completions", {"prompt": await self._beginning(ask)}
            if params.pop("logprobs", False):
                params["logprobs"] = params.pop("top_logprobs", 0)
        else:
            path, asked = "/v1/chat/completions", {"messages": [message_body(message) for message in ask.messages]}
            if ask.tools:
                asked |= {"tools": [tool_body(tool) for tool in ask.tools], "tool_choice": ask.tool_choice}
        body: dict[str, Any] = {
            "model": self._model,
            **asked,
            "stream": True,
            "stream_options": {"include_usage": True},
            **params,
            **({"truncation": "auto"} if self._ours and self._slides else {}),
        }
        answering = HttpAnswering(self._client, path, body, self._look)
        self._answers.add(answering)
        return answering

    async def _beginning(self, ask: Ask) -> list[int]:
        """The tokens of the conversation, and of the answer as far as it is given."""
        if not self._ours:
            raise InputError("this server cannot go on from a chosen token")
        if ask.tools:
            raise InputError("a server cannot go on from a chosen token with tools", hint="/tools off, then again")
        body = {"model": self._model, "messages": [message_body(message) for message in ask.messages]}
        ids = (await self._send("POST", "/tokenize", body)).get("tokens")
        if not isinstance(ids, list):
            raise RuntimeFailure("the server does not tell the tokens of a conversation")
        return [*ids, *(token.token_id for token in ask.prefix)]

    async def models(self) -> list[ModelChoice]:
        listed = (await self._send("GET", "/v1/models")).get("data")
        names = [item.get("id") for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
        return [ModelChoice(whole(name)) for name in names if isinstance(name, str)]

    async def count(self, messages: tuple[Message, ...]) -> int | None:
        """By our server's and vLLM's /tokenize; None where there is none."""
        if self._client is None:
            return None
        body = {"model": self._model, "messages": [message_body(message) for message in messages]}
        try:
            count = self._read(await self._client.post("/tokenize", json=body)).get("count")
        except Exception:
            return None
        return integer(count, None)

    def notice(self) -> str:
        """As our server told when the model was loaded, or after the last answer."""
        return self._notice

    def kv_bytes(self) -> int | None:
        """As our server told after the last answer."""
        return self._kv_bytes

    async def _look(self, name: str) -> dict[str, Any]:
        """What a server of ours tells of the model that has answered; the asked one, or the fallback in its stead."""
        from urllib.parse import quote

        if self._client is None or not self._ours:
            return {}
        entry: dict[str, Any] = {}
        with contextlib.suppress(Exception):  # nobody needs it to talk
            path = f"/v1/models/{quote(name, safe='')}"
            entry = self._read(await self._client.get(path, timeout=_FIGURE_S))
        meta = entry["meta"] if isinstance(entry.get("meta"), dict) else {}
        self._kv_bytes = integer(meta.get("kv_cache_bytes"), None)
        instead = f"{self._model} cannot be used: {name} answers for it" if name != self._model else ""
        notice = "; ".join(part for part in (instead, meta.get("notice")) if part and isinstance(part, str))
        self._notice = notice[:_MOST_NOTICE]
        return entry

    async def close(self) -> None:
        for answering in list(self._answers):
            answering.cancel()
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._read(await self._request(method, path, body))

    async def _request(self, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
        import httpx

        if self._client is None:
            raise EngineStoppedError("the connection was closed")
        try:
            return await self._client.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise unreachable(self.wanted, error) from None

    def _read(self, response: httpx.Response) -> dict[str, Any]:
        return checked(response.status_code, response.content, response.headers)
