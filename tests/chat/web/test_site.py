"""The site on a real socket, its chats played by a stand-in."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import ClientSession, ClientWebSocketResponse, web
from edge_llm_chat.paste import MOST_PASTED
from edge_llm_chat.web import connections, session
from edge_llm_chat.web.access import Access
from edge_llm_chat.web.session import Session
from edge_llm_chat.web.site import SEATS, Site

from edge_llm.engine.child_process import clean_environment
from tests.cli.conftest import ROOT

STATIC = {"look.css", "chat.js", "door.js", "textual.js", "xterm.css", "RobotoMono.ttf", "RobotoMono-Italic.ttf"}


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(coroutine)


class Visitor:
    """A browser, as far as it matters: what it asks, and the cookies it has."""

    def __init__(self, client: ClientSession, access: Access, port: int) -> None:
        self.client, self.access = client, access
        self.origin = f"http://127.0.0.1:{port}"
        self.links: list[str] = []
        self.sessions: list[Session] = []

    def url(self, path: str = "") -> str:
        return f"{self.origin}{self.access.base}{path}"

    async def status(self, method: str, url: str, body: str | None = None, **headers: str) -> int:
        async with self.client.request(method, url, data=body, headers=headers, allow_redirects=False) as response:
            await response.read()
            return response.status

    async def enter(self, key: str | None = None) -> int:
        key = key or self.access.new_link().partition("#")[2]
        return await self.status("POST", self.url("enter"), key, Origin=self.origin)

    async def page(self) -> str:
        async with self.client.get(self.url()) as response:
            return await response.text()

    async def open(self, size: str = "width=80&height=24", **headers: str) -> ClientWebSocketResponse:
        return await self.client.ws_connect(self.url(f"ws?{size}"), headers={"Origin": self.origin, **headers})

    async def refusal(self, size: str = "width=80&height=24", **headers: str) -> int:
        with pytest.raises(aiohttp.WSServerHandshakeError) as error:
            await self.open(size, **headers)
        return error.value.status


@contextlib.asynccontextmanager
async def visitor(manner: str = "") -> AsyncIterator[Visitor]:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    port = listener.getsockname()[1]
    access = Access([f"http://127.0.0.1:{port}"])
    environment = clean_environment() | {"PYTHONPATH": f"{ROOT / 'apps'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "tests.chat.web.stand_in", manner]
    async with ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as client:
        made = Visitor(client, access, port)

        def begin(websocket: aiohttp.web.WebSocketResponse) -> Session:
            made.sessions.append(Session(command, environment, websocket))
            return made.sessions[-1]

        async with Site(access, begin, made.links.append, wait_s=0.3).serving(listener):
            yield made
        for ended in made.sessions:
            assert ended._process is not None
            assert ended._process.returncode is not None, "no process is left"


async def text_until(websocket: ClientWebSocketResponse, wanted: str) -> str:
    text = ""
    while wanted not in text:
        message = await websocket.receive(20)
        assert message.type is aiohttp.WSMsgType.BINARY, (message, text)
        text += message.data.decode()
    return text


async def closed(websocket: ClientWebSocketResponse) -> bool:
    async for _ in websocket:
        pass
    return websocket.closed


def test_without_the_key_there_is_a_door_and_no_chat() -> None:
    async def body() -> None:
        async with visitor() as browser:
            assert await browser.status("GET", browser.url()) == 403
            page = await browser.page()
            assert "door.js" in page
            assert "textual.js" not in page
            assert len(browser.links) == 1, "one link is printed, and not another while it waits"
            assert await browser.refusal() == 403
            assert await browser.enter("guess") == 403
            assert await browser.enter(browser.links[0].partition("#")[2]) == 204
            assert "textual.js" in await browser.page()
            assert not browser.sessions, "a chat begins with the websocket"

    run(body())


def test_the_cookie_is_for_this_path_and_for_no_script() -> None:
    async def body() -> None:
        async with visitor() as browser:
            key = browser.access.new_link().partition("#")[2]
            async with browser.client.post(
                browser.url("enter"), data=key, headers={"Origin": browser.origin}
            ) as response:
                cookie = response.headers["Set-Cookie"]
            assert "HttpOnly" in cookie
            assert "SameSite=Strict" in cookie
            assert f"Path={browser.access.base}" in cookie
            assert "expires" not in cookie.lower()
            assert await browser.enter(key) == 403, "used up"

    run(body())


def test_what_is_typed_reaches_the_chat_and_what_it_draws_the_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.setenv("SOME_TOKEN", "secret")

    async def body() -> None:
        async with visitor() as browser:
            await browser.enter()
            chat = await browser.open("width=100&height=30")
            environment = json.loads(await text_until(chat, "}"))
            assert (environment["COLUMNS"], environment["ROWS"]) == ("100", "30")
            assert not {"OPENAI_API_KEY", "SOME_TOKEN"} & environment.keys()
            await chat.send_json(["stdin", "grüße \ud800"])
            assert "typed grüße ?" in await text_until(chat, "typed")
            await chat.send_json(["resize", {"width": 40, "height": 12}])
            assert json.loads(await text_until(chat, "}")) == {"type": "resize", "width": 40, "height": 12}
            await chat.send_json(["ping", "5"])
            assert json.loads((await chat.receive(20)).data) == ["pong", "5"]
            await chat.close()

    run(body())


def test_no_more_reaches_the_chat_at_a_time_than_is_typed_or_pasted() -> None:
    begin, end = "\x1b[200~", "\x1b[201~"
    for sent, taken in (
        ("a" * (1 << 20), "a" * session.MOST_KEYS),
        (f"{begin}{'b' * (1 << 22)}{end}", f"{begin}{'b' * (MOST_PASTED + 1)}{end}"),  # it is the chat that says so
        (f"{begin}{end}{'c' * (1 << 20)}", f"{begin}{end}{'c' * session.MOST_KEYS}"),
        (f"{begin}log\x1b[0m\r{end}", f"{begin}log\x1b[0m\r{end}"),
    ):
        assert session.typed(sent) == taken

    async def body() -> None:
        async with visitor() as browser:
            await browser.enter()
            chat = await browser.open()
            await text_until(chat, "}")
            await chat.send_json(["stdin", "a" * (1 << 20)])
            await chat.send_json(["stdin", "b"])
            assert await text_until(chat, "b") == f"typed {'a' * session.MOST_KEYS}typed b"
            await chat.close()

    run(body())


def test_a_chat_that_takes_nothing_is_ended_and_little_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "STUCK_S", 0.5)
    monkeypatch.setattr(session, "GRACE_S", 0.2)

    async def body() -> None:
        async with visitor("stuck") as browser:
            await browser.enter()
            chat = await browser.open()
            await text_until(chat, "}")
            with contextlib.suppress(ConnectionError):
                for _ in range(40):
                    await chat.send_json(["stdin", f"\x1b[200~{'a' * MOST_PASTED}\x1b[201~"])
            assert await closed(chat)
            stdin = browser.sessions[0].stdin
            assert stdin.transport.get_write_buffer_size() <= 2 * MOST_PASTED

    run(body())


@pytest.mark.parametrize(
    "said",
    [
        "no json",
        "[" * 100_000,
        "{}",
        '["stdin", 5]',
        '["resize", {"width": 80}]',
        '["resize", {"width": 80.5, "height": 24}]',
        '["resize", {"width": 100000, "height": 24}]',
        '["quit"]',
        '["deliver_file", "/etc/passwd"]',
    ],
)
def test_what_our_page_would_not_say_ends_the_session(said: str) -> None:
    async def body() -> None:
        async with visitor() as browser:
            await browser.enter()
            chat = await browser.open()
            await chat.send_str(said)
            assert await closed(chat)

    run(body())


def test_other_pages_and_names_are_refused_everywhere() -> None:
    async def body() -> None:
        async with visitor() as browser:
            await browser.enter()
            for path in ("", "static/textual.js", "nothing"):
                assert await browser.status("GET", browser.url(path), Host="evil.example") == 421
                assert await browser.status("GET", browser.url(path), Origin="http://evil.example") == 403
            for headers in (
                {"Origin": "http://evil.example"},
                {"Origin": browser.origin.replace("127.0.0.1", "localhost")},
                {"Origin": "null"},
                {"Host": "evil.example", "Origin": "http://evil.example"},
                {"Sec-Fetch-Site": "same-site"},
            ):
                assert await browser.refusal(**headers) in (403, 421)
            async with browser.client.get(browser.url("ws?width=80&height=24")) as response:
                assert response.status == 403, "a websocket without an origin is no browser's"
            assert not browser.sessions
            assert await browser.status("GET", browser.url(), **{"Sec-Fetch-Site": "cross-site"}) == 403

    run(body())


@pytest.mark.parametrize(
    "size", ["", "width=80", "width=0&height=24", "width=-1&height=24", "width=80&height=99999999"]
)
def test_a_window_has_a_size(size: str) -> None:
    async def body() -> None:
        async with visitor() as browser:
            await browser.enter()
            assert await browser.refusal(size) == 400

    run(body())


def test_a_fifth_chat_is_refused_until_one_of_four_ends() -> None:
    async def body() -> None:
        async with visitor() as browser:
            await browser.enter()
            chats = [await browser.open() for _ in range(SEATS)]
            page = await browser.page()
            assert "Four chats are open" in page
            assert await browser.status("GET", browser.url()) == 503
            assert await browser.refusal() == 503
            await chats[0].close()
            assert "textual.js" in await browser.page()
            fifth = await browser.open()
            await text_until(fifth, "}")
            assert len(browser.sessions) == SEATS + 1

    run(body())


def test_there_is_nothing_but_the_pages_and_their_files() -> None:
    async def body() -> None:
        async with visitor() as browser:
            await browser.enter()
            for name in STATIC:
                assert await browser.status("GET", browser.url(f"static/{name}")) == 200
            for path in (
                "static/",
                "static/../site.py",
                "static/..%2fsite.py",
                "static/%2e%2e/site.py",
                "download/x",
                "static/chat.html",
            ):
                assert await browser.status("GET", browser.url(path)) == 404
            for path in ("/", "/ws", "/static/textual.js", "/download/x"):
                assert await browser.status("GET", browser.origin + path) == 404
            for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS"):
                assert await browser.status(method, browser.url(), Origin=browser.origin) == 405
            assert await browser.status("POST", browser.url("enter"), "x" * 5000, Origin=browser.origin) == 413
            assert await browser.status("POST", browser.url("enter"), "x") == 403, "no origin"

    run(body())


def test_pages_hold_nothing_from_elsewhere_and_say_so_to_the_browser() -> None:
    pages = Path(session.__file__).parent / "pages"
    for path in pages.iterdir():
        text = path.read_text(encoding="utf-8")
        assert "//" not in text.replace("// ", ""), path.name
        assert "<style" not in text
        assert "onclick" not in text.lower()

    async def body() -> None:
        async with visitor() as browser:
            async with browser.client.get(browser.url()) as response:
                policy = response.headers["Content-Security-Policy"]
                assert response.headers["Server"] == "edge-llm"
                assert response.headers["Referrer-Policy"] == "no-referrer"
            assert "default-src 'none'" in policy
            assert "frame-ancestors 'none'" in policy
            assert "http" not in policy
            assert "*" not in policy

    run(body())


@pytest.mark.parametrize(
    ("manner", "shown"),
    [
        ("faulty", "ended by a fault (exit code 1)"),
        ("refused", "error: the chats cannot be read ␛]0;bad␇\r\nmove them away"),
    ],
)
def test_a_chat_that_fails_says_so_in_its_tab_and_tells_nothing_that_was_written(manner: str, shown: str) -> None:
    async def body() -> None:
        async with visitor(manner) as browser:
            await browser.enter()
            chat = await browser.open()
            assert "secret words" not in await text_until(chat, shown)
            assert await closed(chat)

    run(body())


def test_connections_that_say_nothing_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MOST_SILENT", 4)

    async def body() -> None:
        async with visitor() as browser:
            port = int(browser.origin.rsplit(":", 1)[1])
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(12)]
            silent[-1][1].write(b"GET / HTTP/1.1\r\nHost: x\r\n")  # half a head is nothing said
            await browser.enter()
            assert "textual.js" in await browser.page()
            ended = await asyncio.wait_for(silent[0][0].read(), 20)
            assert ended == b"", "the oldest had to go"
            for _, writer in silent:
                writer.close()

    run(body())


def test_a_connection_that_says_nothing_ends_in_time() -> None:
    async def body() -> None:
        loop = asyncio.get_running_loop()
        server = web.Server(lambda _: None)  # type: ignore[arg-type, return-value]
        made = connections.Connections(server, silent_s=0.05)
        listening = await loop.create_server(made, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
        assert await asyncio.wait_for(reader.read(), 20) == b""
        writer.close()
        listening.close()
        await server.shutdown()

    run(body())


def test_who_is_not_known_has_a_connection_for_one_request() -> None:
    async def body() -> None:
        async with visitor() as browser:
            for path, known in (("", False), ("static/look.css", False), ("static/look.css", True)):
                if known:
                    await browser.enter()
                async with browser.client.get(browser.url(path)) as response:
                    assert (response.headers.get("Connection") == "close") == (not known)

    run(body())


def test_a_chat_that_has_lost_its_way_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "GRACE_S", 0.2)

    async def body() -> None:
        async with visitor("broken") as browser:
            await browser.enter()
            chat = await browser.open()
            await chat.send_json(["stdin", "x"])
            assert await closed(chat)

    run(body())


def test_a_chat_that_does_not_end_is_killed_and_its_seat_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "GRACE_S", 0.2)

    async def body() -> None:
        async with visitor("deaf") as browser:
            await browser.enter()
            chat = await browser.open()
            await text_until(chat, "}")
            await chat.close()
            again = await browser.open()
            await text_until(again, "}")

    run(body())
