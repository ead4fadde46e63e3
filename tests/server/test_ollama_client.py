"""Ollama's own client against the server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest

from edge_llm.config import EngineConfig
from edge_llm.engine.assembly import open_engine
from edge_llm.engine.client import ThreadClient
from edge_llm.kernels.warmup import KernelLibrary
from tests.engine.fakes import PARIS, make_core, says
from tests.server.harness import Running, running
from tests.server.test_tools import CITIES, SCHEMA, thinking_core

CHAT = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(lambda: make_core(says(PARIS)), models=("fake", "other"), keep_alive_s=60.0) as made:
        yield made


@pytest.fixture
def client(server: Running) -> Iterator[ollama.Client]:
    with ollama.Client(server.url) as made:
        yield made


def test_a_chat(client: ollama.Client) -> None:
    reply = client.chat("fake", CHAT, options={"temperature": 0})
    assert (reply.message.role, reply.message.content) == ("assistant", PARIS)
    assert (reply.model, reply.done, reply.done_reason) == ("fake", True, "stop")
    assert reply.eval_count == len(PARIS.encode()) + 1
    assert reply.prompt_eval_count
    assert reply.total_duration
    assert reply.eval_duration
    assert reply.total_duration > reply.eval_duration > 0
    assert reply.total_duration < 60e9
    assert client.chat("fake:latest", CHAT, options={"num_predict": 4, "temperature": 0}).done_reason == "length"


def test_a_chat_in_pieces(client: ollama.Client) -> None:
    pieces = list(client.chat("fake", CHAT, stream=True, options={"temperature": 0}))
    assert "".join(piece.message.content or "" for piece in pieces) == PARIS
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].eval_count == len(PARIS.encode()) + 1


def test_it_streams_unless_it_is_told_not_to(server: Running) -> None:
    body = {"model": "fake", "messages": CHAT, "options": {"temperature": 0, "num_predict": 2}}
    reply = httpx.post(f"{server.url}/api/chat", json=body)
    assert reply.headers["content-type"] == "application/x-ndjson"
    assert [json.loads(line)["done"] for line in reply.text.splitlines()] == [False, False, True]


def test_a_text_is_answered_or_continued(client: ollama.Client) -> None:
    options = {"temperature": 0}
    answered = client.generate("fake", "What?", system="Be brief.", options=options)
    assert (answered.response, answered.done_reason) == (PARIS, "stop")
    raw = client.generate("fake", "x", raw=True, options=options)
    assert (raw.response, raw.prompt_eval_count) == (PARIS, 1)
    pieces = client.generate("fake", "What?", stream=True, options=options)
    assert "".join(piece.response or "" for piece in pieces) == PARIS
    stopped = client.generate("fake", "What?", options={"temperature": 0, "stop": ["—"]})
    assert stopped.response == "Paris "


def test_logprobs(client: ollama.Client) -> None:
    reply = client.chat("fake", CHAT, options={"temperature": 0, "num_predict": 3}, logprobs=True, top_logprobs=2)
    assert [token.token for token in reply.logprobs or ()] == list("Par")
    assert all(len(token.top_logprobs or ()) == 2 for token in reply.logprobs or ())


def test_without_words_the_model_is_only_loaded(client: ollama.Client) -> None:
    assert client.generate("fake", "").done_reason == "load"
    assert client.chat("fake", []).done_reason == "load"


def test_what_is_there(client: ollama.Client, server: Running) -> None:
    models = client.list().models
    assert [model.model for model in models] == ["fake:latest", "other:latest"]
    assert models[0].details is not None
    assert (models[0].size, models[0].details.parameter_size) == (123_456, "135M")
    shown = client.show("fake:latest")
    assert shown.modelinfo is not None
    assert shown.modelinfo["llama.context_length"] == 4096
    assert shown.capabilities == ["completion", "tools", "thinking"]
    loaded = client.ps().models
    assert [model.model for model in loaded] == ["fake:latest"]
    assert loaded[0].expires_at is not None
    assert loaded[0].expires_at.year < 2100
    assert httpx.get(f"{server.url}/api/version").json()["version"]


def test_its_program_finds_a_server(server: Running) -> None:
    """`ollama run` asks so before anything else, and gives up at any error."""
    assert httpx.head(f"{server.url}/").status_code == 200
    reply = httpx.get(f"{server.url}/")
    assert (reply.text, reply.headers["content-type"]) == ("edge_llm is running", "text/plain; charset=utf-8")


def test_what_is_not_there_is_said_in_its_words(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="there is no model 'none'") as caught:
        client.chat("none", CHAT)
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="exceeds the available context size") as caught:
        next(iter(client.chat("fake", [{"role": "user", "content": "x" * 999}], stream=True)))
    assert caught.value.status_code == 400


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"options": {"mirostat": 1}}, "mirostat"),
        ({"options": {"repeat_last_n": 5}}, "repeat_last_n"),
        ({"options": {"tfs_z": 0.5}}, "tfs_z"),
        ({"options": {"penalize_newline": False}}, "penalize_newline"),
        ({"options": {"whatever": 1}}, "whatever"),
        ({"template": "x"}, "template"),
        ({"suffix": "x"}, "suffix"),
        ({"context": [1, 2]}, "context"),
        ({"images": [b"x"]}, "images"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(client: ollama.Client, options: Any, named: str) -> None:
    with pytest.raises(ollama.ResponseError, match=named):
        client.generate("fake", "x", **options)


def test_how_it_is_loaded_is_not_the_clients_affair(client: ollama.Client) -> None:
    options = {
        "num_ctx": 4096,
        "num_thread": 64,
        "num_gpu": 99,
        "num_keep": 5,
        "penalize_newline": True,
        "num_predict": -1,
    }
    assert client.chat("fake", CHAT, options={**options, "temperature": 0}, keep_alive="5m").message.content == PARIS


def test_many_at_a_time_without_threads(server: Running) -> None:
    async def ask() -> list[str | None]:
        async with ollama.AsyncClient(server.url) as client:
            asked = [client.chat("fake", CHAT, options={"temperature": 0}) for _ in range(4)]
            return [reply.message.content for reply in await asyncio.gather(*asked)]

    assert asyncio.run(ask()) == [PARIS] * 4


def test_calls_thoughts_and_results() -> None:
    def weather(city: str) -> str:
        """The sky.

        Args:
            city: where
        """
        return city

    tool = {"type": "function", "function": {"name": "weather", "description": "The sky.", "parameters": SCHEMA}}
    with running(thinking_core) as server, ollama.Client(server.url) as client:
        messages: list[Any] = [{"role": "user", "content": "Rain?"}]
        reply = client.chat("fake", messages, tools=[tool], think=True, options={"temperature": 0})
        assert (reply.message.thinking or "").strip() == "Look outside."
        assert [call.function.arguments for call in reply.message.tool_calls or ()] == [
            {"city": city} for city in CITIES
        ]
        results = [{"role": "tool", "tool_name": "weather", "content": "sun"} for _ in CITIES]
        again = client.chat("fake", [*messages, reply.message, *results], tools=[weather], options={"temperature": 0})
        assert again.prompt_eval_count is not None
        assert reply.prompt_eval_count is not None
        assert again.prompt_eval_count > reply.prompt_eval_count
        pieces = list(client.chat("fake", messages, tools=[tool], stream=True, options={"temperature": 0}))
        calls = [call for piece in pieces for call in piece.message.tool_calls or ()]
        assert [call.function.arguments for call in calls] == [{"city": city} for city in CITIES]
        assert pieces[-1].done_reason == "stop"


def test_forms(tiny_folder: Path, kernels: KernelLibrary) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    config = EngineConfig(context=512, slots=1, max_chunk=64)
    with (
        running(load=lambda _: ThreadClient(open_engine(tiny_folder, config)), models=("tiny",)) as server,
        ollama.Client(server.url) as client,
    ):
        reply = client.chat("tiny", CHAT, format=schema, options={"num_predict": 60})
        assert json.loads(reply.message.content or "") in ({"a": 1}, {"a": 2})
        vectors = client.embed("tiny", ["one", "two"])
        assert [len(vector) for vector in vectors.embeddings] == [64, 64]
        assert vectors.prompt_eval_count
        assert client.embeddings("tiny", "one").embedding == pytest.approx(vectors.embeddings[0])
        with pytest.raises(ollama.ResponseError, match="input is empty"):
            client.embed("tiny", "")
