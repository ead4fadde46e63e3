"""Ollama's routes: /api/version, tags, ps, show, chat, generate, embed."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request

from edge_llm import __version__
from edge_llm.engine.info import EngineInfo
from edge_llm_server.api_error import ApiError
from edge_llm_server.cards import ModelCard
from edge_llm_server.embedding_shapes import OllamaEmbedBody, OllamaEmbedReply, check_dimensions, embedding_requests
from edge_llm_server.exchange import STATE
from edge_llm_server.fields import refusals
from edge_llm_server.generate import Generate
from edge_llm_server.ollama_bodies import NAMES, OllamaBody, OllamaChatBody, OllamaGenerateBody, ShowBody
from edge_llm_server.ollama_shapes import OllamaReply, Words, chat_words, generate_words, loaded
from edge_llm_server.routes_openai import body_of, caller_of
from edge_llm_server.schemas import ChatBody, CompletionBody
from edge_llm_server.service import Service
from edge_llm_server.translate import chat_requests, checked, completion_requests

TAG = ":latest"


def router(service: Service) -> APIRouter:
    routes = APIRouter(prefix="/api")
    engines = service.engines

    @routes.get("/version")
    async def version() -> Any:
        return {"version": __version__}

    @routes.get("/tags")
    async def tags() -> Any:
        return {"models": [_entry(service.cards[name]) for name in engines.names]}

    @routes.get("/ps")
    async def running() -> Any:
        infos = [info for info in engines.loaded() if info.name in service.cards]
        return {"models": [_running(service, info) for info in infos]}

    @routes.post("/show")
    async def show(request: Request) -> Any:
        body = await body_of(request, ShowBody)
        return _shown(service.cards[engines.name_of(_untagged(body.model or body.name))])

    @routes.post("/chat")
    async def chat(request: Request) -> Any:
        body = await body_of(request, OllamaChatBody)
        name = engines.name_of(_untagged(body.model))
        if not body.messages:
            return await _load(service, name, request.scope[STATE].key, chat_words)
        with refusals(names=NAMES):
            requests = chat_requests(checked(ChatBody, body.as_chat()), caller_of(request, service))
        return _generate(service, name, body, requests, chat_words, "messages")

    @routes.post("/generate")
    async def generate(request: Request) -> Any:
        body = await body_of(request, OllamaGenerateBody)
        name = engines.name_of(_untagged(body.model))
        if not body.prompt:
            return await _load(service, name, request.scope[STATE].key, generate_words)
        caller = caller_of(request, service)
        with refusals(names={**NAMES, "messages": "prompt"}):
            fields = body.as_chat()
            if body.raw:
                requests = completion_requests(checked(CompletionBody, fields), caller)
            else:
                requests = chat_requests(checked(ChatBody, fields), caller)
        return _generate(service, name, body, requests, generate_words, "prompt")

    @routes.post("/embed")
    async def embed(request: Request) -> Any:
        return _embed(service, request, await body_of(request, OllamaEmbedBody), older=False)

    @routes.post("/embeddings")
    async def embeddings(request: Request) -> Any:
        return _embed(service, request, await body_of(request, OllamaEmbedBody), older=True)

    return routes


def _embed(service: Service, request: Request, body: OllamaEmbedBody, *, older: bool) -> Generate:
    name = service.engines.name_of(_untagged(body.model))
    check_dimensions(body.dimensions, service.cards[name].embedding)
    field = "prompt" if older else "input"
    given = getattr(body, field)
    if given is None:
        raise ApiError.invalid(f"{field} is missing", field)
    requests = embedding_requests(given, caller_of(request, service))

    def shape(info: EngineInfo) -> OllamaEmbedReply:
        return OllamaEmbedReply(info.name, older)

    return Generate(service.engines, name, requests, shape, param=field, stream=False)


def _untagged(name: str | None) -> str | None:
    return name.removesuffix(TAG) if name else name


def _generate(service: Service, name: str, body: OllamaBody, requests: Any, words: Words, param: str) -> Generate:
    """Ollama streams unless it is told not to."""

    def shape(info: EngineInfo) -> OllamaReply:
        return OllamaReply(info.name, words, logprobs=bool(body.logprobs))

    streams = body.stream is not False
    return Generate(service.engines, name, requests, shape, param=param, stream=streams, names=NAMES)


async def _load(service: Service, name: str, owner: str, words: Words) -> dict[str, Any]:
    async with service.engines.use(name, owner) as client:
        return loaded(client.info.name, words)


def _entry(card: ModelCard) -> dict[str, Any]:
    return {
        "name": card.name + TAG,
        "model": card.name + TAG,
        "modified_at": card.modified_at,
        "size": card.size,
        "digest": card.digest,
        "details": card.details,
    }


def _running(service: Service, info: EngineInfo) -> dict[str, Any]:
    """A model that is never unloaded expires in a year."""
    left = service.settings.keep_alive_s
    expires = time.gmtime(time.time() + (365 * 86400 if left is None else left))
    entry = _entry(service.cards[info.name])
    return {
        **{name: value for name, value in entry.items() if name != "modified_at"},
        "expires_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", expires),
        "size_vram": 0,
        "context_length": info.context,
    }


def _shown(card: ModelCard) -> dict[str, Any]:
    family = card.architecture
    return {
        "license": card.license or "",
        "modelfile": "",
        "parameters": "",
        "template": "",
        "modified_at": card.modified_at,
        "details": card.details,
        "model_info": {
            "general.architecture": family,
            "general.basename": card.name,
            "general.parameter_count": card.parameters,
            f"{family}.context_length": card.context,
            f"{family}.embedding_length": card.embedding,
        },
        "capabilities": card.capabilities,
    }
