"""Every field at and beyond its bounds, and bodies with something wrong in them: an answer or a 4xx, never a 5xx (F10, F11)."""

from __future__ import annotations

import asyncio
import copy
import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from edge_llm_server.app import create_app
from edge_llm_server.embedding_shapes import EmbeddingBody, OllamaEmbedBody
from edge_llm_server.engines import Engines
from edge_llm_server.exchange import Log, RequestCounts
from edge_llm_server.limits import Limits
from edge_llm_server.ollama_bodies import OllamaChatBody, OllamaGenerateBody, ShowBody
from edge_llm_server.response_bodies import ResponseBody
from edge_llm_server.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from edge_llm_server.security import Door, Guard
from edge_llm_server.service import Service
from edge_llm_server.settings import ServerSettings

from edge_llm.config import EngineConfig
from edge_llm.engine.assembly import open_engine
from edge_llm.engine.client import EngineClient, ThreadClient
from edge_llm.kernels.warmup import KernelLibrary
from tests.server.harness import card, host_of

OLLAMA = {"model": "tiny", "options": {"num_predict": 1}}
BODIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/chat/completions": (ChatBody, {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}),
    "/v1/completions": (CompletionBody, {"prompt": "hello", "max_tokens": 1}),
    "/v1/responses": (ResponseBody, {"input": "hello", "max_output_tokens": 1}),
    "/v1/embeddings": (EmbeddingBody, {"input": "hello"}),
    "/api/embed": (OllamaEmbedBody, {"model": "tiny", "input": "hello"}),
    "/api/embeddings": (OllamaEmbedBody, {"model": "tiny", "prompt": "hello"}),
    "/api/chat": (OllamaChatBody, {**OLLAMA, "messages": [{"role": "user", "content": "hello"}]}),
    "/api/generate": (OllamaGenerateBody, {**OLLAMA, "prompt": "hello"}),
    "/api/show": (ShowBody, {"model": "tiny"}),
    "/tokenize": (TokenizeBody, {"content": "hello"}),
    "/detokenize": (DetokenizeBody, {"tokens": [70]}),
}
ODD: list[Any] = [
    None, True, False, 0, -0.0, 1, -1, 2, 5, 8, 9, 16, 17, 20, 21, 128, 1024, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63,
    2**64 - 1, 2**64, -(2**31), -(2**63), 10**30, 0.5, 1e-320, 1e300, -1e300, "", "x", "\x00", "\u202e", "none", "auto",
    "text", "a" * 257, "a" * 100_000, [], {}, [None], [[]], [{}], ["x"], ["x"] * 17, [1], [-1], [2**31], [2**40], [True],
    [0.5], [[1], [2]], {"type": "text"}, {"type": "json_object"}, {"type": "json_schema"}, {"type": "function"},
    {"1": 1}, {"-1": 1}, {"1": "x"}, {"x": 1}, {"1": 1e300}, {"1": None}, {"9" * 30: 1}, {str(i): 1 for i in range(1025)},
    {"include_usage": 1}, {"include_usage": True}, {"enable_thinking": True}, {"type": "function", "function": {"name": "f"}},
    [{"type": "function", "function": {"name": "f"}}], [{"role": "user"}], [{"role": "user", "content": []}],
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "http://127.0.0.1:1/x"}}},
    {"type": "json_object", "schema": {"type": "wrong"}}, {"type": "json_object", "schema": {"pattern": "(" * 100}},
]  # fmt: skip


