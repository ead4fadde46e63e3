"""A server's life: loading, full, left by its clients, stopping."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from edge_llm_server.keys import ApiKey
from edge_llm_server.serving import Serving
from edge_llm_server.settings import ServerSettings
from edge_llm_server.sockets import tcp_socket

from edge_llm.engine.client import EngineClient, ThreadClient
from edge_llm.engine.core import EngineCore
from edge_llm.errors import EdgeLLMError, InputError, SessionError
from edge_llm.model.step import Step
from tests.engine.fakes import byte_ids, make_core, says
from tests.server.harness import Running, host_of, running

CHAT = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0}
ENDLESS = says(byte_ids("a") * 10_000)


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread does."""
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen within 30 s")


class Gate:
    """An engine whose steps wait until they are let through, so that a test knows where it is."""

    def __init__(self, **options: Any) -> None:
        self._go, self._open, self.steps, self.options = threading.Semaphore(0), False, 0, options

    def __call__(self) -> EngineCore:
        core = make_core(ENDLESS, **{"context": 4096, "max_rows": 16, "prefix_cache": "off", **self.options})
        core.session.before_step = self._wait
        return core

    def _wait(self, _step: Step) -> None:
        if not self._open:
            self._go.acquire(timeout=20)
        self.steps += 1

    def let(self, steps: int) -> None:
        self._go.release(steps)

    def open(self) -> None:
        self._open = True
        self._go.release(1000)


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate(slots=1, max_queued_requests=1)
    yield made
    made.open()


def post(server: Running, body: Any = None, path: str = "/v1/chat/completions", **options: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=CHAT | (body or {}), timeout=30, **options)


def ask(server: Running, body: dict[str, Any], *, buffer: int | None = None) -> socket.socket:
    """A connection on which a request was made and no reply is read."""
    connection = socket.socket()
    if buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.connect(("127.0.0.1", server.serving.port))
    data = json.dumps(CHAT | body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost:{server.serving.port}\r\n"
    connection.sendall(
        head.encode() + f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
    )
    return connection


# --- clients that leave (B48, F14) ---


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("prompt", "before"), [("hello", 6), ("x" * 2000, 4)], ids=["answer", "prefill"])
def test_a_client_that_leaves_frees_its_slot_within_a_step(gate: Gate, stream: bool, prompt: str, before: int) -> None:
    with running(gate) as server:
        for _ in range(10):
            connection = ask(server, {"stream": stream, "messages": [{"role": "user", "content": prompt}]})
            until(lambda: server.core.free_slots == 0)
            at = gate.steps
            gate.let(before)
            until(lambda at=at: gate.steps >= at + before)
            connection.close()
            sequence = server.core._scheduler.sequences[0]
            until(lambda sequence=sequence: sequence.cancelled)
            steps = gate.steps
            gate.let(1)  # the step that was being computed
            until(lambda: server.core.free_slots == 1)
            assert gate.steps == steps + 1
        gate.open()
        assert post(server, {"max_tokens": 2}).json()["choices"][0]["message"]["content"] == "aa"
        server.core.check_integrity()
        until(lambda: not server.serving.engines._handles)


def test_a_client_that_leaves_the_queue_leaves_no_work(gate: Gate) -> None:
    with running(gate) as server:
        first = ask(server, {})
        until(lambda: server.core.free_slots == 0)
        second = ask(server, {"n": 1})
        until(lambda: len(server.core._scheduler) == 2)
        waiting = server.core._scheduler.sequences[1]
        second.close()
        until(lambda: waiting.cancelled)
        gate.let(1)
        until(lambda: len(server.core._scheduler) == 1)
        first.close()
        gate.open()
        until(lambda: len(server.core._scheduler) == 0)


