"""F15: SIGTERM at a random moment under load, sometimes twice. A trial is the end of a server's process.

    python -m tools.trust.ends [--size commit|nightly] [--seed N]

Streams and whole answers are under way over a scripted engine, slow enough that some outlast the grace. The process ends with
code 0 within the grace, or at once after a second signal; every stream ends with its last event or an error, every other reply is
whole, and who was still sending is refused or closed.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import signal
import socket
import sys
import time

from tools.trust.clients import request
from tools.trust.figure import Figure
from tools.trust.scripted_server import Script, scripted_server

_GRACE_S, _LONG_GRACE_S = 0.3, 600.0
_WAIT_S = 20.0
"""for what must not take long: this machine may be busy"""


def trials(count: int, seed: int) -> int:
    """Runs `count` servers to their end; the slowest is told on stderr."""
    chosen = random.Random(seed)
    slowest_s = 0.0
    for trial in range(count):
        try:
            slowest_s = max(slowest_s, _trial(chosen))
        except (AssertionError, OSError, http.client.HTTPException) as error:
            raise RuntimeError(f"trial {trial} of seed {seed}: {error!r}") from error
    print(f"the slowest end took {slowest_s:.2f} s beyond its grace", file=sys.stderr)
    return count


def _trial(chosen: random.Random) -> float:
    """Seconds beyond the grace from the last signal to the process's end."""
    twice = chosen.random() < 0.3
    grace_s = _LONG_GRACE_S if twice else _GRACE_S
    with scripted_server(Script(grace_s)) as (process, port), contextlib.ExitStack() as stack:
        asked = [_ask(stack, port, chosen) for _ in range(chosen.randrange(1, 7))]
        time.sleep(0.2 * chosen.random())
        process.send_signal(signal.SIGTERM)
        if twice:
            time.sleep(0.05 * chosen.random())
            process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        for connection, streams, whole in asked:
            _check(connection, streams=streams, whole=whole)
        assert process.wait(_WAIT_S) == 0, f"exit code {process.returncode}"
        return time.monotonic() - began - (0.0 if twice else grace_s)


def _ask(stack: contextlib.ExitStack, port: int, chosen: random.Random) -> tuple[socket.socket, bool, bool]:
    """A connection with a request, whether it streams, and whether all of it was sent."""
    connection = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
    connection.settimeout(_WAIT_S)
    streams, whole = chosen.random() < 0.6, chosen.random() < 0.9
    body = {"messages": [{"role": "user", "content": "hello"}], "stream": streams}
    data = request(port, {**body, "max_tokens": chosen.choice((1, 20, 200, 2000))})
    connection.sendall(data if whole else data[: chosen.randrange(1, len(data))])
    return connection, streams, whole


def _check(connection: socket.socket, *, streams: bool, whole: bool) -> None:
    """Raises unless the reply is one that a client can tell from a broken one."""
    reply = http.client.HTTPResponse(connection)
    try:
        reply.begin()
    except (http.client.BadStatusLine, ConnectionResetError):
        return  # closed before it was read, without a word: clients ask again
    text = reply.read().decode()  # raises for one that is cut
    assert reply.status in (200, 503) if whole else reply.status < 500 or reply.status == 503, (
        reply.status,
        text[:300],
    )
    if reply.status == 200 and streams:
        last = text.rstrip("\n").rpartition("\n\n")[2].removeprefix("data: ")
        assert last == "[DONE]" or "error" in json.loads(last), f"a stream ends with {last[:200]}"
    else:
        assert json.loads(text)


FIGURE = Figure(
    "F15",
    "ends of a server by SIGTERM under load, some by two",
    "python -m tools.trust.ends",
    {"commit": 20, "nightly": 500},
    trials,
)

if __name__ == "__main__":
    sys.exit(FIGURE.main(sys.argv[1:]))
