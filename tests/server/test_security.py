"""The guard: whom it lets in, what it reads, and what it says of it."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from edge_llm_server.api_error import ApiError
from edge_llm_server.app import create_app
from edge_llm_server.engines import Engines
from edge_llm_server.exchange import STATE, Log, RequestCounts
from edge_llm_server.keys import ApiKey
from edge_llm_server.limits import Bucket, Limits
from edge_llm_server.security import Door, Guard
from edge_llm_server.service import Service
from edge_llm_server.settings import ServerSettings

from edge_llm.engine.client import ThreadClient
from tests.engine.fakes import make_core
from tests.server.harness import host_of
from tools.trust import server as trust

ROOT = Path(__file__).parents[2]
SECRET = "k" * 32


def test_f25_lets_in_exactly_whom_it_should(capsys: pytest.CaptureFixture[str]) -> None:
    assert trust.FIGURES["F25"].main([]) == 0
    row = capsys.readouterr().out
    assert row.startswith("| F25 |")
    assert int(row.split("|")[4].replace(",", "")) >= 20_000


def test_f25_without_asserts() -> None:
    """Nothing of it may rest on `assert`, which `python -O` leaves out."""
    command = [sys.executable, "-O", "-c", "from tools.trust.server import matrix; print(matrix(4000, 2))"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment())
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) >= 4000


def environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'apps'}"}


def test_the_matrix_sees_a_guard_that_lets_too_many_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Guard, "_check_origin", lambda self, headers: None)
    with pytest.raises(RuntimeError, match="204 instead of 403"):
        trust.matrix(1000, 1)


def test_every_route_of_the_application_needs_a_key(tmp_path: Path) -> None:
    settings = ServerSettings(models=("m",), keys=(ApiKey.of("me", SECRET),))
    host = host_of({}, lambda _: ThreadClient(make_core()))
    app = create_app(Service(settings, Engines(host, settings), {}))
    door = Door(settings.allowed_hosts(8080), trusted=False)
    guard = Guard(app, settings, door, Limits(settings), Log(io.StringIO()), RequestCounts())
    paths = set(app.openapi()["paths"]) | {"/openapi.json", "/docs", "/redoc", "/", "/nothing"}
    assert len(paths) > 25
    for path in paths:
        for spelled in (path, path + "/", "/" + path, path.upper(), path.replace("/", "//", 1)):
            for method in ("GET", "HEAD", "POST", "DELETE", "OPTIONS", "PUT"):
                status, _ = asyncio.run(trust.ask(guard, method, spelled, [("host", "localhost:8080")]))
                public = spelled == "/health" and method in ("GET", "HEAD")
                assert status == 200 if public else status == 401, (method, spelled)


# --- one request at a time ---


class Client:
    """Speaks ASGI to a guard around an application that reads the body and notes it."""

    def __init__(self, *, trusted: bool = False, application: Any = None, **settings: Any) -> None:
        self.stream, self.bodies, self.now = io.StringIO(), [], 0.0
        self.settings = ServerSettings(**{"models": ("m",), **settings})
        self.limits = Limits(self.settings, lambda: self.now)
        door = Door(self.settings.allowed_hosts(8080), trusted=trusted)
        self.guard = Guard(
            application or self._read, self.settings, door, self.limits, Log(self.stream), RequestCounts()
        )

    async def _read(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        try:
            while more:
                message = await receive()
                body, more = body + message.get("body", b""), message.get("more_body", False)
        finally:
            self.bodies.append(body)
        scope[STATE].count(prompt_tokens=30, cached_tokens=10, completion_tokens=5)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    async def ask(
        self,
        headers: dict[str, str] | None = None,
        pieces: tuple[bytes, ...] = (b"{}",),
        *,
        method: str = "POST",
        path: str = "/v1/chat/completions",
        kind: str = "http",
        stalls: bool = False,
    ) -> tuple[int, dict[str, str], Any]:
        """Status, headers and body of the reply; a client that `stalls` sends nothing after its pieces."""
        given = {"host": "localhost:8080", "content-type": "application/json", **(headers or {})}
        left, replies = list(pieces), []

        async def receive() -> dict[str, Any]:
            if not left and stalls:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": left.pop(0), "more_body": bool(left) or stalls}

        async def send(message: dict[str, Any]) -> None:
            replies.append(message)

        pairs = [(name.encode(), value.encode()) for name, value in given.items() if value is not None]
        scope = {"type": kind, "method": method, "path": path, "query_string": b"", "headers": pairs}
        await self.guard(scope, receive, send)
        if kind != "http":
            return 0, {}, replies
        headers_back = {name.decode(): value.decode() for name, value in replies[0]["headers"]}
        body = b"".join(message.get("body", b"") for message in replies[1:])
        return replies[0]["status"], headers_back, json.loads(body) if body.startswith(b"{") else body

    def run(self, *arguments: Any, **options: Any) -> tuple[int, dict[str, str], Any]:
        return asyncio.run(self.ask(*arguments, **options))

    @property
    def log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.stream.getvalue().splitlines()]


def test_who_has_no_key_is_told_so_in_openais_words() -> None:
    client = Client(keys=(ApiKey.of("me", SECRET),))
    status, headers, body = client.run()
    assert (status, headers["www-authenticate"], headers["connection"]) == (401, "Bearer", "close")
    assert body["error"]["type"] == "authentication_error"
    assert body["error"]["code"] == "invalid_api_key"
    assert client.bodies == []
    assert client.run({"authorization": f"Bearer {SECRET}"})[0] == 200
    assert client.run(method="GET", path="/api/tags")[2] == {
        "error": "a key is needed: send it as `Authorization: Bearer KEY`"
    }


def test_a_unix_socket_needs_no_key_but_a_sound_host() -> None:
    client = Client(keys=(ApiKey.of("me", SECRET),), trusted=True)
    assert client.run()[0] == 200
    assert client.run({"host": "evil.example"})[0] == 421
    assert client.run({"origin": "http://localhost:8080"})[0] == 403


def test_websockets_are_closed_and_never_reach_the_application() -> None:
    client = Client()
    assert client.run(kind="websocket")[2] == [{"type": "websocket.close", "code": 1008}]
    assert client.bodies == []


KINDS = [None, "", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/jsonx",
         "application/json/x", "text/json", "*/*"]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_page_may_send_without_asking_is_refused_unread(kind: str | None) -> None:
    client = Client()
    status, _, body = client.run({"content-type": kind})
    assert (status, body["error"]["code"]) == (415, "unsupported_media_type")
    assert client.bodies == []


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8", "Application/JSON"])
def test_json_is_taken(kind: str) -> None:
    assert Client().run({"content-type": kind})[0] == 200


def test_compressed_bodies_are_not_taken() -> None:
    client = Client()
    assert client.run({"content-encoding": "gzip"})[0] == 415
    assert client.run({"content-encoding": "identity"})[0] == 200


def test_one_path_takes_forms_and_no_json() -> None:
    client = Client(max_upload_bytes=4096, max_body_bytes=1024)
    form = {"content-type": "multipart/form-data; boundary=x"}
    assert client.run(form, (b"x" * 4096,), path="/v1/files")[0] == 200
    assert client.run(form, (b"x" * 4097,), path="/v1/files")[0] == 413
    assert client.run(path="/v1/files")[0] == 415
    assert client.run(form, path="/v1/files/x")[0] == 415


def test_a_body_that_is_too_large_is_a_413_however_it_is_sent() -> None:
    client = Client(max_body_bytes=1024)
    assert client.run(pieces=(b"x" * 1024,))[0] == 200
    assert client.run({"content-length": "1025"}, (b"x",))[0] == 413
    assert client.run({"content-length": "1025"}, (b"x",) * 5000)[0] == 413
    assert client.bodies == [b"x" * 1024]
    status, _, body = client.run(pieces=(b"x" * 512, b"x" * 512, b"x"))
    assert (status, body["error"]["code"]) == (413, "request_too_large")
    for wrong in ("x", "-1", "1_0", "9" * 40):
        assert client.run({"content-length": wrong}, (b"x",))[0] == 400


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    client = Client(body_timeout_s=0.1)
    status, _, body = client.run(pieces=(b"{",), stalls=True)
    assert (status, body["error"]["code"]) == (408, "request_timeout")


def test_a_body_in_drops_has_an_end_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_llm_server.security._BODY_TIMES", 0.0)
    assert Client().run(pieces=(b"{",), stalls=True)[0] == 408


@pytest.mark.parametrize("method", ["PUT", "PATCH", "OPTIONS", "TRACE", "CONNECT"])
def test_methods_that_nothing_needs_are_a_405(method: str) -> None:
    assert Client().run(method=method)[0] == 405


def test_a_page_that_may_is_told_that_it_may() -> None:
    page = "https://chat.example"
    client = Client(origins=(page,), keys=(ApiKey.of("me", SECRET),))
    asking = {"origin": page, "access-control-request-method": "POST"}
    status, headers, _ = client.run(asking, method="OPTIONS")
    assert (status, headers["access-control-allow-origin"]) == (204, page)
    assert "access-control-allow-credentials" not in headers
    assert client.run({**asking, "origin": "https://evil.example"}, method="OPTIONS")[0] == 403
    assert client.run({**asking, "host": "evil.example"}, method="OPTIONS")[0] == 421
    status, headers, _ = client.run({"origin": page, "authorization": f"Bearer {SECRET}"})
    assert (status, headers["access-control-allow-origin"], headers["vary"]) == (200, page, "origin")
    status, headers, _ = client.run({"origin": "https://evil.example", "authorization": f"Bearer {SECRET}"})
    assert (status, "access-control-allow-origin" in headers) == (403, False)


# --- limits ---


def test_requests_a_minute_are_those_of_each_key() -> None:
    keys = ApiKey.of("ann", "a" * 32), ApiKey.of("bob", "b" * 32)
    client = Client(keys=keys, requests_per_minute=2)
    ann, bob = ({"authorization": f"Bearer {letter * 32}"} for letter in "ab")
    assert [client.run(ann)[0] for _ in range(3)] == [200, 200, 429]
    status, headers, body = client.run(ann)
    assert (status, headers["retry-after"], body["error"]["type"]) == (429, "30", "rate_limit_error")
    assert client.run(bob)[0] == 200
    assert client.run(ann, method="GET", path="/v1/models")[0] == 200
    client.now = 30.0
    assert [client.run(ann)[0] for _ in range(2)] == [200, 429]


def test_tokens_a_minute_are_those_that_were_computed() -> None:
    client = Client(tokens_per_minute=50)  # each request costs 30 - 10 + 5
    assert [client.run()[0] for _ in range(3)] == [200, 200, 429]
    client.now = 30.0
    assert [client.run()[0] for _ in range(2)] == [200, 429]


def test_requests_at_a_time() -> None:
    release = asyncio.Event

    async def both() -> list[int]:
        go = release()

        async def wait(scope: Any, receive: Any, send: Any) -> None:
            await go.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"ok"})

        client = Client(application=wait, max_concurrent=1)
        first = asyncio.create_task(client.ask())
        await asyncio.sleep(0)
        refused = (await client.ask())[0]
        go.set()
        return [refused, (await first)[0], (await client.ask())[0]]

    assert asyncio.run(both()) == [429, 200, 200]


def test_a_bucket_fills_evenly_and_no_higher_than_its_size() -> None:
    bucket = Bucket(60, now=0.0)
    bucket.take(90, now=0.0)
    assert bucket.wait_s(1, now=0.0) == 31
    assert bucket.wait_s(1, now=31.0) == 0
    assert bucket.wait_s(60, now=1000.0) == 0
    assert bucket.wait_s(61, now=1000.0) == 1


# --- what is written down ---


def test_each_request_is_one_line_that_holds_nothing_of_its_words() -> None:
    client = Client(keys=(ApiKey.of("me", SECRET),))
    words = b'{"messages": [{"role": "user", "content": "my secret words"}]}'
    status, headers, _ = client.run({"authorization": f"Bearer {SECRET}", "x-request-id": "mine-1"}, (words,))
    assert (status, headers["x-request-id"]) == (200, "mine-1")
    client.run(
        {"authorization": "Bearer wrongkey", "x-request-id": 'x" \n', "content-length": str(len(words))}, (words,)
    )
    log = client.log
    assert [entry["status"] for entry in log] == [200, 401]
    assert log[0]["key"] == "me"
    assert (log[0]["bytes_in"], log[0]["bytes_out"], log[0]["completion_tokens"]) == (len(words), 2, 5)
    assert log[1]["id"].startswith("req-")
    text = client.stream.getvalue()
    assert text.isascii()
    assert not any(secret in text for secret in ("secret", SECRET, "wrongkey"))


def test_a_fault_is_told_by_its_place_and_not_by_its_words() -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise KeyError("what somebody wrote")

    client = Client(application=broken)
    with pytest.raises(ConnectionAbortedError):
        client.run()
    (entry,) = client.log
    assert entry["fault"].startswith("KeyError at ")
    assert "wrote" not in client.stream.getvalue()


def test_an_error_of_the_application_ends_the_request_and_frees_its_place() -> None:
    async def refusing(scope: Any, receive: Any, send: Any) -> None:
        raise ApiError.invalid("no", "model")

    client = Client(application=refusing, max_concurrent=1)
    for _ in range(3):
        status, _, body = client.run()
        assert (status, body["error"]["param"]) == (400, "model")


def test_a_bomb_of_headers_is_only_looked_through() -> None:
    many: Callable[[int], dict[str, str]] = lambda count: {f"x-{i}": "y" for i in range(count)}  # noqa: E731
    assert Client().run(many(10_000))[0] == 200
