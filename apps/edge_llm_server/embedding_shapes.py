"""Embeddings: what OpenAI's and Ollama's clients send, and what they read."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from edge_llm.engine.request import Request
from edge_llm_server.answer import Answer
from edge_llm_server.api_error import ApiError
from edge_llm_server.schemas import Body, Ids, Text, Word
from edge_llm_server.translate import Caller

MAX_INPUTS = 2048
_POOLING = "mean"

Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]


class EmbeddingBody(Body):
    """POST /v1/embeddings. The SDK asks for base64 unless its user says otherwise."""

    model: Word | None = None
    input: Text | Ids | Texts | Annotated[list[Ids], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    pooling: Literal["mean", "last"] | None = None


class OllamaEmbedBody(Body):
    """POST /api/embed, and with `prompt` the older /api/embeddings."""

    model: Word
    input: Text | Texts | None = None
    prompt: Text | None = None
    dimensions: int | None = None


def inputs(given: Any) -> list[dict[str, Any]]:
    """What each input is to a `Request`."""
    if isinstance(given, str):
        return [{"text": given}]
    if given and isinstance(given[0], int):
        return [{"token_ids": tuple(given)}]
    return [{"text": one} if isinstance(one, str) else {"token_ids": tuple(one)} for one in given]


def embedding_requests(given: Any, caller: Caller, pooling: str | None = None) -> list[Request]:
    """A request for each input. Raises `ApiError`."""
    wanted = inputs(given)
    if not wanted or any(not next(iter(one.values())) for one in wanted):
        raise ApiError.invalid("an input is empty", "input")
    return [
        Request(
            **one,
            embedding=pooling or _POOLING,
            namespace=caller.namespace,
            owner=caller.namespace,
            timeout_s=caller.timeout_s,
            priority="normal",
        )
        for one in wanted
    ]


def check_dimensions(wanted: int | None, size: int) -> None:
    """Raises `ApiError` for another size than the model's: cutting a vector short would change what it means."""
    if wanted is not None and wanted != size:
        raise ApiError.invalid(f"the vectors of this model have {size} dimensions", "dimensions")


@dataclass(frozen=True, slots=True)
class EmbeddingReply:
    """OpenAI's list of embeddings."""

    model: str
    base64: bool

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        data = [
            {"object": "embedding", "index": index, "embedding": self._encoded(answer.end.embedding)}
            for index, answer in enumerate(answers)
        ]
        tokens = _prompt_tokens(answers)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": self.model, "usage": usage}

    def _encoded(self, vector: Sequence[float]) -> list[float] | str:
        if not self.base64:
            return list(vector)
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")


@dataclass(frozen=True, slots=True)
class OllamaEmbedReply:
    """Ollama's, of the newer kind or the older."""

    model: str
    older: bool

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        vectors = [list(answer.end.embedding) for answer in answers]
        if self.older:
            return {"embedding": vectors[0]}
        total = max(answer.end.timings.total_s for answer in answers)
        numbers = {"total_duration": int(total * 1e9), "load_duration": 0, "prompt_eval_count": _prompt_tokens(answers)}
        return {"model": self.model, "embeddings": vectors, **numbers}


def _prompt_tokens(answers: Sequence[Answer]) -> int:
    return sum(answer.end.usage.prompt_tokens for answer in answers)
