from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from edge_llm_chat.backend import Ask, ModelInfo
from edge_llm_chat.http_backend import HttpBackend
from edge_llm_chat.http_events import ChunkReader
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_llm.engine.client import EngineClient, ThreadClient
from edge_llm.errors import EdgeLLMError, GenerationError, InputError, RuntimeFailure, SessionError
from edge_llm.messages import (
    Event,
    Finished,
    FinishReason,
    Message,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    Tool,
    ToolCall,
    ToolCallDelta,
)
from edge_llm.sampling.params import SamplingParams
from edge_llm.text.chat_template import ChatTemplate
from tests.chat.conftest import chat, say, screen_of, settle, shown, texts
from tests.engine.fakes import TEMPLATE, make_core, says
from tests.server.harness import running

MODELS = {"object": "list", "data": [{"id": "m", "object": "model"}, {"id": "n", "object": "model"}]}


def quiet(*_: object) -> None:
    pass


def chunk(delta: dict[str, Any], reason: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}], **more}


def stream(*chunks: dict[str, Any] | str) -> bytes:
    lines = [item if isinstance(item, str) else f"data: {json.dumps(item)}" for item in chunks]
    return "\n\n".join([*lines, ""]).encode()


class Peer:
    """A server that says by script: a reply for each path."""

    def __init__(self, replies: dict[str, tuple[int, bytes] | Sequence[bytes]]) -> None:
        self._replies = replies
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        self.dropped = asyncio.Event()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.split("\r\n")
        headers = {line.split(":")[0].lower(): line.split(": ", 1)[1] for line in lines if ": " in line}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        path = first.split(" ")[1]
        self.requests.append((path, headers, json.loads(body) if body else None))
        reply = self._replies[path]
        status, pieces = (200, list(reply)) if not isinstance(reply, tuple) else (reply[0], [reply[1]])
        writer.write(f"HTTP/1.1 {status} X\r\nConnection: close\r\nRetry-After: 3\r\n\r\n".encode())
        for piece in pieces:
            if piece == b"wait":
                await reader.read()  # until the client goes away
                self.dropped.set()
            else:
                writer.write(piece)
                await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@contextlib.asynccontextmanager
async def peer(**replies: Any) -> AsyncIterator[tuple[Peer, HttpBackend]]:
    """A `Peer` with these chat replies, and a backend that is connected to it."""
    made = Peer(
        {
            "/v1/models": (200, json.dumps(replies.pop("models", MODELS)).encode()),
            "/v1/models/m": (200, b"{}"),
            "/api/generate": (200, b'{"model": "m"}'),
            "/v1/chat/completions": replies.pop("chat", []),
        }
    )
    server = await asyncio.start_server(made.handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    backend = HttpBackend(f"http://127.0.0.1:{port}/v1/", **replies)
    try:
        yield made, backend
    finally:
        await backend.close()
        server.close()


async def answered(backend: HttpBackend, params: SamplingParams | None = None) -> list[Event]:
    await backend.load(quiet)
    answering = await backend.answer(Ask((Message.user("Hi"),), params or SamplingParams()))
    return [event async for event in answering]


def test_a_streamed_answer() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 5}}
    said = stream(
        ": a comment",
        chunk({"role": "assistant", "content": ""}),
        chunk({"reasoning_content": "hm"}),
        chunk({"content": "Hel"}),
        chunk({"content": "lo\ud800"}),
        chunk({}, "length"),
        {"choices": [], "usage": usage, "seed": 8, "timings": {"predicted_per_second": 50.0}},
        "data: [DONE]",
    )

    async def body() -> None:
        async with peer(chat=[said[:50], said[50:]], key="secret") as (server, backend):
            params = SamplingParams(temperature=0.0, seed=3, logprobs=True, top_logprobs=4)
            *events, last = await answered(backend, params)
            assert events == [ReasoningDelta("hm"), TextDelta("Hel"), TextDelta("lo?")]
            assert isinstance(last, Finished)
            assert (last.reason, last.seed) == (FinishReason.LENGTH, 8)
            assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.cached_tokens) == (9, 4, 5)
            assert last.timings.decode_tokens_per_s == 50.0
            path, headers, sent = server.requests[-1]
            assert path == "/v1/chat/completions"
            assert headers["authorization"] == "Bearer secret"
            assert sent == {
                **{"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": True},
                **{"stream_options": {"include_usage": True}, "temperature": 0.0, "seed": 3},
                **{"logprobs": True, "top_logprobs": 4},
            }

    asyncio.run(body())


