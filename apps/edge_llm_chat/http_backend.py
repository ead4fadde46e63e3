"""HttpBackend: a model behind any OpenAI-compatible server, by its URL or our own server's unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from edge_llm.errors import EdgeLLMError, EngineStoppedError, InputError, RuntimeFailure
from edge_llm.messages import (
    Event,
    Message,
    Role,
    Tool,
)
from edge_llm.sampling.params import SamplingParams
from edge_llm_chat.backend import Answering, Ask, ModelChoice, ModelInfo, Progress
from edge_llm_chat.conversation import whole
from edge_llm_chat.http_events import ChunkReader, json_object, server_events

if TYPE_CHECKING:
    import httpx

_CONNECT_S, _READ_S, _FIGURE_S = 5.0, 600.0, 1.0
_PARAMETERS = (
    *(
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    ),
    "seed",
)


class HttpBackend:
    """`ChatBackend` over HTTP. Nothing is sent anywhere but to this server."""

    _kv_bytes: int | None = None
    _tells_kv_bytes = False

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
        self._client: httpx.AsyncClient | None = None
        self._answers: WeakSet[_HttpAnswering] = WeakSet()

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
        document = await self._get("/v1/models")
        listed = [
            item for item in document.get("data", ()) if isinstance(item, dict) and isinstance(item.get("id"), str)
        ]
        if self._model is None and not listed:
            raise InputError(f"{self.wanted} offers no model", hint="name one with --model")
        chosen = next((item for item in listed if item["id"] == self._model), listed[0] if listed else {})
        if self._model is not None and listed and chosen.get("id") != self._model:
            names = ", ".join(whole(item["id"]) for item in listed[:8])
            raise InputError(f"the server has no model {self._model!r}", hint=f"it has: {names}")
        self._tells_kv_bytes = chosen.get("owned_by") == "edge_llm"
        self._model = whole(self._model or chosen["id"])
        context = next(
            (chosen[key] for key in ("max_model_len", "context_length") if isinstance(chosen.get(key), int)), None
        )
        self._ours = any(item.get("owned_by") == "edge_llm" for item in listed)
        return ModelInfo(self._model, context, inspects=self._ours)  # others may not know logprobs

    async def answer(self, ask: Ask) -> Answering:
        if ask.prefix:
            raise InputError("this server cannot go on from a chosen token")
        if self._client is None or self._model is None:
            raise EngineStoppedError("the server is not connected")
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [_message(message) for message in ask.messages],
            "stream": True,
            "stream_options": {"include_usage": True},
            **_parameters(ask.params),
            **({"truncation": "auto"} if self._ours and self._slides else {}),
            **({"tools": [_tool(tool) for tool in ask.tools], "tool_choice": ask.tool_choice} if ask.tools else {}),
        }
        answering = _HttpAnswering(self._client, body, self._ask_for_kv_bytes)
        self._answers.add(answering)
        return answering

    async def models(self) -> list[ModelChoice]:
        listed = (await self._get("/v1/models")).get("data")
        names = [item.get("id") for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
        return [ModelChoice(whole(name)) for name in names if isinstance(name, str)]

    async def count(self, messages: tuple[Message, ...]) -> int | None:
        """By our server's and vLLM's /tokenize; None where there is none."""
        if self._client is None:
            return None
        body = {"model": self._model, "messages": [_message(message) for message in messages]}
        try:
            count = (await self._read(await self._client.post("/tokenize", json=body))).get("count")
        except Exception:
            return None
        return count if isinstance(count, int) else None

    def kv_bytes(self) -> int | None:
        """As our server told after the last answer."""
        return self._kv_bytes

    async def _ask_for_kv_bytes(self) -> None:
        from urllib.parse import quote

        if self._client is None or not self._tells_kv_bytes:
            return
        told: object = None
        with contextlib.suppress(Exception):  # it is only a figure
            path = f"/v1/models/{quote(self._model or '', safe='')}"
            told = (await self._read(await self._client.get(path, timeout=_FIGURE_S))).get("meta")
        meta = told if isinstance(told, dict) else {}
        self._kv_bytes = meta["kv_cache_bytes"] if isinstance(meta.get("kv_cache_bytes"), int) else None

    async def close(self) -> None:
        for answering in list(self._answers):
            answering.cancel()
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _get(self, path: str) -> dict[str, Any]:
        import httpx

        if self._client is None:
            raise EngineStoppedError("the connection was closed")
        try:
            return await self._read(await self._client.get(path))
        except httpx.HTTPError as error:
            raise _unreachable(self.wanted, error) from None

    async def _read(self, response: httpx.Response) -> dict[str, Any]:
        return _checked(response.status_code, response.content, response.headers)


class _HttpAnswering:
    """One streamed chat completion, as events."""

    def __init__(
        self, client: httpx.AsyncClient, body: dict[str, Any], afterwards: Callable[[], Awaitable[None]]
    ) -> None:
        """`afterwards` is awaited between the last word and the end."""
        self._client, self._body, self._afterwards = client, body, afterwards
        self._task: asyncio.Task[Any] | None = None
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True
        if self._task is not None:
            self._task.cancel()

    def __aiter__(self) -> AsyncIterator[Event]:
        return self._events()

    async def _events(self) -> AsyncIterator[Event]:
        queue: asyncio.Queue[Event | EdgeLLMError | None] = asyncio.Queue()
        told = ChunkReader(self._body.get("seed"))
        # the stream is read by a task of its own, so that a cancel interrupts any wait for the server
        self._task = asyncio.get_running_loop().create_task(self._pump(queue, told))
        if self._cancelled:
            self._task.cancel()
        try:
            while (item := await queue.get()) is not None:
                if isinstance(item, EdgeLLMError):
                    raise item
                yield item
            yield told.finished(cancelled=self._cancelled)
        finally:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _pump(self, queue: asyncio.Queue[Event | EdgeLLMError | None], told: ChunkReader) -> None:
        import httpx

        try:
            async with self._client.stream("POST", "/v1/chat/completions", json=self._body) as response:
                if response.status_code != 200:
                    _checked(response.status_code, await response.aread(), response.headers)
                async for data in server_events(response):
                    for event in told.take(data):
                        queue.put_nowait(event)
            await self._afterwards()
        except httpx.HTTPError as error:
            if not self._cancelled:
                queue.put_nowait(_unreachable("the server", error))
        except EdgeLLMError as error:
            queue.put_nowait(error)
        finally:
            queue.put_nowait(None)


def _checked(status: int, content: bytes, headers: Mapping[str, str]) -> dict[str, Any]:
    """The JSON object of a response. Raises what its status means."""
    if status == 200:
        return json_object(content.decode("utf-8", "replace"))
    try:
        fault = json.loads(content)["error"]["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        fault = f"the server answered with status {status}"
    text = whole(str(fault))[:500]
    if status == 401:
        raise InputError(text, hint="give the server's key in OPENAI_API_KEY")
    if status in (429, 503):
        wait = headers.get("retry-after")
        raise RuntimeFailure(text, hint=f"try again in {wait} s" if wait else "try again later")
    raise (InputError if 400 <= status < 500 else RuntimeFailure)(text)


def _unreachable(name: str, error: Exception) -> RuntimeFailure:
    return RuntimeFailure(
        f"{name} cannot be reached: {str(error) or type(error).__name__}", hint="is the server running?"
    )


def _message(message: Message) -> dict[str, Any]:
    """A message as OpenAI's API has it."""
    shown: dict[str, Any] = {"role": str(message.role), "content": message.content}
    if message.tool_calls:
        shown["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.role is Role.TOOL:
        shown["tool_call_id"] = message.tool_call_id or ""
    return shown


def _tool(tool: Tool) -> dict[str, Any]:
    parameters = json.loads(tool.parameters)
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": parameters},
    }


def _parameters(params: SamplingParams) -> dict[str, Any]:
    """What was set; servers do not like to be told of what was not."""
    neutral = SamplingParams()
    values = {name: getattr(params, name) for name in _PARAMETERS if getattr(params, name) != getattr(neutral, name)}
    if params.logprobs:
        values |= {"logprobs": True, "top_logprobs": params.top_logprobs}
    return values
