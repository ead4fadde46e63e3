"""Routes of our own and llama-server's: health and readiness, metrics, tokens."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response

from edge_llm.engine.request import Request as EngineRequest
from edge_llm.errors import EdgeLLMError
from edge_llm_server.api_error import ApiError
from edge_llm_server.exchange import STATE
from edge_llm_server.prometheus import CONTENT_TYPE, exposition
from edge_llm_server.routes_openai import body_of
from edge_llm_server.schemas import DetokenizeBody, TokenizeBody
from edge_llm_server.service import Service
from edge_llm_server.translate import message

_LONG_BYTES = 64 << 10
"""a text of which the tokens take long to find: one at a time, so that it holds up nobody's requests"""
_SHORT_AT_A_TIME = 16


def router(service: Service) -> APIRouter:
    routes = APIRouter()
    engines = service.engines
    long_texts = asyncio.Semaphore(1)
    short_texts = asyncio.Semaphore(_SHORT_AT_A_TIME)

    @routes.get("/")
    @routes.head("/", include_in_schema=False)
    async def root() -> Any:
        """Ollama's client asks for it first, and takes any error for a server that is not there."""
        return Response("edge_llm is running", media_type="text/plain")

    @routes.get("/health")
    @routes.head("/health", include_in_schema=False)
    async def health() -> Any:
        """The process is there; whether it can answer is said by /ready."""
        return {"status": "ok"}

    @routes.get("/ready")
    @routes.head("/ready", include_in_schema=False)
    async def ready() -> Any:
        if engines.draining:
            raise ApiError.unavailable("the server is stopping", 5.0)
        if not engines.ready:
            raise ApiError.unavailable("Loading model", 1.0)
        return {"status": "ready"}

    @routes.get("/metrics")
    async def metrics() -> Any:
        statistics = await engines.run(engines.statistics)
        return Response(exposition(statistics, service.counts, dict(service.quality)), media_type=CONTENT_TYPE)

    @routes.post("/tokenize")
    async def tokenize(request: Request) -> Any:
        body = await body_of(request, TokenizeBody)
        given = [text for text in (body.content, body.prompt) if text is not None]
        if len(given) + (body.messages is not None) != 1:
            raise ApiError.invalid("exactly one of content, prompt and messages is needed")
        try:
            if body.messages is not None:
                asked = EngineRequest(messages=tuple(map(message, body.messages)))
            else:
                asked = EngineRequest(text=given[0])
            async with engines.use(engines.name_of(body.model), request.scope[STATE].key) as client:
                async with long_texts if request.scope[STATE].bytes_in > _LONG_BYTES else short_texts:
                    tokens = await engines.run(client.tokenize, asked)
                return {"tokens": tokens, "count": len(tokens), "max_model_len": client.info.context}
        except EdgeLLMError as error:
            raise ApiError.of(error) from None

    @routes.post("/detokenize")
    async def detokenize(request: Request) -> Any:
        body = await body_of(request, DetokenizeBody)
        try:
            async with engines.use(engines.name_of(body.model), request.scope[STATE].key) as client:
                text = await engines.run(client.detokenize, body.tokens)
                return {"content": text, "prompt": text}
        except EdgeLLMError as error:
            raise ApiError.of(error, "tokens") from None

    return routes