@pytest.mark.parametrize(
    ("owner", "slides", "asked"), [("edge_llm", True, "auto"), ("edge_llm", False, None), ("x", True, None)]
)
def test_a_server_of_ours_is_asked_to_go_on_past_the_context(owner: str, slides: bool, asked: str | None) -> None:
    async def body() -> None:
        models = {"data": [{"id": "m", "owned_by": owner}]}
        async with peer(models=models, slides=slides, chat=[stream(chunk({}, "stop"))]) as (server, backend):
            await answered(backend)
            (sent,) = [sent for path, _, sent in server.requests if path == "/v1/chat/completions"]
            assert sent.get("truncation") == asked

    asyncio.run(body())


def test_calls_of_tools_come_whole() -> None:
    said = stream(
        chunk({"tool_calls": [{"index": 0, "id": "a", "function": {"name": "time", "arguments": ""}}]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"x":'}}]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]}),
        chunk({}, "tool_calls"),
    )

    async def body() -> None:
        async with peer(chat=[said]) as (_, backend):
            *events, last = await answered(backend)
            assert events[0] == ToolCallDelta(0, "", "a", "time")
            assert isinstance(last, Finished)
            assert last.tool_calls == (ToolCall("a", "time", '{"x":1}'),)

    asyncio.run(body())


@pytest.mark.parametrize("said", [b"", stream(chunk({"content": "Hel"}))])
def test_a_cancel_ends_the_wait_and_the_request(said: bytes) -> None:
    async def body() -> None:
        async with peer(chat=[said, b"wait"]) as (server, backend):
            await backend.load(quiet)
            answering = await backend.answer(Ask((Message.user("Hi"),)))
            events = []

            async def read() -> None:
                events.extend([event async for event in answering])

            reading = asyncio.create_task(read())
            while len(server.requests) < 2:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            answering.cancel()
            answering.cancel()
            await asyncio.wait_for(reading, 5)
            assert isinstance(events[-1], Finished)
            assert events[-1].reason is FinishReason.CANCELLED
            await asyncio.wait_for(server.dropped.wait(), 5)

    asyncio.run(body())


@pytest.mark.parametrize(
    ("status", "said", "kind", "text"),
    [
        (400, b'{"error": {"message": "too long"}}', InputError, "too long"),
        (401, b'{"error": {"message": "no key"}}', InputError, "no key"),
        (429, b"busy", RuntimeFailure, "status 429"),
        (500, b'{"detail": "oops"}', RuntimeFailure, "status 500"),
        (200, stream({"error": {"message": "it broke"}}), GenerationError, "it broke"),
        (200, b"data: [1]\n\n", GenerationError, "no JSON object"),
        (200, b"data: " + b"[" * 100_000 + b"\n\n", GenerationError, "no JSON object"),
    ],
)
def test_errors_of_a_server(status: int, said: bytes, kind: type[EdgeLLMError], text: str) -> None:
    async def body() -> None:
        async with peer(chat=(status, said)) as (_, backend):
            with pytest.raises(kind, match=text):
                await answered(backend)

    asyncio.run(body())


def test_a_server_that_is_not_there_and_models_that_are_not() -> None:
    async def body() -> None:
        with pytest.raises(RuntimeFailure, match="cannot be reached"):
            await HttpBackend("http://127.0.0.1:1").load(quiet)
        with pytest.raises(InputError, match="not the address"):
            HttpBackend("localhost:8000")
        async with peer(model="x") as (_, backend):
            with pytest.raises(InputError, match="no model 'x'"):
                await backend.load(quiet)
        async with peer(models={"data": []}) as (_, backend):
            with pytest.raises(InputError, match="offers no model"):
                await backend.load(quiet)
        async with peer(model="n") as (_, backend):
            assert (await backend.load(quiet)).name == "n"
            assert [choice.name for choice in await backend.models()] == ["m", "n"]

    asyncio.run(body())


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["choices", "delta", "content", "tool_calls", "index", "function", "name", "arguments", "logprobs", "token", "bytes",
         "logprob", "top_logprobs", "usage", "timings", "seed", "reasoning_content", "finish_reason", "id"]), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@settings(max_examples=300)
@given(
    st.dictionaries(
        st.sampled_from(["choices", "usage", "timings", "seed", "error", "forgotten_tokens", "forgotten_messages"]),
        _VALUES,
    ),
    _VALUES,
    _VALUES,
)
def test_whatever_a_server_sends_is_events_or_an_error(document: dict[str, Any], delta: Any, logprobs: Any) -> None:
    reader = ChunkReader(None)
    for data in (
        document,
        {"choices": [{"delta": delta, "logprobs": {"content": [logprobs]}}]},
        chunk({"content": "x", "tool_calls": [delta]}),
    ):
        with contextlib.suppress(GenerationError):
            for event in reader.take(data):
                assert isinstance(event, TextDelta | ReasoningDelta | ToolCallDelta)
    assert isinstance(reader.finished(cancelled=False), Finished)


def test_our_own_server_by_its_socket(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The whole chat over HTTP: streamed text, counts of tokens, and the tokens' alternatives."""
    socket = tmp_path_factory.mktemp("uds") / "s.sock"

    async def body() -> None:
        backend = HttpBackend("http://localhost", socket=socket, name="our server")
        async with chat(backend, (100, 24)) as pilot:
            await settle(pilot)
            await say(pilot, "Hi")
            assert texts(pilot) == ["Hi", "Hello there."]
            assert "fake" in shown(pilot)
            turn = pilot.app.screen.conversation.path()[-1]
            assert b"".join(token.chosen.data for token in turn.tokens) == b"Hello there."
            assert turn.tokens[0].alternatives
            assert (await backend.count((Message.user("Hi"),)) or 0) > 2
            assert (backend.kv_bytes() or 0) > 0

    with running(lambda: make_core(says("Hello there.")), uds=socket):
        asyncio.run(body())


@pytest.mark.parametrize("at", [1, 3])
def test_a_server_of_ours_goes_on_from_a_chosen_token(at: int) -> None:
    """The same token gives the same rest; another one, an answer that is its own."""

    async def body(url: str) -> None:
        backend = HttpBackend(url)
        assert (await backend.load(quiet)).forks
        params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=True, top_logprobs=3)
        ask = Ask((Message.user("Hi"),), params)
        first = [event async for event in await backend.answer(ask)]
        tokens = [info for event in first if isinstance(event, TextDelta) for info in event.tokens]
        begun = tuple(info.chosen for info in tokens[:at])
        again = [event async for event in await backend.answer(replace(ask, prefix=begun))]
        rest = [info for event in again if isinstance(event, TextDelta) for info in event.tokens]
        assert rest[: len(tokens) - at] == tokens[at:]
        assert isinstance(again[-1], Finished)
        other = next(one for one in tokens[at].alternatives if one != tokens[at].chosen)
        forked = [event async for event in await backend.answer(replace(ask, prefix=(*begun, other)))]
        assert isinstance(forked[-1], Finished)
        assert forked[-1].usage.completion_tokens > 0
        with pytest.raises(InputError, match="with tools"):
            await backend.answer(replace(ask, prefix=begun, tools=(Tool("time", "", "{}"),)))
        await backend.close()

    with running() as server:
        asyncio.run(body(server.url))


def test_a_server_of_ours_tells_which_turns_fell_out() -> None:
    async def body(url: str) -> None:
        backend = HttpBackend(url)
        await backend.load(quiet)
        messages = tuple(
            message for number in range(8) for message in (Message.user(f"{number} " * 30), Message.assistant("well"))
        )
        ask = Ask((*messages, Message.user("Hi")), SamplingParams(temperature=0.0, max_tokens=4))
        events = [event async for event in await backend.answer(ask)]
        assert isinstance(events[-1], Finished)
        assert events[-1].forgotten_tokens > 0
        assert len(events[-1].forgotten) > 2
        assert list(events[-1].forgotten) == sorted(events[-1].forgotten)
        await backend.close()

    with running() as server:
        asyncio.run(body(server.url))


@pytest.mark.parametrize("figure", [10**400, -(10**400), True, "1", None, 1 << 60])
def test_figures_and_notices_that_no_screen_can_show_are_none(figure: object) -> None:
    """A server of somebody's has a say in the status line, which must not end the chat."""

    async def body() -> None:
        models = {"data": [{"id": "m", "owned_by": "edge_llm", "max_model_len": figure}]}
        async with peer(models=models) as (other, backend):
            meta = {"kv_cache_bytes": figure, "notice": "\x1b]0;x\x07" * 100_000}
            other._replies["/v1/models/m"] = (200, json.dumps({"max_model_len": figure, "meta": meta}).encode())
            other._replies["/tokenize"] = (200, json.dumps({"count": figure}).encode())
            info = await backend.load(quiet)
            assert (info.context, backend.kv_bytes(), await backend.count(())) == (None, None, None)
            assert 0 < len(backend.notice()) < 1000

    asyncio.run(body())


def test_what_is_to_be_known_of_a_model_behind_a_server_is_said_once() -> None:
    """The fallback that answers, that there is no talking to it, and what its engine could not do as usual."""
    cores = []

    def load(folder: Path) -> EngineClient:
        if folder.name == "big":
            raise SessionError("no memory")
        cores.append(make_core(says("Hello there.")))
        cores[-1]._notice = "the CPU computes"
        cores[-1].intake.template = None
        return ThreadClient(cores[-1])

    async def body(url: str) -> None:
        backend = HttpBackend(url, model="big")
        async with chat(backend, (100, 24)) as pilot:
            told: list[str] = []
            screen_of(pilot).tell = told.append  # type: ignore[method-assign]
            await settle(pilot)
            instead = "big cannot be used: fake answers for it"
            alone = "fake is a base model: it continues texts and cannot answer messages"
            assert told == [f"{instead}; {alone}; the CPU computes"]
            assert screen_of(pilot).model == ModelInfo("fake", 256, inspects=True, forks=True)
            await say(pilot, "Hi")
            assert "no chat template" in shown(pilot)
            cores[0].intake.template = ChatTemplate(TEMPLATE)
            await say(pilot, "Hi again")
            assert texts(pilot)[-1] == "Hello there."
            await say(pilot, "And again")
            assert told[1:] == [f"{instead}; the CPU computes"]

    with running(load=load, models=("big", "fake"), fallback="fake") as server:
        asyncio.run(body(server.url))


def test_a_model_that_a_server_has_to_load_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_llm_chat.http_backend._RETRY_S", 0.02)
    go, asked = threading.Event(), []

    def load(folder: Path) -> EngineClient:
        if folder.name == "later":
            assert go.wait(20)
        return ThreadClient(make_core())

    class Counting(HttpBackend):
        async def _request(self, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
            asked.append(path)
            if asked.count("/api/generate") == 3:
                go.set()
            return await super()._request(method, path, body)

    async def body(url: str) -> None:
        backend = Counting(url, model="later")
        await backend.load(quiet)
        assert asked.count("/api/generate") >= 3
        await backend.close()

    with running(load=load, models=("fake", "later"), load_wait_s=0) as server:
        asyncio.run(body(server.url))


def test_a_model_that_a_server_cannot_load_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(folder: Path) -> EngineClient:
        if folder.name == "never":
            raise SessionError("no memory")
        return ThreadClient(make_core())

    async def body(url: str) -> None:
        backend = HttpBackend(url, model="never")
        with pytest.raises(RuntimeFailure, match="never cannot be loaded: no memory"):
            await backend.load(quiet)
        await backend.close()

    with running(load=load, models=("fake", "never")) as server:
        asyncio.run(body(server.url))
    monkeypatch.setattr(
        "edge_llm_chat.http_backend._LOAD_S", 0.0
    )  # nor is one for ever whose load fails too late to be told

    async def late(url: str) -> None:
        backend = HttpBackend(url, model="never")
        with pytest.raises(RuntimeFailure, match="is being loaded"):
            await backend.load(quiet)
        await backend.close()

    with running(load=load, models=("fake", "never"), load_wait_s=0) as server:
        asyncio.run(late(server.url))


def test_another_server_does_not_go_on_from_a_token() -> None:
    async def body() -> None:
        async with peer() as (_, backend):
            await backend.load(quiet)
            with pytest.raises(InputError, match="cannot go on"):
                await backend.answer(Ask((Message.user("Hi"),), prefix=(TokenLogprob(5, b"x", -1.0),)))

    asyncio.run(body())
