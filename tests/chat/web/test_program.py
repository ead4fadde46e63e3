"""The whole of `edge-llm chat --web`, but for a browser: the program, its server, and chats in its tabs."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from edge_llm_chat.web import engine_server
from edge_llm_cli.main import application
from typer.testing import CliRunner, Result

from edge_llm import paths
from edge_llm.config import EngineConfig
from tests.chat.web.program import Program, chat_web, descendants, lives

linux = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked for in /proc")


def chat(*arguments: str) -> Result:
    return CliRunner().invoke(application(), ["chat", *arguments], prog_name="edge-llm")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the verb would launch."""
    calls: list[Any] = []
    monkeypatch.setattr("edge_llm_chat.web.launch.launch_web", lambda *values, **_: calls.append(values))
    return calls


def test_options_become_an_address_and_a_wish(launched: list[Any]) -> None:
    result = chat("--web", "-m", "a", "--last", "--web-host", "::1", "--web-port", "0", "--context", "512")
    assert result.exit_code == 0, result.output
    ((model, config, wish, address),) = launched
    assert (model, config.context, config.context_policy, wish.last) == ("a", 512, "slide", True)
    assert (address.host, address.port, address.url) == ("::1", 0, None)
    assert address.origins(8081)[0] == "http://[::1]:8081"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--web", "--plain"), "--web and --plain exclude"),
        (("--web-port", "8081"), "need --web"),
        (("--web", "--web-host", "0.0.0.0"), "no address that a browser could open"),
        (("--web", "--web-url", "chat.example.org"), "no address of a page"),
        (("--web", "--web-url", "https://chat.example.org/path"), "no address of a page"),
        (("--web", "--web-url", "javascript:alert(1)"), "no address of a page"),
    ],
)
def test_what_cannot_be_is_one_line(launched: list[Any], arguments: tuple[str, ...], message: str) -> None:
    result = chat(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert launched == []


@pytest.mark.parametrize(
    ("options", "origins"),
    [
        ({}, ["http://127.0.0.1:81", "http://localhost:81", "http://127.0.0.1:81", "http://[::1]:81"]),
        ({"host": "192.168.1.5"}, ["http://192.168.1.5:81"]),
        ({"host": "0.0.0.0", "url": "http://Box:81"}, ["http://box:81"]),
        ({"url": "https://chat.example.org"}, ["https://chat.example.org"]),
    ],
)
def test_browsers_may_call_it_by_its_own_names_only(options: dict[str, Any], origins: list[str]) -> None:
    from edge_llm_chat.web.launch import WebAddress

    assert sorted(WebAddress(**options).origins(81)) == sorted(origins)


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "textual_serve" else object())
    result = chat("--web")
    assert result.exit_code == 2
    assert "needs textual_serve" in result.output
    assert 'pip install "edge-llm[web]"' in result.output


def test_a_bad_wish_and_a_model_that_is_none_end_it_before_anything_is_served(tmp_path: Path) -> None:
    assert chat("--web", "--tool", "shell").exit_code == 2
    assert chat("--web", "-m", str(tmp_path)).exit_code == 2


class Tab:
    """What a browser with the key has of one chat."""

    def __init__(self, client: aiohttp.ClientSession, program: Program) -> None:
        self.client, self.page = client, program.link.partition("#")[0]
        self.origin = {"Origin": "/".join(self.page.split("/")[:3])}

    async def enter(self, program: Program) -> None:
        key = program.link.partition("#")[2]
        async with self.client.post(f"{self.page}enter", data=key, headers=self.origin) as response:
            assert response.status == 204

    async def open(self) -> aiohttp.ClientWebSocketResponse:
        return await self.client.ws_connect(f"{self.page}ws?width=80&height=24", headers=self.origin)


async def until(chat: aiohttp.ClientWebSocketResponse, wanted: str) -> None:
    text = ""
    while wanted not in text:
        message = await chat.receive(60)
        assert message.type is aiohttp.WSMsgType.BINARY, message
        text += message.data.decode()


