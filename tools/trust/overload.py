"""F13: fifty times as many requests as the server can answer. A trial is one request, sent when its time has come.

    python -m tools.trust.overload [--size commit|nightly] [--seed N]

Requests come at an even pace whatever becomes of those before, streaming and not, over a scripted engine. Each is answered in
full or refused with 429 and when to come again; none is lost. A second after the last one the server answers as if nothing
had been, and it has not grown. How soon it refuses and how much it answers meanwhile is told on stderr.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles

from tools.trust.clients import request
from tools.trust.figure import Figure
from tools.trust.scripted_server import Script, scripted_server

TIMES = 50
MOST_GROWTH = 32 << 20
_TOKENS = 25
_SCRIPT = Script(grace_s=5.0, slots=2, step_s=0.01)
_MOST_AT_ONCE = 400
"""connections, fewer than the server holds: on a busy machine requests come later instead"""
_WAIT_S = 60.0
"""for an answer that was begun: this machine may be busy"""


@dataclass
class Told:
    """What became of requests: seconds until an answer's end and until a refusal's."""

    answered: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)


def trials(seconds: int, seed: int) -> int:
    """Overload for so long; gives how many requests that were."""
    with scripted_server(_SCRIPT) as (process, port):
        sent = asyncio.run(_overload(port, process.pid, seconds, random.Random(seed)))
        process.terminate()
        if process.wait(_WAIT_S) != 0:
            raise RuntimeError(f"the server has ended with {process.returncode}")
    return sent


async def _overload(port: int, pid: int, seconds: int, chosen: random.Random) -> int:
    peak = await _peak(port, max(2.0, seconds / 4))
    before = _resident(pid)
    told, health = Told(), Told()
    probing = asyncio.create_task(_probe(port, health))
    sent, asking = 0, set[asyncio.Task[None]]()
    loop = asyncio.get_running_loop()
    start = loop.time()
    while loop.time() < start + seconds:
        due = int((loop.time() - start) * TIMES * peak) - sent
        for _ in range(min(due, _MOST_AT_ONCE - len(asking))):
            asking.add(task := asyncio.create_task(_ask(port, told, stream=chosen.random() < 0.5)))
            task.add_done_callback(asking.discard)
            sent += 1
        await asyncio.sleep(0.002)
        for failed in [task for task in asking if task.done() and task.exception()]:
            failed.result()
    meanwhile = len(told.answered)
    await asyncio.gather(*asking)
    await asyncio.sleep(1.0)
    probing.cancel()
    growth = _resident(pid) - before
    after = Told()
    await _ask(port, after, stream=False)
    if not after.answered or len(told.answered) + len(told.refused) != sent or not told.refused:
        raise RuntimeError(f"of {sent} {len(told.answered)} were answered, {len(told.refused)} refused, then {after}")
    if growth > MOST_GROWTH:
        raise RuntimeError(f"the server has grown by {growth >> 20} MiB")
    goodput = f"answered {100 * meanwhile / seconds / peak:.0f} % of the peak"
    print(f"{sent / seconds / peak:.0f} times as many requests as the peak of {peak:.1f} answers/s", file=sys.stderr)
    print(f"{goodput}; the next one took {after.answered[0]:.2f} s; {growth / (1 << 20):+.1f} MiB", file=sys.stderr)
    for name, times in (("refusals", told.refused), ("/health", health.answered)):
        cuts = [1e3 * cut for cut in quantiles(times, n=100)]
        print(f"{name}: p50 {cuts[49]:.1f} ms, p99 {cuts[98]:.1f} ms, max {1e3 * max(times):.1f} ms", file=sys.stderr)
    return sent


async def _peak(port: int, seconds: float) -> float:
    """Answers a second where just enough is asked."""
    told = Told()

    async def one_after_another() -> None:
        while time.perf_counter() < end:
            await _ask(port, told, stream=False)

    start = time.perf_counter()
    end = start + seconds
    await asyncio.gather(*(one_after_another() for _ in range(_SCRIPT.slots + 1)))
    return len(told.answered) / (time.perf_counter() - start)


async def _ask(port: int, told: Told, *, stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "stream": stream, "max_tokens": _TOKENS}
    await _exchange(port, request(port, body), told, _whole_stream if stream else _whole_answer)


async def _probe(port: int, told: Told) -> None:
    """Asks /health twenty times a second."""
    data = f"GET /health HTTP/1.1\r\nHost: localhost:{port}\r\n\r\n".encode()
    while True:
        await _exchange(port, data, told, lambda text: text == '{"status":"ok"}')
        await asyncio.sleep(0.05)


async def _exchange(port: int, data: bytes, told: Told, whole: Callable[[str], bool]) -> None:
    """One request on a connection of its own. Raises unless it is answered in full or refused as it should be."""
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        status, headers, text = await asyncio.wait_for(read_reply(reader), _WAIT_S)
    finally:
        writer.close()
    took = time.perf_counter() - start
    if status == 200 and whole(text):
        told.answered.append(took)
    elif status == 429 and 1 <= int(headers.get("retry-after", 0)) <= 60 and "error" in json.loads(text):
        told.refused.append(took)
    else:
        raise RuntimeError(f"status {status}, {headers}: {text[-300:]!r}")


async def read_reply(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], str]:
    """Status, headers and text of a whole reply; the next one may follow."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
    body = b""
    if "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    else:
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readexactly(2)
    return int(head[0].split(" ", 2)[1]), headers, body.decode()


def _whole_answer(text: str) -> bool:
    said: str = json.loads(text)["choices"][0]["message"]["content"]
    return said == "a" * _TOKENS


def _whole_stream(text: str) -> bool:
    *chunks, last = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    return last == "[DONE]" and "".join(_delta(chunk) for chunk in chunks) == "a" * _TOKENS


def _delta(chunk: str) -> str:
    said: str = json.loads(chunk)["choices"][0]["delta"].get("content", "")
    return said


def _resident(pid: int) -> int:
    """Bytes of memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("the server is gone")


FIGURE = Figure(
    "F13",
    "requests at fifty times what the server can answer",
    "python -m tools.trust.overload",
    {"commit": 5, "nightly": 60},
    trials,
)

if __name__ == "__main__":
    sys.exit(FIGURE.main(sys.argv[1:]))
