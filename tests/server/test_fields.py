"""Errors name the field that the client has sent, by its own name for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from edge_llm_server.embedding_shapes import EmbeddingBody
from edge_llm_server.fields import parameter_of
from edge_llm_server.ollama_bodies import OllamaChatBody
from edge_llm_server.response_bodies import ResponseBody
from edge_llm_server.routes_batches import BatchBody
from edge_llm_server.schemas import ChatBody, CompletionBody
from pydantic import BaseModel, ValidationError

from edge_llm.errors import ParameterError, TemplateError
from tests.engine.fakes import make_core, says
from tests.server.harness import Running, running

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
EMBEDDINGS, OLLAMA, GENERATE = "/v1/embeddings", "/api/chat", "/api/generate"
MESSAGES = [{"role": "user", "content": "hello"}]
REQUIRED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES},
    COMPLETIONS: {"prompt": "hello"},
    RESPONSES: {"input": "hello"},
    EMBEDDINGS: {"input": "hello"},
    OLLAMA: {"model": "fake", "messages": MESSAGES},
    GENERATE: {"model": "fake", "prompt": "hello"},
}
PATTERN = {"type": "string", "pattern": "("}
ODD = {"type": "object", "properties": {"a": PATTERN}}


def named(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(lambda: make_core(says("ok"), context=2048)) as made:
        yield made


@pytest.mark.parametrize(
    ("path", "body", "param", "word"),
    [
        (CHAT, {"regex": "("}, "regex", "the regex"),
        (CHAT, {"regex": "a{99999}"}, "regex", "the regex"),
        (CHAT, {"grammar": "start: foo"}, "grammar", "foo"),
        (CHAT, {"response_format": named(PATTERN)}, "response_format", "unclosed group"),
        (CHAT, {"response_format": named({"type": "foo"})}, "response_format", "foo"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format", "'response_format.json_schema'"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", "json_schema.name'"),
        (CHAT, {"response_format": {"type": "xml"}}, "response_format", "'response_format'"),
        (CHAT, {"choices": ["a", "a"]}, "choices", "choices"),
        (CHAT, {"choices": ["x" * 200]}, "choices", "the choice"),
        (CHAT, {"stop": ""}, "stop", "stop"),
        (CHAT, {"max_completion_tokens": -5}, "max_completion_tokens", "max_completion_tokens must"),
        (CHAT, {"max_completion_tokens": -5, "max_tokens": 3}, "max_completion_tokens", "max_completion_tokens must"),
        (CHAT, {"max_tokens": -5}, "max_tokens", "max_tokens must"),
        (CHAT, {"n_predict": -5}, "n_predict", "n_predict must"),
        (CHAT, {"repeat_penalty": -5}, "repeat_penalty", "repeat_penalty must"),
        (CHAT, {"repetition_penalty": -5}, "repetition_penalty", "repetition_penalty must"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs must"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools", "f g"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages", "'messages.0.content'"),
        (CHAT, {"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "messages", "'messages.0.content.0.type'"),
        (CHAT, {"messages": [{"role": "boss", "content": "a"}]}, "messages", "'messages.0.role'"),
        (CHAT, {"messages": []}, "messages", "'messages': it must not be empty"),
        (CHAT, {"messages": MESSAGES * 600}, "messages", "context"),
        (
            CHAT,
            {
                "tools": [{"type": "function", "function": {"name": "odd", "parameters": ODD}}],
                "tool_choice": "required",
            },
            "tool_choice",
            "the tool odd: the json_schema",
        ),
        (CHAT, {"tools": [{"type": "web_search"}]}, "tools", "'tools.0.type'"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools", "'tools.0.function'"),
        (CHAT, {"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "'tool_choice.function'"),
        (CHAT, {"tool_choice": "maybe"}, "tool_choice", "'none', 'auto' or 'required'"),
        (CHAT, {"json_schema": {}}, "json_schema", "json_schema is not supported"),
        (CHAT, {"echo": True}, "echo", "echo is not supported"),
        (CHAT, {"max_output_tokens": 5}, "max_output_tokens", "max_output_tokens is not supported"),
        (COMPLETIONS, {"max_completion_tokens": 5}, "max_completion_tokens", "max_completion_tokens is not supported"),
        (COMPLETIONS, {"tools": [1]}, "tools", "tools is not supported"),
        (RESPONSES, {"reasoning_effort": "none"}, "reasoning_effort", "reasoning_effort is not supported"),
        (COMPLETIONS, {"prompt": []}, "prompt", "'prompt': it must not be empty"),
        (COMPLETIONS, {"logprobs": 99}, "logprobs", "logprobs must"),
        (COMPLETIONS, {"prompt": [10**6]}, "prompt", "token ids"),
        (COMPLETIONS, {"prompt": ["a", 5]}, "prompt", "'prompt.1'"),
        (RESPONSES, {"max_output_tokens": -5}, "max_output_tokens", "max_output_tokens must"),
        (RESPONSES, {"input": "word " * 5000}, "input", "context"),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "a", "schema": PATTERN}}}, "text", "unclosed"),
        (RESPONSES, {"text": {"format": {"type": "xml"}}}, "text", "'text'"),
        (RESPONSES, {"input": [{"role": "user", "content": 5}]}, "input", "'input.0.content'"),
        (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools", "'tools.0.type'"),
        (RESPONSES, {"n": 2}, "n", "one answer"),
        (RESPONSES, {"response_format": named({})}, "text", "text.format"),
        (RESPONSES, {"repeat_penalty": -5}, "repeat_penalty", "repeat_penalty must"),
        (RESPONSES, {"regex": "("}, "regex", "the regex"),
        (EMBEDDINGS, {"normalize": False}, "normalize", "normalize is not supported"),
        (EMBEDDINGS, {"input": [[10**6]]}, "input", "token ids"),
        (OLLAMA, {"options": {"num_predict": -5}}, None, "num_predict must"),
        (OLLAMA, {"format": PATTERN}, None, "unclosed group"),
        (GENERATE, {"options": {"repeat_penalty": -5}}, None, "repeat_penalty must"),
    ],
)
def test_an_error_names_the_field(server: Running, path: str, body: Any, param: str | None, word: str) -> None:
    reply = httpx.post(server.url + path, json=REQUIRED[path] | body, timeout=30)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    if param is None:  # Ollama's clients are told in words only
        assert word in error
    else:
        assert (error["param"], word in error["message"]) == (param, True), error


MANY: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (CompletionBody, {"prompt": ["a"] * 100_000}),
    (CompletionBody, {"prompt": [["a"]] * 100_000}),
    (CompletionBody, {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(100_000)), "a")}),
    (CompletionBody, {"prompt": "a", "stop": [1] * 100_000}),
    (ChatBody, {"messages": [{}] * 100_000}),
    (ChatBody, {"messages": [{"role": "user", "content": [{}] * 250}] * 2000}),
    (ChatBody, {"messages": [{"role": "user", "content": "a", "tool_calls": [{}] * 120}] * 2000}),
    (ResponseBody, {"input": [{}] * 100_000}),
    (ResponseBody, {"input": "a", "metadata": dict.fromkeys(map(str, range(100_000)), 1)}),
    (EmbeddingBody, {"input": [["a"]] * 100_000}),
    (OllamaChatBody, {"model": "a", "messages": [{}] * 100_000}),
    (BatchBody, {"metadata": dict.fromkeys(map(str, range(100_000)), 1)}),
]


@pytest.mark.parametrize(("kind", "body"), MANY)
def test_a_body_of_a_million_faults_is_refused_for_a_few(kind: type[BaseModel], body: dict[str, Any]) -> None:
    """F11, F19: a million errors are seconds in which nobody else is answered."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() < 40


def test_what_an_error_quotes_is_no_field() -> None:
    assert parameter_of(ParameterError("token 'seed' is unknown")) is None
    assert parameter_of(ParameterError("what was given: stop")) is None
    assert parameter_of(TemplateError("tools are not for this model")) is None
    assert parameter_of(ParameterError("temperature must be between 0 and 5, not -1")) == "temperature"