@linux
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_tabs_are_answered_by_one_engine_and_nothing_is_left_of_it(
    tiny_folder: Path, kernels: object, home: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the program ends, its server and its chats end, too."""
    monkeypatch.setenv("EDGE_LLM_HOME", str(home))

    async def body() -> None:
        async with (
            chat_web(home, "-m", str(tiny_folder), "--private", "--max-tokens", "8") as program,
            aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as client,
        ):
            tab = Tab(client, program)
            await tab.enter(program)
            assert paths.web_socket(program.process.pid).exists()
            before = set(descendants(program.process.pid))
            chats = [await tab.open() for _ in range(2 if number == signal.SIGINT else 1)]
            for chat in chats:
                await until(chat, "Ask anything")
                await chat.send_json(["stdin", "hi"])
                await chat.send_json(["stdin", "\r"])
            for chat in chats:
                await until(chat, "tok/s")
            started = set(descendants(program.process.pid))
            assert len(started - before) == len(chats), "a tab is a chat, not an engine"
            code = await program.end(number)
            assert code == (0 if number == signal.SIGINT else -signal.SIGKILL)
            async with asyncio.timeout(30):
                while any(map(lives, started)):
                    await asyncio.sleep(0.05)
            assert not paths.web_socket(program.process.pid).exists()

    asyncio.run(body())


def test_sockets_of_programs_that_were_killed_with_their_servers_go() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left, ours, other = (paths.web_socket(pid) for pid in (gone.pid, os.getpid(), 1))
    own = paths.server_socket()
    left.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    strange = left.with_name("web-x.sock")
    for path in (left, ours, other, own, strange):
        path.touch()
    try:
        engine_server._remove_left_sockets(left.parent)
        assert [path.exists() for path in (left, ours, other, own, strange)] == [False, True, True, True, True]
    finally:
        for path in (ours, other, own, strange):
            path.unlink()


def test_a_server_that_does_not_end_with_its_parent_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[Any, ...]] = []
    monkeypatch.setattr("os.read", lambda *_: b"")
    monkeypatch.setattr("os.kill", lambda *values: done.append(values))
    monkeypatch.setattr("time.sleep", lambda *values: done.append(values))
    monkeypatch.setattr("os._exit", lambda *values: done.append(values))
    engine_server._end_with_parent()
    assert done == [(os.getpid(), signal.SIGTERM), (engine_server._END_S,), (1,)]


def test_the_server_behind_it_leaves_batches_and_its_port_to_others(
    tiny_folder: Path, kernels: object, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[Any, ...]] = []
    monkeypatch.setattr("edge_llm_server.launch.launch", lambda *values, **more: told.append((*values, more)))
    monkeypatch.setattr(engine_server, "_end_with_parent", lambda: None)
    config = EngineConfig(context=512, private=True)
    engine_server.main({"folder": str(tiny_folder), "uds": str(tmp_path / "s"), "config": asdict(config)})
    ((settings, folders, given, more),) = told
    assert (settings.port, settings.uds, len(settings.keys)) == (0, tmp_path / "s", 1)
    assert folders == {str(tiny_folder): tiny_folder}
    assert given == config
    assert more["with_batches"] is False


def test_it_says_why_the_model_cannot_be_loaded(tiny_folder: Path, kernels: object, home: Path) -> None:
    async def body() -> None:
        with pytest.raises(AssertionError, match=r"error: .*context"):
            async with chat_web(home, "-m", str(tiny_folder), "--context", "16000000"):
                pass

    asyncio.run(body())


def test_a_tab_hears_what_it_needs_and_nothing_is_shown_to_others() -> None:
    from edge_llm_chat.launch import Wish
    from edge_llm_chat.web import tab

    wish = Wish(True, False, "Be kind.", {"seed": 5, "temperature": 0.5}, ("time", "calculator"))
    given = tab.Tab(wish, True, False, "http://localhost", Path("/run/s"), "m", "key")
    environment = given.environment()
    assert tab.Tab.read(environment[tab._VARIABLE]) == given
    assert not any("Be kind." in word or "key" in word.split() for word in given.command())
    assert set(environment) <= {tab._VARIABLE, *os.environ}