def test_a_client_that_takes_nothing_loses_its_connection_and_its_slot() -> None:
    core = make_core(ENDLESS, context=20_000, slots=1, prefix_cache="off")
    with running(lambda: core, send_timeout_s=0.2) as server:
        connection = ask(server, {"stream": True, "logprobs": True, "top_logprobs": 20}, buffer=4096)
        until(lambda: any(entry["event"] == "request" for entry in server.log))
        (entry,) = [entry for entry in server.log if entry["event"] == "request"]
        assert core.free_slots == 1
        assert entry["bytes_out"] < 2_000_000, "how long it keeps a slot grows with what lies in buffers"
        connection.close()


def test_what_nobody_waits_for_any_more_is_not_even_read(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """F13: a client that sends megabytes and closes at once."""
    submitted: list[Any] = []
    submit = ThreadClient.submit

    def note(self: ThreadClient, request: Any) -> Any:
        submitted.append(request)
        return submit(self, request)

    with running(gate) as server:
        entered = server.serving.engines._entered
        left = threading.Event()

        async def enter_late(*arguments: Any) -> Any:
            held = await entered(*arguments)
            await asyncio.to_thread(left.wait, 20)
            await asyncio.sleep(0.2)
            return held

        monkeypatch.setattr(server.serving.engines, "_entered", enter_late)
        monkeypatch.setattr(ThreadClient, "submit", note)
        for stream in (False, True):
            ask(server, {"stream": stream}).close()
        left.set()
        until(lambda: sum(entry["event"] == "request" for entry in server.log) == 2)
        assert [entry["status"] for entry in server.log if entry["event"] == "request"] == [499, 499]
    assert not submitted


# --- too much at a time (B50, F13) ---


def test_what_is_too_much_is_told_at_once_when_to_come_again(gate: Gate) -> None:
    """Queue limit 1, one slot, six requests to a loaded model."""
    with running(gate) as server:
        taken = [ask(server, {"max_tokens": 2})]
        until(lambda: server.core.free_slots == 0)
        taken.append(ask(server, {"max_tokens": 2}))
        until(lambda: len(server.core._scheduler) == 2)
        for _ in range(4):
            reply = post(server)
            assert reply.status_code == 429
            assert 1 <= int(reply.headers["retry-after"]) <= 60
            assert reply.json()["error"]["code"] == "queue_full"
        gate.open()
        for connection in taken:
            response = http.client.HTTPResponse(connection)
            response.begin()
            assert response.status == 200
            response.close()
            connection.close()
        assert post(server, {"max_tokens": 1}).status_code == 200


def test_more_than_the_engine_holds_is_refused_before_it_is_read(gate: Gate) -> None:
    with running(gate, most_requests=2) as server:
        taken = [ask(server, {}), ask(server, {})]
        until(lambda: len(server.core._scheduler) == 2)
        reply = post(server, {"messages": [{"role": "user", "content": "x" * 9000}]})  # too long, were it read
        assert reply.status_code == 429
        for connection in taken:
            connection.close()
        gate.open()
        until(lambda: len(server.core._scheduler) == 0)


def test_openais_client_comes_again_by_itself(gate: Gate) -> None:
    with running(gate) as server:
        taken = [ask(server, {"max_tokens": 2}), ask(server, {"max_tokens": 2})]
        until(lambda: len(server.core._scheduler) == 2)
        opener = threading.Thread(
            target=lambda: (until(lambda: 429 in [entry.get("status") for entry in server.log]), gate.open())
        )
        opener.start()
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=2) as client:
            reply = client.chat.completions.create(model="fake", messages=CHAT["messages"], max_tokens=1)
        assert reply.choices[0].message.content
        opener.join()
        for connection in taken:
            connection.close()


# --- long prompts (B49) ---


def test_a_stream_says_that_it_lives_while_the_prompt_is_read(gate: Gate) -> None:
    with running(gate, ping_s=0.05) as server:
        lines = []
        options: Any = {"json": CHAT | {"stream": True, "max_tokens": 1}, "timeout": 30}
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", **options) as reply:
            assert reply.status_code == 200
            for line in reply.iter_lines():
                lines.append(line)
                if lines.count(": ping") == 3:
                    gate.open()
        assert lines[0].startswith('data: {"id"')
        assert lines[-2] == "data: [DONE]"