class Direct:
    """Asks the application within its guard, without a socket."""

    def __init__(self, folder: Path) -> None:
        settings = ServerSettings(models=("tiny",))

        def load(folder: Path) -> EngineClient:
            return ThreadClient(open_engine(folder, EngineConfig(context=256, slots=4)))

        self.engines = Engines(host_of({"tiny": folder}, load), settings)
        app = create_app(Service(settings, self.engines, {"tiny": card("tiny")}))
        door = Door(frozenset({"h"}), trusted=False)
        self.guard = Guard(app, settings, door, Limits(settings), Log(io.StringIO()), RequestCounts())

    async def post(self, path: str, data: bytes) -> tuple[int, bytes]:
        sent, replies = False, []
        gone = asyncio.Event()

        async def receive() -> dict[str, Any]:
            nonlocal sent
            if sent:
                await gone.wait()
                return {"type": "http.disconnect"}
            sent = True
            return {"type": "http.request", "body": data, "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            replies.append(message)

        headers = [(b"host", b"h"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
                 "headers": headers, "http_version": "1.1", "scheme": "http", "root_path": ""}  # fmt: skip
        await self.guard(scope, receive, send)
        return replies[0]["status"], b"".join(message.get("body", b"") for message in replies[1:])


@pytest.fixture(scope="module")
def direct(tiny_folder: Path, kernels: KernelLibrary) -> Iterator[Direct]:
    made = Direct(tiny_folder)
    yield made
    made.engines.close()


def fault_of(status: int, body: bytes) -> str | None:
    """What is wrong with a reply, whatever was asked."""
    if status == 200:
        return None
    if not 400 <= status < 500:
        return f"status {status}"
    error = json.loads(body)["error"]
    if isinstance(error, str):  # Ollama's
        return None if error and "\n" not in error else f"no message: {error}"
    if set(error) < {"message", "type", "param", "code"} or not error["message"] or "\n" in error["message"]:
        return f"not OpenAI's error: {error}"
    return None


async def try_fields(direct: Direct, path: str) -> int:
    """Every field of a path's body with every odd value; gives how many."""
    kind, sound = BODIES[path]
    count, answered = 0, 0
    for name, field in kind.model_fields.items():
        for value in ODD:
            body = {**sound, (field.alias or name): value}
            status, reply = await direct.post(path, json.dumps(body).encode())
            assert fault_of(status, reply) is None, (name, value, status, reply[:300])
            count, answered = count + 1, answered + (status == 200)
    assert answered >= len(kind.model_fields)
    return count


@pytest.mark.parametrize("path", BODIES)
def test_every_field_at_its_bounds(direct: Direct, path: str) -> None:
    assert asyncio.run(try_fields(direct, path)) == len(BODIES[path][0].model_fields) * len(ODD)


def mutated(random_: random.Random, value: Any) -> Any:
    """The value with something in it changed."""
    value = copy.deepcopy(value)
    place, steps = value, []
    while isinstance(place, dict | list) and place and random_.random() < 0.8:
        key = random_.choice(list(place)) if isinstance(place, dict) else random_.randrange(len(place))
        steps.append((place, key))
        place = place[key]
    if not steps:
        return random_.choice(ODD)
    holder, key = steps[-1]
    match random_.randrange(4):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        case 2 if isinstance(holder, dict):
            holder[random_.choice(["role", "content", "type", "x", ""])] = random_.choice(ODD)
        case _:
            holder[key] = random_.choice(ODD)
    return value


RICH = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hello"}], "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\"x\": 1}"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
    ],
    "max_tokens": 2, "n": 2, "seed": 1, "stop": ["a", "b"], "temperature": 0.5, "top_p": 0.5, "logit_bias": {"5": 1},
    "logprobs": True, "top_logprobs": 2, "stream": True, "stream_options": {"include_usage": True},
    "response_format": {"type": "text"}, "truncation": "auto", "chat_template_kwargs": {"enable_thinking": False},
}  # fmt: skip


async def try_bodies(direct: Direct, count: int, seed: int) -> int:
    """Chats with something wrong in them; gives how many were refused."""
    chosen = random.Random(seed)
    refused = 0
    for _ in range(count):
        body = RICH
        for _ in range(chosen.randrange(1, 4)):
            body = mutated(chosen, body)
        data = json.dumps(body).encode()
        if chosen.random() < 0.2:
            at = chosen.randrange(len(data))
            data = data[:at] + bytes([chosen.randrange(256)]) + data[at + chosen.randrange(3) :]
        status, reply = await direct.post("/v1/chat/completions", data)
        assert fault_of(status, reply) is None, (data[:500], status, reply[:300])
        refused += status != 200
    assert not direct.engines._handles
    return refused


def test_f11_bodies_with_something_wrong_in_them(direct: Direct) -> None:
    assert 500 < asyncio.run(try_bodies(direct, 2000, 11)) < 2000
