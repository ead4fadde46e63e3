"""What is asked of a server in a soak: requests of all kinds by a seed, each with the replies that it may get."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any, Self

from tools.trust.overload import read_reply

TEXT = (Path(__file__).parents[1] / "eval" / "english.txt").read_text(encoding="utf-8")
REPLY_S = 120.0
"""for a reply: this machine may be busy"""
_JSON = {"Content-Type": "application/json"}
_BATCH_LINES = 4


class Client:
    """One connection to a server, which is opened again after it was closed. An async context manager."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.leave()

    async def leave(self) -> None:
        """Close the connection, whatever is under way."""
        if self._streams is not None:
            _, writer = self._streams
            self._streams = None
            writer.close()
            try:
                await writer.wait_closed()
            except ConnectionError:
                return  # the server was first

    async def send(
        self, method: str, path: str, body: bytes | dict[str, Any] | None = None, headers: Mapping[str, str] = _JSON
    ) -> asyncio.StreamReader:
        """A request, whose reply nobody has read yet."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = self._streams
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        every = {"Host": f"localhost:{self.port}", **headers, "Content-Length": str(len(data))}
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in every.items())]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
        return reader

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes | dict[str, Any] | None = None,
        headers: Mapping[str, str] = _JSON,
        *,
        status: int = 200,
    ) -> str:
        """The text of the reply to a request. Raises unless it has this status."""
        reader = await self.send(method, path, body, headers)
        got, told, text = await asyncio.wait_for(read_reply(reader), REPLY_S)
        if told.get("connection") == "close":
            await self.leave()
        if got != status:
            raise RuntimeError(f"{method} {path}: {got} instead of {status}: {text[:300]!r} to {str(body)[:300]}")
        return text


Kind = Callable[[Client, Random], Awaitable[None]]


def said(random: Random, longest: int = 400) -> str:
    """A slice of English, now and then with signs of other scripts."""
    begin = random.randrange(len(TEXT) - longest)
    text = TEXT[begin : begin + random.randrange(1, longest)]
    return text if random.random() < 0.8 else f"{text} — 東京 🗼 déjà {random.randrange(10**6)}"


def sampled(random: Random) -> dict[str, Any]:
    """How an answer is chosen."""
    return {
        "max_tokens": random.randrange(1, 25),
        "temperature": random.choice((0.0, 0.7, 1.3)),
        "top_p": random.choice((1.0, 0.9)),
        "seed": random.randrange(1 << 31),
        **random.choice(({}, {}, {"stop": ["the", "\n\n"]}, {"frequency_penalty": 0.5}, {"logit_bias": {"300": 3.0}})),
    }


def conversation(random: Random) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}] if random.random() < 0.3 else []
    for _ in range(random.choice((0, 0, 0, 1, 2))):
        turns += [{"role": "user", "content": said(random, 100)}, {"role": "assistant", "content": said(random, 100)}]
    return [*turns, {"role": "user", "content": said(random)}]


def ended(stream: str) -> list[Any]:
    """The events of a stream. Raises unless it came to its end."""
    *events, last = [part.removeprefix("data: ") for part in stream.rstrip("\n").split("\n\n")]
    if last != "[DONE]":
        raise RuntimeError(f"a stream ends with {last[:300]!r}")
    return [json.loads(event) for event in events]


async def chat(client: Client, random: Random) -> None:
    extra = random.choice(({}, {}, {"n": 2}, {"logprobs": True, "top_logprobs": 3}))
    body = {"messages": conversation(random), **sampled(random), **extra}
    answer = json.loads(await client.ask("POST", "/v1/chat/completions", body))
    assert all(choice["finish_reason"] in ("stop", "length") for choice in answer["choices"]), answer


async def stream(client: Client, random: Random) -> None:
    extra = random.choice(({}, {}, {"n": 2}, {"stream_options": {"include_usage": True}}))
    body = {"messages": conversation(random), "stream": True, **sampled(random), **extra}
    ended(await client.ask("POST", "/v1/chat/completions", body))


async def tool(client: Client, random: Random) -> None:
    """A call that must be made, of tools that nobody else has: no grammar is found compiled."""
    names = [f"tool_{random.randrange(10**6)}" for _ in range(random.randrange(1, 4))]
    schema = {"type": "object", "properties": {"n": {"type": "integer"}, "b": {"type": "boolean"}}, "required": ["b"]}
    tools = [
        {"type": "function", "function": {"name": name, "description": said(random, 60), "parameters": schema}}
        for name in names
    ]
    extra = random.choice(({"tool_choice": "required"}, {"tool_choice": "auto"}, {"stream": True}))
    body = {"messages": conversation(random), "tools": tools, **sampled(random), "max_tokens": 40, **extra}
    reply = await client.ask("POST", "/v1/chat/completions", body)
    if "stream" in extra:
        ended(reply)


async def structure(client: Client, random: Random) -> None:
    properties = {f"field_{random.randrange(10**6)}": {"type": "boolean"} for _ in range(random.randrange(1, 4))}
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    body = {"messages": conversation(random), "response_format": form, "max_tokens": 60, "temperature": 0.7}
    await client.ask("POST", "/v1/chat/completions", {**body, "seed": random.randrange(1 << 31)})


async def complete(client: Client, random: Random) -> None:
    prompt: Any = random.choice((said(random), [said(random), said(random, 20)], [5, 6, 7, 300]))
    extra = random.choice(({}, {"logprobs": 2}, {"echo": True}))
    await client.ask("POST", "/v1/completions", {"prompt": prompt, **sampled(random), **extra})


async def respond(client: Client, random: Random) -> None:
    body = {"input": said(random), "max_output_tokens": random.randrange(16, 30)}
    await client.ask("POST", "/v1/responses", {**body, "stream": random.random() < 0.5})


async def ollama(client: Client, random: Random) -> None:
    (name,) = [model["id"] for model in json.loads(await client.ask("GET", "/v1/models"))["data"]]
    options = {"num_predict": random.randrange(1, 20), "seed": random.randrange(1 << 31)}
    body = {"model": name, "messages": conversation(random), "stream": random.random() < 0.5, "options": options}
    last = (await client.ask("POST", "/api/chat", body)).rstrip("\n").rpartition("\n")[2]
    assert json.loads(last)["done"] is True, last


async def embed(client: Client, random: Random) -> None:
    texts = [said(random, 200) for _ in range(random.randrange(1, 4))]
    body = {"input": texts, "encoding_format": random.choice(("float", "base64"))}
    assert len(json.loads(await client.ask("POST", "/v1/embeddings", body))["data"]) == len(texts)


async def look(client: Client, random: Random) -> None:
    path = random.choice(("/health", "/ready", "/metrics", "/v1/models", "/api/tags", "/v1/batches", "tokens"))
    if path == "tokens":
        tokens = json.loads(await client.ask("POST", "/tokenize", {"content": said(random)}))["tokens"]
        await client.ask("POST", "/detokenize", {"tokens": tokens})
    else:
        await client.ask("GET", path)


async def wrong(client: Client, random: Random) -> None:
    """What must be refused, and why."""
    chats, hello = "/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}
    status, method, path, body, headers = random.choice(
        (
            (400, "POST", chats, json.dumps(hello).encode()[: random.randrange(1, 40)], _JSON),
            (400, "POST", chats, {**hello, "temperature": random.choice(("hot", -1.0, [], True))}, _JSON),
            (400, "POST", chats, {**hello, "regex": "(" * random.randrange(1, 9)}, _JSON),
            (400, "POST", chats, {"messages": [{"role": "user", "content": "word " * 9000}]}, _JSON),
            (400, "POST", chats, {"messages": [{"role": random.choice(("nobody", 3)), "content": "x"}]}, _JSON),
            (400, "POST", "/v1/embeddings", {"input": ""}, _JSON),
            (404, "POST", chats, {**hello, "model": f"model-{random.randrange(10**9)}"}, _JSON),
            (404, "GET", f"/v1/nothing/{random.randrange(10**9)}", None, {}),
            (404, "GET", f"/v1/files/file-{random.randrange(10**9)}", None, {}),
            (405, "DELETE", chats, None, _JSON),
            (415, "POST", chats, hello, {"Content-Type": "text/plain"}),
            (421, "POST", chats, hello, {"Host": f"host-{random.randrange(10**9)}.example"}),
            (403, "POST", chats, hello, {**_JSON, "Origin": f"https://{random.randrange(10**9)}.example"}),
        )
    )
    assert "error" in await client.ask(method, path, body, headers, status=status)


async def leave(client: Client, random: Random) -> None:
    """A client that is gone before its reply is whole, sometimes before its request is."""
    body = {"messages": conversation(random), "stream": random.random() < 0.6, "max_tokens": 200, "ignore_eos": True}
    reader = await client.send("POST", "/v1/chat/completions", body)
    if random.random() < 0.5:
        await reader.readline()
    await asyncio.sleep(random.choice((0.0, 0.005, 0.02)))
    await client.leave()


async def batch(client: Client, random: Random) -> None:
    """A file, its batch, its results; all files are deleted."""
    path = "/v1/chat/completions"
    lines = [
        {
            "custom_id": str(i),
            "method": "POST",
            "url": path,
            "body": {"messages": conversation(random), **sampled(random)},
        }
        for i in range(_BATCH_LINES)
    ]
    mark = "b0undary"
    form = f'--{mark}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--{mark}\r\n'
    form += 'Content-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
    form += "".join(json.dumps(line) + "\n" for line in lines) + f"\r\n--{mark}--\r\n"
    headers = {"Content-Type": f"multipart/form-data; boundary={mark}"}
    file = json.loads(await client.ask("POST", "/v1/files", form.encode(), headers))["id"]
    asked = {"input_file_id": file, "endpoint": path, "completion_window": "24h"}
    made = json.loads(await client.ask("POST", "/v1/batches", asked))
    while made["status"] not in ("completed", "failed", "cancelled"):
        await asyncio.sleep(0.05)
        made = json.loads(await client.ask("GET", f"/v1/batches/{made['id']}"))
    assert made["request_counts"]["completed"] == _BATCH_LINES, made
    results = made["output_file_id"]
    assert (await client.ask("GET", f"/v1/files/{results}/content")).count("\n") == _BATCH_LINES
    for one in (file, results):
        await client.ask("DELETE", f"/v1/files/{one}")


SHARES: Mapping[Kind, float] = {
    chat: 22, stream: 20, complete: 10, leave: 10, wrong: 10, embed: 8, look: 8, tool: 5, structure: 3, respond: 2,
    ollama: 2, batch: 0.5,
}  # fmt: skip
"""kinds of requests, and how many of a hundred or so are of each"""


async def one(client: Client, random: Random) -> None:
    """A request of any kind."""
    (kind,) = random.choices(list(SHARES), list(SHARES.values()))
    try:
        await kind(client, random)
    except (AssertionError, ConnectionError, EOFError, TimeoutError, ValueError) as error:
        raise RuntimeError(f"{kind.__name__}: {error!r}") from error
