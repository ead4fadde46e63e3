"""F12 and F14: clients that speak no HTTP, or leave. A trial is one connection to a server over a scripted engine.

python -m tools.trust.clients F12|F14 [--size commit|nightly] [--seed N]

F12: requests with bytes changed, cut off, doubled or never finished. Each connection is answered with a status that is not
5xx or closed, and /health goes on answering. F14: clients that leave in the queue, while the prompt is read, while it is
answered and while it is sent, streaming and not. Afterwards no slot, request, connection or file is left over.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import sys
import time
from collections.abc import Callable, Sequence

from tests.engine.fakes import byte_ids, make_core, says
from tests.server.harness import Running, running
from tools.trust.figure import Figure

_WAIT_S = 11.0
_GROUP = 25
_ENDLESS = says(byte_ids("a") * 4000)


def request(port: int, body: dict[str, object], path: str = "/v1/chat/completions") -> bytes:
    """A whole request."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost:{port}\r\nContent-Type: application/json\r\n"
    return head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data


# --- F12 ---


def raw(count: int, seed: int) -> int:
    """Runs `count` connections of broken HTTP."""
    chosen = random.Random(seed)
    with running(lambda: make_core(says("hi")), head_timeout_s=0.5, body_timeout_s=0.5) as server:
        for first in range(0, count, _GROUP):
            sent = [_broken(chosen, server.serving.port) for _ in range(min(_GROUP, count - first))]
            for trial, (data, status) in enumerate(zip(sent, _outcomes(server, sent), strict=True), first):
                if status is not None and not 200 <= status < 500:
                    raise RuntimeError(f"trial {trial} of seed {seed}: status {status} for {data[:300]!r}")
            if _outcomes(server, [_health(server.serving.port)]) != [200]:
                raise RuntimeError(f"trial {first} of seed {seed}: /health does not answer any more")
        _nothing_left(server)
    return count


def _health(port: int) -> bytes:
    return f"GET /health HTTP/1.1\r\nHost: localhost:{port}\r\nConnection: close\r\n\r\n".encode()


_LINES = (
    b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: identity, chunked\r\n", b"Content-Length: 5\r\n",
    b"Content-Length: -1\r\n", b"Content-Length: 99999999999999999999\r\n", b"Host: evil.example\r\n", b"Host:\r\n",
    b"Connection: upgrade\r\nUpgrade: websocket\r\n", b"Expect: 100-continue\r\n", b" folded\r\n", b"X: \x00\r\n",
    b"X" * 40_000 + b": y\r\n", b"X: y\r\n" * 2000, b"\r\n", b"Origin: null\r\n", b"Content-Encoding: gzip\r\n",
)  # fmt: skip
_BODIES = (
    b"5\r\nhello\r\n0\r\n\r\n", b"FFFFFFFFFFFFFFFFF\r\nx", b"-1\r\nx\r\n", b"5;x=y\r\nhello\r\n0\r\n\r\n", b"0\r\n\r\n",
    b"5\nhello\n0\n\n", b"", b"{}", b"\xff" * 100,
)  # fmt: skip


def _broken(chosen: random.Random, port: int) -> bytes:
    sent = request(port, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2})
    match chosen.randrange(5):
        case 0:  # bytes changed
            data = bytearray(sent)
            for _ in range(chosen.randrange(1, 6)):
                data[chosen.randrange(len(data))] = chosen.randrange(256)
            return bytes(data)
        case 1:  # cut off
            return sent[: chosen.randrange(len(sent))]
        case 2:  # doubled
            return sent + sent[chosen.randrange(len(sent)) :]
        case 3:  # other headers
            head, _, body = sent.partition(b"\r\n\r\n")
            lines = [line + b"\r\n" for line in head.split(b"\r\n")]
            lines.insert(chosen.randrange(1, len(lines) + 1), chosen.choice(_LINES))
            return b"".join(lines) + b"\r\n" + chosen.choice((body, *_BODIES))
    return bytes(chosen.randrange(256) for _ in range(chosen.randrange(200)))


def _outcomes(server: Running, sent: Sequence[bytes]) -> list[int | None]:
    """Status of the first reply on a connection for each of these; None if it was closed without one."""
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(socket.create_connection(("127.0.0.1", server.serving.port))) for _ in sent]
        for connection, data in zip(connections, sent, strict=True):
            connection.settimeout(_WAIT_S)
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                connection.sendall(data)
        return [_status(connection, data) for connection, data in zip(connections, sent, strict=True)]


def _status(connection: socket.socket, sent: bytes) -> int | None:
    try:
        reply = connection.recv(65536)
        if reply.startswith(b"HTTP/1.1 100 "):
            reply = connection.recv(65536)
    except ConnectionResetError:
        return None
    except TimeoutError:
        raise RuntimeError(f"nothing happened for {_WAIT_S:g} s after {sent[:300]!r}") from None
    return int(reply.split(b" ", 2)[1]) if reply.startswith(b"HTTP/1.1 ") else None


# --- F14 ---


def leaving(count: int, seed: int) -> int:
    """Runs `count` clients that leave."""
    chosen = random.Random(seed)
    core = make_core(_ENDLESS, context=4096, slots=2, max_rows=16, max_queued_requests=8, prefix_cache="off")
    with running(lambda: core) as server:
        before = _open_files()
        for _ in range(count):
            with contextlib.ExitStack() as stack:
                for _ in range(chosen.randrange(1, 6)):
                    connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.serving.port)))
                    words = "x" * chosen.choice((1, 1, 500, 3000))
                    body = {"messages": [{"role": "user", "content": words}], "stream": chosen.random() < 0.5}
                    sent = request(server.serving.port, {**body, "n": chosen.choice((1, 1, 2))})
                    connection.sendall(sent[: chosen.choice((len(sent), len(sent), len(sent) // 2))])
                    if chosen.random() < 0.3:
                        connection.settimeout(0.01)
                        with contextlib.suppress(TimeoutError):
                            connection.recv(chosen.randrange(1, 4096))
                time.sleep(chosen.random() * 0.03)
        _nothing_left(server)
        core.check_integrity()
        _until(lambda: _open_files() <= before, "open files")
        good = request(server.serving.port, {"prompt": "x", "max_tokens": 1}, "/v1/completions")
        if _outcomes(server, [good]) != [200]:
            raise RuntimeError(f"seed {seed}: no answer afterwards")
    return count


def _nothing_left(server: Running) -> None:
    engines, core = server.serving.engines, server.core
    _until(lambda: not core.has_work, "requests")
    _until(lambda: core.free_slots == core.cache.slots, "slots")
    _until(lambda: not engines._handles and all(seats.empty for seats in engines._seats.values()), "answers")
    _until(lambda: not server.serving._servers[0].server_state.tasks, "tasks")
    _until(lambda: not server.serving._servers[0].server_state.connections, "connections")


def _until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + _WAIT_S
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError(f"there are {what} left that nobody waits for")
        time.sleep(0.005)


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _figure(number: str, what: str, trials: Callable[[int, int], int], commit: int, nightly: int) -> Figure:
    sizes = {"commit": commit, "nightly": nightly}
    return Figure(number, what, f"python -m tools.trust.clients {number}", sizes, trials)


FIGURES = {
    "F12": _figure("F12", "connections to the server that speak broken HTTP", raw, 500, 20_000),
    "F14": _figure("F14", "groups of clients that leave the server in the middle", leaving, 200, 10_000),
}

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in FIGURES:
        sys.exit(__doc__)
    sys.exit(FIGURES[sys.argv[1]].main(sys.argv[2:]))
