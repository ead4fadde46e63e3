"""What the urls of a batch mean: from a body to requests, and from their answers to the reply, as the server does it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from edge_llm_server.answer import Answer
from edge_llm_server.api_error import ApiError
from edge_llm_server.chat_shapes import ChatReply
from edge_llm_server.completion_shapes import CompletionReply
from edge_llm_server.embedding_shapes import EmbeddingBody, EmbeddingReply, check_dimensions, embedding_requests
from edge_llm_server.fields import Names
from edge_llm_server.response_bodies import NAMES, ResponseBody, response_requests
from edge_llm_server.response_shapes import ResponseReply
from edge_llm_server.schemas import ChatBody, CompletionBody
from edge_llm_server.translate import Caller, chat_requests, checked, completion_requests, prompts

from edge_llm.engine.handle import Handle
from edge_llm.engine.info import EngineInfo
from edge_llm.engine.request import Request
from edge_llm.errors import EdgeLLMError, quoted


class Answering(Protocol):
    """What a batch asks of an engine."""

    info: EngineInfo

    def submit(self, request: Request) -> Handle: ...

    def detokenize(self, token_ids: Iterable[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class Asked:
    """What a body asks for. `param` is its field that a prompt which is too long came from, `names` what it calls others."""

    requests: Sequence[Request]
    reply: Callable[[Sequence[Answer]], dict[str, Any]]
    param: str
    names: Names = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Defaults:
    """What holds for all lines. `model` is the name by which the user asked for it, None for any name at all;
    `max_tokens` is for those that name no limit."""

    model: str | None
    max_tokens: int | None

    def applied(self, request: Request) -> Request:
        params = request.params
        if params.max_tokens is None and request.embedding is None:
            params = params.with_options(max_tokens=self.max_tokens)
        return replace(request, params=params, priority="batch")


def asked(url: str, raw: Mapping[str, Any], engine: Answering, defaults: Defaults) -> Asked:
    """What a body means. Raises `ApiError` for one that cannot be followed."""
    found = ENDPOINTS[url](raw, engine)
    wanted, names = raw.get("model"), (defaults.model, engine.info.name)
    if defaults.model is not None and wanted and wanted not in names:
        message = f"this batch is answered by {engine.info.name}, not by {quoted(wanted)} (--any-model takes any name)"
        raise ApiError(404, message, param="model", code="model_not_found")
    return replace(found, requests=[defaults.applied(request) for request in found.requests])


def _chat(raw: Mapping[str, Any], engine: Answering) -> Asked:
    body = checked(ChatBody, raw)
    reply = ChatReply(engine.info.name, logprobs=bool(body.logprobs), service_tier=body.service_tier)
    return Asked(chat_requests(body, Caller()), reply.whole, "messages")


def _completion(raw: Mapping[str, Any], engine: Answering) -> Asked:
    body = checked(CompletionBody, raw)
    requests = completion_requests(body, Caller())
    reply = CompletionReply(
        engine.info.name,
        prompts=len(requests) // (body.n or 1),
        echoes=_echoes(body, engine) if body.echo else (),
        logprobs=body.logprobs is not None,
    )
    return Asked(requests, reply.whole, "prompt")


def _echoes(body: CompletionBody, engine: Answering) -> tuple[str, ...]:
    """The prompt of each choice, as text."""
    try:
        texts = [one["text"] if "text" in one else engine.detokenize(one["token_ids"]) for one in prompts(body)]
    except EdgeLLMError as error:
        raise ApiError.of(error, "prompt") from None
    return tuple(text for text in texts for _ in range(body.n or 1))


def _embeddings(raw: Mapping[str, Any], engine: Answering) -> Asked:
    body = checked(EmbeddingBody, raw)
    reply = EmbeddingReply(engine.info.name, base64=body.encoding_format == "base64")

    def whole(answers: Sequence[Answer]) -> dict[str, Any]:
        check_dimensions(body.dimensions, len(answers[0].end.embedding))
        return reply.whole(answers)

    return Asked(embedding_requests(body.input, Caller(), body.pooling), whole, "input")


def _response(raw: Mapping[str, Any], engine: Answering) -> Asked:
    body = checked(ResponseBody, raw)
    return Asked(response_requests(body, Caller()), ResponseReply(engine.info.name, body).whole, "input", NAMES)


ENDPOINTS: Mapping[str, Callable[[Mapping[str, Any], Answering], Asked]] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    "/v1/responses": _response,
    "/v1/embeddings": _embeddings,
}