def test_a_chat_goes_on_while_a_long_prompt_is_read() -> None:
    gate = Gate(slots=2)
    with running(gate) as server:
        chat, long = ask(server, {"stream": True}), None
        gate.let(5)
        until(lambda: gate.steps == 5)
        (short,) = server.core._scheduler.sequences
        long = ask(server, {"messages": [{"role": "user", "content": "x" * 3500}]})
        until(lambda: len(server.core._scheduler) == 2)
        said = len(short.ids)
        gate.let(20)
        until(lambda: gate.steps == 25)
        assert len(short.ids) >= said + 19  # a token in each step but, maybe, the one that was being planned
        assert server.core.free_slots == 0
        chat.close()
        long.close()
        gate.open()


# --- loading ---


class Loading:
    """A model that loads when it is told to, or fails."""

    def __init__(self, error: EdgeLLMError | None = None) -> None:
        self.go, self.error, self.loads = threading.Event(), error, 0

    def __call__(self, folder: Path) -> EngineClient:
        self.loads += 1
        assert self.go.wait(20)
        if self.error is not None and folder.name == "fake":
            raise self.error
        return ThreadClient(make_core(says("ok")))


def test_health_is_there_at_once_and_ready_when_the_model_is() -> None:
    loading = Loading()
    with running(load=loading, load_wait_s=0, wait=False) as server:
        until(lambda: len(server.log) > 0)
        assert httpx.get(f"{server.url}/health").status_code == 200
        ready = httpx.get(f"{server.url}/ready")
        assert (ready.status_code, ready.headers["retry-after"]) == (503, "1")
        refused = post(server)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
        assert refused.json()["error"]["type"] == "unavailable_error"
        loading.go.set()
        until(lambda: httpx.get(f"{server.url}/ready").status_code == 200)
        assert post(server).json()["choices"][0]["message"]["content"] == "ok"
    assert loading.loads == 1


def test_a_request_waits_for_a_model_that_is_soon_there() -> None:
    loading = Loading()
    with running(load=loading, models=("fake", "other"), wait=False) as server:
        threading.Timer(0.2, loading.go.set).start()
        assert post(server, {"model": "other"}).json()["choices"][0]["message"]["content"] == "ok"
        assert {model["id"] for model in httpx.get(f"{server.url}/v1/models").json()["data"]} == {"fake", "other"}


def test_a_first_model_that_cannot_be_loaded_ends_the_server() -> None:
    loading = Loading(SessionError("no memory"))
    loading.go.set()
    with pytest.raises(SessionError, match="no memory"), running(load=loading):
        pass


def test_a_fallback_answers_and_the_reply_names_it() -> None:
    loading = Loading(SessionError("no memory"))
    loading.go.set()
    with running(load=loading, models=("fake", "small"), fallback="small") as server:
        reply = post(server, {"model": "fake"})
        assert reply.json()["choices"][0]["message"]["content"] == "ok"


def test_a_model_that_cannot_be_loaded_is_a_503_that_is_not_tried_again() -> None:
    loading = Loading(SessionError("no memory"))
    loading.go.set()
    with running(load=loading, models=("first", "fake")) as server:
        reply = post(server, {"model": "fake"})
        assert reply.status_code == 503
        assert "no memory" in reply.json()["error"]["message"]
        assert reply.headers["x-should-retry"] == "false"


# --- faults of the engine (F16) ---


def failing_after(steps: int) -> EngineCore:
    core = make_core(ENDLESS, slots=2, prefix_cache="off")
    left = [steps]

    def fail(_step: Step) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise SessionError("the step failed")

    core.session.before_step = fail
    return core


