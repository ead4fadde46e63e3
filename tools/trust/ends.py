"""F15: SIGTERM at a random moment under load, sometimes twice. A trial is the end of a server's process.

    python -m tools.trust.ends [--size commit|nightly] [--seed N]

Streams and whole answers are under way over a scripted engine, slow enough that some outlast the grace. The process ends with
code 0 within the grace, or at once after a second signal; every stream ends with its last event or an error, every other reply is
whole, and who was still sending is refused or closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import json
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from edge_llm_server.exchange import Log
from edge_llm_server.serving import Serving
from edge_llm_server.settings import ServerSettings

from edge_llm.engine.client import EngineClient, ThreadClient
from tests.engine.fakes import byte_ids, make_core, says
from tests.server.harness import card, host_of
from tools.trust.clients import request
from tools.trust.figure import Figure

ROOT = Path(__file__).parents[2]
_GRACE_S, _LONG_GRACE_S = 0.3, 600.0
_STEP_S = 0.002
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
    command = [sys.executable, "-m", "tools.trust.ends", "--serve", str(grace_s)]
    with (
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(process.kill)
        assert process.stdout is not None
        port = int(process.stdout.readline())
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


def serve(grace_s: float) -> None:
    """The process that ends."""
    core = make_core(says(byte_ids("a") * 4000), context=4096, slots=3, prefix_cache="off")
    session: Any = core.session
    session.before_step = lambda _step: time.sleep(_STEP_S)

    def load(_folder: Path) -> EngineClient:
        return ThreadClient(core)

    settings = ServerSettings(models=("fake",), port=0, grace_s=grace_s)
    serving = Serving(settings, host_of({"fake": Path("fake")}, load), {"fake": card("fake")}, log=Log(io.StringIO()))
    asyncio.run(serving.run(lambda: print(serving.port, flush=True)))


FIGURE = Figure(
    "F15",
    "ends of a server by SIGTERM under load, some by two",
    "python -m tools.trust.ends",
    {"commit": 20, "nightly": 500},
    trials,
)

if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(float(sys.argv[2]))
    else:
        sys.exit(FIGURE.main(sys.argv[1:]))
