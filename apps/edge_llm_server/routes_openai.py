"""OpenAI's routes: /v1/models, /v1/chat/completions, /v1/completions, /v1/responses, /v1/embeddings."""

from __future__ import annotations

from typing import Any, TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel

from edge_llm.engine.info import EngineInfo
from edge_llm.errors import EdgeLLMError
from edge_llm_server.api_error import ApiError
from edge_llm_server.body import parse_body
from edge_llm_server.chat_shapes import ChatReply
from edge_llm_server.completion_shapes import CompletionReply
from edge_llm_server.embedding_shapes import EmbeddingBody, EmbeddingReply, check_dimensions, embedding_requests
from edge_llm_server.exchange import STATE
from edge_llm_server.generate import Generate
from edge_llm_server.response_bodies import NAMES, ResponseBody, response_requests
from edge_llm_server.response_shapes import ResponseReply
from edge_llm_server.schemas import ChatBody, CompletionBody, Generation
from edge_llm_server.service import Service
from edge_llm_server.translate import Caller, chat_requests, checked, completion_requests, prompts

B = TypeVar("B", bound=BaseModel)


async def body_of(request: Request, kind: type[B]) -> B:
    """The request's body as a `kind`. Raises `ApiError`."""
    return checked(kind, parse_body(await request.body()))


def caller_of(request: Request, service: Service) -> Caller:
    """Each key has prefixes, and a share of the engine, of its own."""
    return Caller(request.scope[STATE].key, service.settings.request_timeout_s)


def router(service: Service) -> APIRouter:
    routes = APIRouter()
    engines = service.engines

    @routes.get("/v1/models")
    async def models() -> Any:
        return {"object": "list", "data": [_model(service, name) for name in engines.names]}

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> Any:
        entry = _model(service, engines.name_of(name))
        if "meta" in entry:
            statistics = (await engines.run(engines.statistics)).get(entry["id"])
            entry["meta"]["kv_cache_bytes"] = None if statistics is None else statistics.kv_cache_bytes
        return entry

    @routes.post("/v1/chat/completions")
    async def chat(request: Request) -> Any:
        body = await body_of(request, ChatBody)
        name = engines.name_of(body.model)
        requests = chat_requests(body, caller_of(request, service))

        def shape(info: EngineInfo) -> ChatReply:
            return ChatReply(
                info.name, logprobs=bool(body.logprobs), usage_wanted=_wants_usage(body), service_tier=body.service_tier
            )

        return Generate(engines, name, requests, shape, param="messages", stream=bool(body.stream))

    @routes.post("/v1/completions")
    async def completions(request: Request) -> Any:
        body = await body_of(request, CompletionBody)
        name = engines.name_of(body.model)
        requests = completion_requests(body, caller_of(request, service))
        echoes = await _echoes(service, name, request.scope[STATE].key, body) if body.echo else ()

        def shape(info: EngineInfo) -> CompletionReply:
            return CompletionReply(
                info.name,
                prompts=len(requests) // (body.n or 1),
                echoes=echoes,
                logprobs=body.logprobs is not None,
                usage_wanted=_wants_usage(body),
            )

        return Generate(engines, name, requests, shape, param="prompt", stream=bool(body.stream))

    @routes.post("/v1/responses")
    async def responses(request: Request) -> Any:
        body = await body_of(request, ResponseBody)
        name = engines.name_of(body.model)
        requests = response_requests(body, caller_of(request, service))

        def shape(info: EngineInfo) -> ResponseReply:
            return ResponseReply(info.name, body)

        return Generate(engines, name, requests, shape, param="input", stream=bool(body.stream), names=NAMES)

    @routes.post("/v1/embeddings")
    async def embeddings(request: Request) -> Any:
        body = await body_of(request, EmbeddingBody)
        name = engines.name_of(body.model)
        check_dimensions(body.dimensions, service.cards[name].embedding)
        requests = embedding_requests(body.input, caller_of(request, service), body.pooling)

        def shape(info: EngineInfo) -> EmbeddingReply:
            return EmbeddingReply(info.name, base64=body.encoding_format == "base64")

        return Generate(engines, name, requests, shape, param="input", stream=False)

    return routes


def _wants_usage(body: Generation) -> bool:
    return body.stream_options is not None and body.stream_options.include_usage


async def _echoes(service: Service, name: str, owner: str, body: CompletionBody) -> tuple[str, ...]:
    """The prompt of each choice, as text."""
    given = prompts(body)
    texts = [prompt.get("text") for prompt in given]
    if None in texts:
        async with service.engines.use(name, owner) as client:
            for i, prompt in enumerate(given):
                if texts[i] is None:
                    try:
                        texts[i] = await service.engines.run(client.detokenize, prompt["token_ids"])
                    except EdgeLLMError as error:
                        raise ApiError.of(error, "prompt") from None
    return tuple(text or "" for text in texts for _ in range(body.n or 1))


def _model(service: Service, name: str) -> dict[str, Any]:
    created = int(service.cards[name].modified)
    entry: dict[str, Any] = {"id": name, "object": "model", "created": created, "owned_by": "edge_llm"}
    info = next((info for info in service.engines.loaded() if info.name == name), None)
    if info is not None:
        entry["max_model_len"] = info.context
        entry["meta"] = {
            "n_ctx": info.context,
            "n_vocab": info.vocab,
            "n_params": info.parameters,
            "size": info.weights_bytes,
            "notice": service.notice(info),
        }
    return entry