@pytest.mark.parametrize("steps", [1, 5])
def test_a_step_that_fails_is_a_clean_error_and_the_next_request_is_answered(steps: int) -> None:
    with running(lambda: failing_after(steps)) as server:
        reply = post(server)
        assert reply.status_code == 500
        assert reply.json()["error"]["type"] == "server_error"
        assert post(server, {"max_tokens": 3}).json()["choices"][0]["message"]["content"] == "aaa"


def test_a_stream_that_fails_says_so_in_its_last_event() -> None:
    with (
        running(lambda: failing_after(5)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        stream = client.chat.completions.create(model="fake", messages=CHAT["messages"], stream=True)
        with pytest.raises(openai.APIError, match="the step failed"):
            list(stream)
        told = 'edge_llm:failed_streams_total{path="/v1/chat/completions"} 1'
        until(lambda: told in httpx.get(f"{server.url}/metrics").text)
    (entry,) = [entry for entry in server.log if entry.get("path") == "/v1/chat/completions"]
    assert (entry["status"], entry["fault"].split()[0]) == (200, "SessionError")


# --- the end (F15) ---


@pytest.mark.parametrize("stream", [False, True])
def test_answers_end_within_the_grace(gate: Gate, stream: bool) -> None:
    with running(gate, grace_s=10.0) as server:
        connection = ask(server, {"stream": stream, "max_tokens": 3})
        until(lambda: server.core.free_slots == 0)
        server.serving.stop()
        until(lambda: server.serving.engines.draining)
        assert httpx.get(f"{server.url}/health").status_code == 200
        for refused in (httpx.get(f"{server.url}/ready"), post(server)):
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        gate.open()
        response = http.client.HTTPResponse(connection)
        response.begin()
        body = response.read().decode()
        assert response.status == 200
        assert (
            body.endswith("data: [DONE]\n\n") if stream else json.loads(body)["choices"][0]["finish_reason"] == "length"
        )
        connection.close()
    assert server.log[-1]["event"] == "stopped"


@pytest.mark.parametrize("stream", [False, True])
def test_answers_that_take_longer_are_told_so(stream: bool) -> None:
    core = make_core(ENDLESS, context=60_000, slots=1, prefix_cache="off")
    core.session.before_step = lambda _step: time.sleep(0.005)
    with running(lambda: core, grace_s=0.1) as server:
        connection = ask(server, {"stream": stream})
        until(lambda: core.free_slots == 0)
        server.serving.stop()
        response = http.client.HTTPResponse(connection)
        response.begin()
        body = response.read().decode()
        assert response.status == (200 if stream else 503)
        last = body.strip().splitlines()[-1].removeprefix("data: ")
        assert json.loads(last)["error"]["message"] == "the server is stopping"
        connection.close()


def test_who_is_still_sending_when_the_grace_is_over_is_told_so() -> None:
    with running(grace_s=0.1) as server:
        connection = socket.create_connection(("127.0.0.1", server.serving.port))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost:{server.serving.port}\r\n"
        connection.sendall(f'{head}Content-Type: application/json\r\nContent-Length: 99\r\n\r\n{{"mess'.encode())
        until(lambda: server.serving._servers[0].server_state.tasks)
        server.serving.stop()
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert response.status == 503
        assert json.loads(response.read())["error"]["message"] == "the server is stopping"
        connection.close()


def test_the_second_time_it_stops_at_once() -> None:
    core = make_core(ENDLESS, context=60_000, slots=1, prefix_cache="off")
    core.session.before_step = lambda _step: time.sleep(0.005)
    with running(lambda: core, grace_s=600.0) as server:
        connection = ask(server, {"stream": True})
        until(lambda: core.free_slots == 0)
        server.serving.stop()
        server.serving.stop()
        until(lambda: server.log[-1]["event"] == "stopped")
        connection.close()


# --- doors ---


def test_a_unix_socket_is_its_owners(tmp_path: Path) -> None:
    path = tmp_path / "run" / "s.sock"
    with running(lambda: make_core(says("ok")), uds=path, keys=(ApiKey.of("me", "k" * 32),)) as server:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        with httpx.Client(transport=httpx.HTTPTransport(uds=os.fspath(path)), base_url="http://localhost") as client:
            assert client.get("/ready").status_code == 200
            assert client.post("/v1/chat/completions", json=CHAT).json()["choices"][0]["message"]["content"] == "ok"
            assert client.get("/ready", headers={"host": "evil.example"}).status_code == 421
        assert post(server).status_code == 401
        with running(lambda: make_core(says("no")), uds=path):  # the second one leaves it to the first
            pass
        assert path.exists()
    assert not path.exists()


def test_a_socket_that_was_left_over_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "run" / "s.sock"
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(os.fspath(path))
    with running(lambda: make_core(says("ok")), uds=path), socket.socket(socket.AF_UNIX) as probe:
        probe.connect(os.fspath(path))


def test_an_address_in_use_is_one_clear_line() -> None:
    with running() as server:
        settings = ServerSettings(models=("m",), port=server.serving.port)
        with pytest.raises(InputError, match=rf"cannot listen on 127.0.0.1:{server.serving.port}: "):
            Serving(settings, host_of({}, lambda _: ThreadClient(make_core())), {})


def test_an_address_that_is_none_has_a_hint_of_its_own() -> None:
    with pytest.raises(InputError) as caught:
        tcp_socket("192.0.2.1", 0)  # of a network that exists in documents only
    assert "--host" in str(caught.value.hint)


def _is_closed(connection: socket.socket) -> bool:
    connection.settimeout(20)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_slow_clients_lose_their_connection_and_disturb_nobody() -> None:
    """F12: 200 connections that send a byte now and then, half-open ones and ones that say nothing."""
    with running(head_timeout_s=1.0, max_connections=300) as server:
        address = ("127.0.0.1", server.serving.port)
        slow = [socket.create_connection(address) for _ in range(200)]
        for connection in slow[:100]:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: lo")
        assert httpx.get(f"{server.url}/health").status_code == 200
        for connection in slow[:50]:
            connection.sendall(b"c")
        for connection in slow:
            assert _is_closed(connection)
            connection.close()
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_burst_of_requests_is_answered_though_nothing_of_it_was_read_yet() -> None:
    """F13: what stands still for a moment must not end those who have asked meanwhile."""
    with running(lambda: make_core(says("ok")), max_connections=4, head_timeout_s=600.0) as server:
        address = ("127.0.0.1", server.serving.port)
        silent = [socket.create_connection(address) for _ in range(3)]
        until(lambda: len(server.serving._servers[0].server_state.connections) == 3)
        assert server.serving._loop is not None
        held = threading.Event()
        server.serving._loop.call_soon_threadsafe(held.wait, 20)
        asked = [ask(server, {}) for _ in range(6)]
        held.set()
        for connection in asked:
            response = http.client.HTTPResponse(connection)
            response.begin()
            assert response.status == 200
            response.close()
            connection.close()
        for connection in silent:
            assert _is_closed(connection)
            connection.close()


def test_a_new_connection_takes_the_place_of_the_longest_idle_one() -> None:
    with running(max_connections=3, head_timeout_s=600.0) as server:
        address = ("127.0.0.1", server.serving.port)
        idle = []
        for count in range(1, 4):
            idle.append(socket.create_connection(address))
            until(lambda count=count: len(server.serving._servers[0].server_state.connections) == count)
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert _is_closed(idle[0])
        idle += [socket.create_connection(address) for _ in range(20)]
        assert httpx.get(f"{server.url}/health").status_code == 200
        for connection in idle:
            connection.close()


def test_connections_that_are_answered_keep_their_places(gate: Gate) -> None:
    with running(gate, max_connections=1) as server:
        answered = ask(server, {"max_tokens": 2})
        until(lambda: server.core.free_slots == 0)
        with socket.create_connection(("127.0.0.1", server.serving.port)) as refused:
            assert _is_closed(refused)
        gate.open()
        assert answered.recv(100).startswith(b"HTTP/1.1 200")
        answered.close()
