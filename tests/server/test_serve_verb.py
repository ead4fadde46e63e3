"""`edge-llm serve`: its options, and a whole server as a process of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from edge_llm_cli.main import application
from typer.testing import CliRunner, Result

from edge_llm.errors import DownloadError, EdgeLLMError, ModelFormatError, ModelNotFoundError
from edge_llm.kernels.warmup import KernelLibrary
from tests.server.test_life import until

ROOT = Path(__file__).parents[2]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """What the verb would launch."""
    calls: list[Any] = []
    monkeypatch.setattr("edge_llm_server.launch.launch", lambda *values, **_: calls.append(values))
    monkeypatch.setattr("edge_llm.install.importer.resolve", lambda name, _progress: tmp_path / name)
    monkeypatch.setattr("edge_llm_server.sockets.tcp_socket", lambda _host, _port: socket.socket())
    return calls


def serve(*arguments: str) -> Result:
    return CliRunner().invoke(application(), ["serve", *arguments], prog_name="edge-llm")


def test_options_become_settings(launched: list[Any], tmp_path: Path, home: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"ann {'a' * 32}\n")
    keys.chmod(0o600)
    result = serve(
        *("-m", "a", "-m", "b", "--host", "0.0.0.0", "--port", "81", "--keys", str(keys), "--allow-host", "ai.example"),
        *("--allow-origin", "https://chat.example", "--keep-alive", "60", "--fallback", "c", "--slots", "3"),
        *("--context", "512", "--cache", "off", "--requests-per-minute", "5", "--tokens-per-minute", "6"),
        *("--max-concurrent", "7", "--grace", "1"),
    )
    assert result.exit_code == 0, result.output
    ((settings, folders, config),) = launched
    assert (settings.models, settings.host, settings.port) == (("a", "b"), "0.0.0.0", 81)
    assert [key.name for key in settings.keys] == ["ann"]
    assert (settings.hosts, settings.origins) == (("ai.example",), ("https://chat.example",))
    assert (settings.keep_alive_s, settings.fallback, settings.grace_s) == (60, "c", 1)
    assert (settings.requests_per_minute, settings.tokens_per_minute, settings.max_concurrent) == (5, 6, 7)
    assert (config.slots, config.context, config.prefix_cache) == (3, 512, "memory")
    assert folders == {name: tmp_path / name for name in "abc"}
    assert settings.uds is not None
    assert settings.uds.name == "server.sock" or settings.uds.suffix == ".sock"


@pytest.mark.parametrize("error", [ModelFormatError("damaged"), DownloadError("offline")])
def test_a_fallback_stands_in_for_a_model_that_cannot_be_used(
    launched: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: EdgeLLMError
) -> None:
    def resolve(name: str, _progress: object) -> Path:
        if name != "b":
            raise error
        return tmp_path / name

    monkeypatch.setattr("edge_llm.install.importer.resolve", resolve)
    assert serve("-m", "a", "--fallback", "b").exit_code == 0
    ((_, folders, _config),) = launched
    assert folders == {"a": error, "b": tmp_path / "b"}
    for arguments in (("-m", "a"), ("-m", "b", "--fallback", "a")):
        refused = serve(*arguments)
        assert refused.exit_code != 0
        assert str(error) in refused.output
    error = ModelNotFoundError("no such model")
    assert serve("-m", "a", "--fallback", "b").exit_code == 2
    assert len(launched) == 1


def test_keys_of_the_environment_do_not_stay_there(launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGE_LLM_API_KEYS", f"ann:{'a' * 32}")
    assert serve().exit_code == 0
    assert [key.name for key in launched[0][0].keys] == ["ann"]
    assert "EDGE_LLM_API_KEYS" not in os.environ


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--host", "0.0.0.0"), "it needs keys there"),
        (("--keys", "missing"), "cannot read the keys"),
        (("--port", "99999"), "--port must be between 0 and 65535, not 99999"),
        (("--keep-alive", "-1"), "--keep-alive must be between 0 and 31536000, not -1"),
        (("--requests-per-minute", "0"), "--requests-per-minute must be between 1 and 1000000000, not 0"),
        (("--quality-watch", "0"), "--quality-watch must be between 0.01 and 8760 hours, not 0"),
        (("--quality-watch", "nan"), "--quality-watch must be between 0.01 and 8760 hours, not nan"),
        (("--cache", "maybe"), "--cache must be on or off"),
    ],
)
def test_what_cannot_be_is_one_line(launched: list[Any], arguments: tuple[str, ...], message: str) -> None:
    result = serve(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert launched == []


def test_a_port_that_is_taken_is_told_before_a_model_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("edge_llm.install.importer.resolve", lambda name, _progress: asked.append(name))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = serve("--port", str(port))
    assert result.exit_code == 2
    assert result.output.startswith(f"error: cannot listen on 127.0.0.1:{port}: ")
    assert "hint: choose another --port\n" in result.output
    assert asked == []


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "uvicorn" else object())
    result = serve()
    assert result.exit_code == 2
    assert "the server needs uvicorn" in result.output
    assert 'pip install "edge-llm[server]"' in result.output


# --- the whole of it ---


class Process:
    """`edge-llm serve` of a model folder."""

    def __init__(self, folder: Path, before: str = "", *, options: tuple[str, ...] = (), wait: bool = True) -> None:
        command = f"{before}\nfrom edge_llm_cli.entry import run; run()"
        self.child = subprocess.Popen(
            [sys.executable, "-c", command, "serve", "-m", str(folder), "--port", "0", "--context", "512", *options],
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'apps'}"},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self.url = self._until(r"listening on (\S+),").group(1)
        if wait:
            self._until("ready: ")

    def _until(self, pattern: str) -> re.Match[str]:
        assert self.child.stderr is not None
        for line in self.child.stderr:
            self.lines.append(line)
            if found := re.match(pattern, line):
                return found
        raise AssertionError("".join(self.lines))

    def ended(self) -> tuple[int, list[str]]:
        """Exit code, and all that it said."""
        assert self.child.stderr is not None
        if not self.child.stderr.closed:
            self.lines += self.child.stderr.read().splitlines()
            self.child.stderr.close()
        return self.child.wait(60), self.lines


@pytest.fixture
def process(tiny_folder: Path, kernels: KernelLibrary) -> Iterator[Process]:
    made = Process(tiny_folder)
    yield made
    made.child.kill()
    made.ended()


CHAT = {"messages": [{"role": "user", "content": "canary words"}], "max_tokens": 400, "ignore_eos": True}


def test_it_serves_until_it_is_told_to_stop_and_says_nothing_of_what_was_said(process: Process) -> None:
    name = httpx.get(f"{process.url}/v1/models").json()["data"][0]["id"]
    reply = httpx.post(f"{process.url}/v1/chat/completions", json=CHAT, timeout=60).json()
    assert reply["model"] == name
    assert reply["usage"]["completion_tokens"] == 400
    shown = httpx.post(f"{process.url}/api/show", json={"model": name}).json()
    assert shown["model_info"]["llama.context_length"] == 512
    assert "edge_llm:generation_tokens_total" in httpx.get(f"{process.url}/metrics").text
    process.child.send_signal(signal.SIGTERM)
    code, lines = process.ended()
    assert code == 0
    assert json.loads(lines[-1])["event"] == "stopped"
    assert not any("canary" in line for line in lines)


def test_the_end_does_not_wait_for_a_model_that_loads(tiny_folder: Path) -> None:
    never = "import edge_llm_server.launch as l, time\nl.ProcessClient = lambda *_, **__: time.sleep(600)"
    process = Process(tiny_folder, never, wait=False)
    until(lambda: httpx.get(f"{process.url}/health").status_code == 200)
    assert httpx.get(f"{process.url}/ready").status_code == 503
    process.child.send_signal(signal.SIGTERM)
    assert process.ended()[0] == 0


def engine_of(process: Process) -> int:
    lists = Path(f"/proc/{process.child.pid}/task").glob("*/children")
    (engine,) = [int(child) for children in lists for child in children.read_text().split()]
    return engine


def test_an_engine_that_dies_is_a_clean_error_and_comes_back(process: Process) -> None:
    """F16, B29: SIGKILL in mid-answer."""
    with httpx.stream("POST", f"{process.url}/v1/chat/completions", json=CHAT | {"stream": True}, timeout=60) as reply:
        lines = reply.iter_lines()
        next(lines)
        os.kill(engine_of(process), signal.SIGKILL)
        last = [line for line in lines if line][-1]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["type"], error["code"]) == ("unavailable_error", "unavailable")
    again = httpx.post(f"{process.url}/v1/chat/completions", json=CHAT | {"seed": 1}, timeout=60)
    assert again.json()["usage"]["completion_tokens"] == 400


def test_a_damaged_model_is_answered_for_by_its_fallback(
    tiny_folder: Path, tmp_path: Path, kernels: KernelLibrary
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(tiny_folder, damaged)
    (damaged / "weights.bin").write_bytes(b"")
    process = Process(damaged, options=("--fallback", str(tiny_folder)))
    try:
        assert "answers for it" in process.lines[0]
        ready = httpx.get(f"{process.url}/ready")
        reply = httpx.post(f"{process.url}/v1/chat/completions", json=CHAT | {"model": "damaged"}, timeout=60).json()
        assert (ready.status_code, reply["usage"]["completion_tokens"]) == (200, 400)
        assert reply["model"] != "damaged"
        listed = httpx.get(f"{process.url}/v1/models").json()["data"]
        assert [model["id"] for model in listed] == ["damaged"]
    finally:
        process.child.kill()
        process.ended()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_ends_it_at_once(process: Process, number: signal.Signals) -> None:
    engine = engine_of(process)
    with httpx.stream(
        "POST", f"{process.url}/v1/chat/completions", json=CHAT | {"stream": True, "n": 8}, timeout=60
    ) as reply:
        next(reply.iter_lines())
        process.child.send_signal(number)
        time.sleep(0.05)
        process.child.send_signal(number)
        code, _ = process.ended()
    assert code == 0
    until(lambda: not Path(f"/proc/{engine}").exists())


def test_nothing_is_fetched_and_nobody_is_called(tiny_folder: Path, kernels: KernelLibrary) -> None:
    """B37: a server that may not open a connection to anybody works."""
    watch = (
        "import sys\n"
        "def hook(event, arguments):\n"
        "    if event == 'socket.connect' and not isinstance(arguments[1], (str, bytes)):\n"
        "        print('connects to', arguments[1], file=sys.stderr)\n"
        "    if event == 'socket.getaddrinfo' and arguments[0] not in ('127.0.0.1', None):\n"
        "        print('asks for', arguments[0], file=sys.stderr)\n"
        "sys.addaudithook(hook)"
    )
    process = Process(tiny_folder, watch)
    reply = httpx.post(f"{process.url}/v1/chat/completions", json=CHAT | {"max_tokens": 2}, timeout=60)
    assert reply.status_code == 200
    process.child.send_signal(signal.SIGTERM)
    code, lines = process.ended()
    assert code == 0
    assert not any("connects to" in line or "asks for" in line for line in lines)
