"""Errors name the field that the client has sent, by its own name for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from edge_llm_server.fields import parameter_of

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
        (COMPLETIONS, {"prompt": []}, "prompt", "at least 1 item"),
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


def test_what_an_error_quotes_is_no_field() -> None:
    assert parameter_of(ParameterError("token 'seed' is unknown")) is None
    assert parameter_of(ParameterError("what was given: stop")) is None
    assert parameter_of(TemplateError("tools are not for this model")) is None
    assert parameter_of(ParameterError("temperature must be between 0 and 5, not -1")) == "temperature"
