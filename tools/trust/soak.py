"""F17, F18, F19: a server that is asked for a long time: what it holds in the end, and whether its event loop was ever late.

    python -m tools.trust.soak F17|F19 [--size commit|nightly] [--seed N] [--turn COMMAND]
    python -m tools.trust.soak F18 [--model MODEL] [--size commit|nightly] [--seed N] [--turn COMMAND]

F17: requests of all kinds to the server over a tiny model in its child process; a trial is one of them. F18: the same to a
real model for some minutes, with the speed in tokens a CPU second between them. Each gets the reply that it is owed. In the
end the processes hold no more open files, threads and temporary files than after a fifth of them, have grown by less than 32 MiB,
and give the same questions the same answers as in the beginning. F19: how late the event loop is while prompts are
read, templates rendered, grammars compiled and a model imported. The slope of the memory, speed and lateness are told on stderr.

COMMAND writes a line when it is this run's turn to use the machine, which ends with COMMAND's input: every 100 s. Ctrl-C and
SIGTERM end a run early, with what was seen until then.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from edge_llm import paths
from edge_llm.export.exporter import export_gguf
from edge_llm.install.importer import resolve
from edge_llm.kernels.warmup import load_kernels
from tools.bench.memory_growth import Slope, slope
from tools.tiny_model import write_tiny_gguf
from tools.trust.figure import Figure
from tools.trust.soak_server import Late
from tools.trust.soak_traffic import Client, Kind, conversation, ended, one, said

ROOT = Path(__file__).parents[2]
MOST_GROWTH = 32 << 20
"""of a run that is too short for a slope"""
_WORKERS = 6
_MANY = 80
"""more than a server has threads for its engines"""
_TURN_S = 100.0
_STOPPED_S = 8.0
"""for which no process does nothing, however busy the machine is"""
_WAIT_S = 30.0
"""for what must not take long: this machine may be busy"""
_WARM_UP = 0.2
_SLICES, _LEAST_SLICE = 800, 25
_ENOUGH = 200
"""slices, for a slope"""
_NO_CACHES = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0", "MALLOC_ARENA_MAX": "1"}
"""The C library keeps up to 0.2 MB of freed memory for each of some fifty threads, which takes tens of thousands of requests to
fill and would hide a leak."""
TINY: dict[str, Any] = {"context": 2048, "slots": 4, "max_chunk": 64, "threads": 1}
"""config of the engine of a tiny model"""
_MIB = 1 << 20


# --- a server and what it holds ---


@dataclass(frozen=True)
class Held:
    """What a process and its children hold: bytes of memory, of these bytes the rows of conversations, and the rest in number."""

    resident: int
    rows: int
    files: int
    threads: int
    temporary: int


class Server:
    """A server's process, with a home and temporary files of its own."""

    def __init__(self, process: subprocess.Popen[str], home: Path, environment: Mapping[str, str]) -> None:
        assert process.stdout is not None
        self.process, self.home, self.environment = process, home, environment
        self.port = int(process.stdout.readline())

    def answer(self, question: str) -> Any:
        """To a question of `soak_server`."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(question + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    async def held(self) -> Held:
        """Once nothing is under way any more."""
        async with Client(self.port) as client:
            end = time.monotonic() + _WAIT_S
            while True:
                counts = await client.ask("GET", "/metrics")
                if not _gauge(counts, "num_requests_running") + _gauge(counts, "num_requests_waiting"):
                    break
                if time.monotonic() > end:
                    raise RuntimeError("there are requests left that nobody waits for")
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.02)  # the connection's end
        processes = _family(self.process.pid)
        left = [path for path in (self.home / "tmp").rglob("*") if path.is_file()]
        return Held(
            sum(_status(pid, "VmRSS") << 10 for pid in processes),
            int(_gauge(counts, "kv_cache_bytes")),
            sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in processes),
            sum(_status(pid, "Threads") for pid in processes),
            len(left) + len(list((self.home / "data").rglob("part-*"))),
        )

    def cpu_seconds(self) -> float:
        """What all its threads have taken."""
        return sum(
            int(path.read_text().split()[0]) / 1e9
            for pid in _family(self.process.pid)
            for path in Path(f"/proc/{pid}/task").glob("*/schedstat")
        )


def _gauge(counts: str, name: str) -> float:
    found = re.search(rf"^edge_llm:{name}{{.*}} (\S+)$", counts, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"/metrics does not tell {name}")
    return float(found[1])


def _family(pid: int) -> list[int]:
    """A process and those that it started, and so on."""
    children = Path(f"/proc/{pid}/task").glob("*/children")
    return [pid, *(one for path in children for child in path.read_text().split() for one in _family(int(child)))]


def _status(pid: int, name: str) -> int:
    found = re.search(rf"^{name}:\s*(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError("a process of the server is gone")
    return int(found[1])


@contextlib.contextmanager
def serving(model: Path, **config: Any) -> Iterator[Server]:
    """A server of the model in a folder. It must end well."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        (home / "tmp").mkdir()
        (home / "cache").mkdir(mode=0o700)
        load_kernels()  # compiled at most once
        shutil.copytree(paths.cache_dir() / "kernels", home / "cache" / "kernels")
        environment = {
            **os.environ,
            **_NO_CACHES,
            "EDGE_LLM_HOME": str(home),
            "TMPDIR": str(home / "tmp"),
            "PYTHONPATH": os.pathsep.join([str(ROOT / "apps"), str(ROOT)]),
        }
        command = [sys.executable, "-m", "tools.trust.soak_server", str(model), json.dumps(config)]
        with subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as process:
            try:
                yield Server(process, home, environment)
                process.terminate()
                if process.wait(_WAIT_S) != 0:
                    raise RuntimeError(f"the server has ended with {process.returncode}")
            finally:
                process.kill()


class Turns:
    """Keeps to what a command says of whose turn it is; without one it is always ours, until `stop`."""

    def __init__(self, command: str | None) -> None:
        self.over = False
        self._command = shlex.split(command or "")
        self._process: subprocess.Popen[bytes] | None = None
        self._began = 0.0

    def take(self) -> None:
        """Wait for a turn, if there is none or the one there was has been long enough."""
        if not self._command or (self._process is not None and time.monotonic() - self._began < _TURN_S):
            return
        self.end()
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self._process.stdout.readline()
        self._began = time.monotonic()

    def stop(self) -> None:
        """There is none any more: runs end early, with what they have seen."""
        self.over = True

    def end(self) -> None:
        if self._process is not None:
            self._process.communicate()
        self._process = None


# --- a soak ---


@dataclass
class Seen:
    """What a soak has seen: what was held after each slice of requests, and how long each of them took."""

    requests: int = 0
    sent_s: float = 0.0
    held: list[Held] = field(default_factory=list)
    late: Late | None = None
    took: array[float] = field(default_factory=lambda: array("d"))
    speed: array[float] = field(default_factory=lambda: array("d"))

    @property
    def growth(self) -> Slope:
        """Bytes a slice, without the rows of conversations; of 200 slices at least."""
        return slope([held.resident - held.rows for held in self.held])

    def check(self) -> None:
        """Raises if more is held in the end than was after the first fifth."""
        early, last = self.held[: max(1, int(len(self.held) * _WARM_UP))], self.held[-1]
        for name in ("files", "threads", "temporary"):
            most, now = max(getattr(held, name) for held in early), getattr(last, name)
            if now > most:
                raise RuntimeError(f"{now} {name} instead of {most} after the first fifth")
        grown = last.resident - last.rows - (early[-1].resident - early[-1].rows)
        if grown > MOST_GROWTH:
            raise RuntimeError(f"the server has grown by {grown >> 20} MiB")

    def tell(self) -> None:
        fifth = len(self.took) // 5
        p99 = [1e3 * statistics.quantiles(part, n=100)[98] for part in (self.took[:fifth], self.took[-fifth:])]
        first, last = self.held[0], self.held[-1]
        _say(
            f"{self.requests:,} requests, {self.sent_s:.0f} s; p99 {p99[0]:.0f} ms in the first fifth, {p99[1]:.0f} last"
        )
        _say(f"after the first slice {first}, in the end {last}")
        _say(f"event loop: {self.late}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def soak(
    server: Server,
    random: Random,
    turns: Turns,
    *,
    size: int,
    more: Callable[[Seen], bool],
    kind: Kind = one,
    between: Callable[[Server, Seen], None] = lambda server, seen: None,
) -> Seen:
    """Slices of requests as long as there shall be `more`; `between` them nothing is under way."""
    seen = Seen()
    server.answer("new")
    while more(seen) and not turns.over:
        turns.take()
        began = time.monotonic()
        seeds = [Random(random.randrange(1 << 62)) for _ in range(size)]
        stops: list[float] = []
        server.answer("watch")
        try:
            asyncio.run(_slice(server.port, seeds, kind, seen.took, stops))
        except ExceptionGroup:
            if not stops:
                raise
        seen.late = Late(**server.answer("forget" if stops else "rest"))
        if stops:
            _say(f"everything stood still for {stops[0]:.0f} s: these requests do not count")
            continue
        seen.sent_s += time.monotonic() - began
        seen.requests += size
        seen.held.append(asyncio.run(server.held()))
        between(server, seen)
        if len(seen.held) % 50 == 0:
            _say(f"{seen.requests} requests, {(seen.held[-1].resident - seen.held[-1].rows) / 1e6:.1f} MB")
    return seen


async def _slice(port: int, seeds: Sequence[Random], kind: Kind, took: array[float], stops: list[float]) -> None:
    """Requests, some at a time. To `stops` go the seconds for which somebody stopped our processes (SIGSTOP), to have the
    machine alone: then clients and server may run out of patience with one another."""
    waiting = list(seeds)

    async def work() -> None:
        async with Client(port) as client:
            while waiting:
                began = time.perf_counter()
                await kind(client, waiting.pop())
                took.append(time.perf_counter() - began)

    async def look() -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.1)
            if (passed := time.monotonic() - before) > _STOPPED_S:
                stops.append(passed)

    looking = asyncio.create_task(look())
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(_WORKERS):
                group.create_task(work())
    finally:
        looking.cancel()


_QUESTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 0.8, "seed": 2, "stream": True},
    {"temperature": 0.8, "seed": 3, "cache_prompt": False},
    {"temperature": 0.8, "seed": 4, "response_format": {"type": "json_object"}},
)


async def answers(port: int) -> list[str]:
    """What is said to the same questions with the same seeds."""
    async with Client(port) as client:
        found = []
        for question in _QUESTIONS:
            body = {"messages": [{"role": "user", "content": said(Random(1))}], "max_tokens": 40, **question}
            reply = await client.ask("POST", "/v1/chat/completions", body)
            choices = (
                [event["choices"][0] for event in ended(reply)]
                if "stream" in question
                else json.loads(reply)["choices"]
            )
            found.append("".join((part.get("message") or part["delta"]).get("content") or "" for part in choices))
        return found


@contextlib.contextmanager
def same_answers(server: Server) -> Iterator[None]:
    before = asyncio.run(answers(server.port))
    yield
    after = asyncio.run(answers(server.port))
    if after != before or not all(before):
        raise RuntimeError(f"the same questions: {before}, then {after}")


@contextlib.contextmanager
def tiny_model() -> Iterator[Path]:
    """The folder of a tiny model with a long context."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "tiny")
        folder.mkdir()
        export_gguf(write_tiny_gguf(Path(name, "tiny.gguf"), context=2048), folder, name="tiny", source_sha256="0" * 64)
        yield folder


def long(count: int, seed: int, turns: Turns) -> int:
    """F17: `count` requests or a few more."""
    size = max(_LEAST_SLICE, count // _SLICES)
    with tiny_model() as model, serving(model, **TINY) as server:
        seen = _soaked(server, seed, turns, size=size, more=lambda seen: seen.requests < count)
    if len(seen.held) >= _ENOUGH:
        _say(f"memory: {_scaled(seen.growth, 100_000 / size / _MIB)} MiB per 100,000 requests")
    return seen.requests


def real(seconds: int, seed: int, turns: Turns, model: Path) -> int:
    """F18: requests for so many seconds, those of turns of others left out; gives how many."""
    with serving(model, context=2048, slots=4) as server:
        seen = _soaked(
            server,
            seed,
            turns,
            size=_WORKERS,
            more=lambda seen: seen.sent_s < seconds,
            between=_measure_speed,
        )
    slices = len(seen.held)
    if slices >= _ENOUGH:
        _say(f"memory: {_scaled(seen.growth, 3600 * slices / seen.sent_s / _MIB)} MiB an hour")
        drift = _scaled(slope(seen.speed), 100 * slices / statistics.median(seen.speed))
        _say(f"tokens a second of CPU: {statistics.median(seen.speed):.0f}, from first to last {drift} %")
    return seen.requests


def _soaked(server: Server, seed: int, turns: Turns, **how: Any) -> Seen:
    """What was seen of a whole soak, in which nothing was wrong."""
    turns.take()
    asyncio.run(_fill(server.port))
    with same_answers(server):
        seen = soak(server, Random(seed), turns, **how)
    seen.tell()
    seen.check()
    return seen


async def _fill(port: int) -> None:
    """What grows up to a bound does so first: the words that the tokenizers library keeps (10,000), and pools of threads."""

    async def count() -> None:
        async with Client(port) as client:
            for _ in range(3):
                await client.ask("GET", "/metrics")

    async with Client(port) as client:
        for first in range(0, 12_000, 1000):
            words = " ".join(f"{number:b}".translate({48: "ab", 49: "e"}) for number in range(first, first + 1000))
            await client.ask("POST", "/tokenize", {"content": words})
    await asyncio.gather(*(count() for _ in range(_MANY)))


def _scaled(found: Slope, by: float) -> str:
    return f"{by * found.bytes_a_request:+.2f} (95 %: {by * found.low:+.2f} .. {by * found.high:+.2f})"


def _measure_speed(server: Server, seen: Seen) -> None:
    """Tokens a second of CPU time, of one answer that is the same each time."""
    tokens = 64
    body = {
        "prompt": said(Random(2)),
        "max_tokens": tokens,
        "ignore_eos": True,
        "cache_prompt": False,
        "temperature": 0,
    }

    async def ask() -> None:
        async with Client(server.port) as client:
            await client.ask("POST", "/v1/completions", body)

    before = server.cpu_seconds()
    asyncio.run(ask())
    seen.speed.append(tokens / (server.cpu_seconds() - before))


# --- F19 ---


async def _prefill(client: Client, random: Random) -> None:
    """A prompt that nearly fills the context."""
    tokens = [random.randrange(3, 259) for _ in range(1000)]
    await client.ask("POST", "/v1/completions", {"prompt": tokens, "max_tokens": 1, "cache_prompt": False})


async def _render(client: Client, random: Random) -> None:
    """A conversation of a thousand messages."""
    messages = [{"role": role, "content": said(random, 100)} for _ in range(500) for role in ("user", "assistant")]
    await client.ask("POST", "/tokenize", {"messages": messages})


async def _compile(client: Client, random: Random) -> None:
    """A schema of two hundred fields that nobody has seen before."""
    fields = {f"field_{random.randrange(10**9)}": {"type": ["string", "null"]} for _ in range(200)}
    schema = {"type": "object", "properties": fields, "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    body = {"messages": conversation(random), "response_format": form, "max_tokens": 2}
    await client.ask("POST", "/v1/chat/completions", body)


def lateness(count: int, seed: int, turns: Turns) -> int:
    """F19: about `count` requests of each kind."""
    random = Random(seed)
    done = 0
    with tiny_model() as model, serving(model, **TINY) as server:
        for what, kind in (
            ("prompts are read", _prefill),
            ("templates rendered", _render),
            ("grammars compiled", _compile),
        ):
            seen = soak(server, random, turns, size=_WORKERS, more=partial(_fewer_than, count), kind=kind)
            _say(f"while {what}: {seen.late}")
            done += seen.requests
        seen = _while_importing(server, random, turns)
        _say(f"while a model is imported: {seen.late}")
        done += seen.requests
    return done


def _fewer_than(count: int, seen: Seen) -> bool:
    return seen.requests < count


def _while_importing(server: Server, random: Random, turns: Turns) -> Seen:
    """Requests of all kinds as long as another process imports a model."""
    turns.take()
    file = write_tiny_gguf(server.home / "import.gguf", layers=8, hidden=512, intermediate=1536, heads=8, head_dim=64)
    command = [sys.executable, "-c", "from edge_llm_cli.entry import run; run()", "import", str(file)]
    with subprocess.Popen(
        command, env=server.environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    ) as process:
        more = partial(_still_runs, process)
        seen = soak(server, random, turns, size=_WORKERS, more=more)
    if process.returncode != 0:
        raise RuntimeError(f"the import has ended with {process.returncode}")
    return seen


def _still_runs(process: subprocess.Popen[bytes], _seen: Seen) -> bool:
    return process.poll() is None


def main(arguments: Sequence[str]) -> int:
    number, *rest = arguments
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--turn")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    ours, rest = parser.parse_known_args(rest)
    turns = Turns(ours.turn)
    for one_signal in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one_signal, lambda *_: turns.stop())
    command = f"python -m tools.trust.soak {number}"
    kinds = "chats, streams, calls, embeddings, batches, wrong ones and some that are left"
    figures = {
        "F17": Figure(
            number,
            f"requests of all kinds to one server: {kinds}",
            command,
            {"commit": 2000, "nightly": 60_000},
            lambda count, seed: long(count, seed, turns),
        ),
        "F18": Figure(
            number,
            "the same, the real model",
            command,
            {"commit": 20, "nightly": 1200},
            lambda seconds, seed: real(seconds, seed, turns, resolve(ours.model)),
        ),
        "F19": Figure(
            number,
            "requests that are long to read, render or compile, and during an import",
            command,
            {"commit": 50, "nightly": 2000},
            lambda count, seed: lateness(count, seed, turns),
        ),
    }
    try:
        return figures[number].main(rest)
    finally:
        turns.end()


if __name__ == "__main__":
    if sys.argv[1:2] not in (["F17"], ["F18"], ["F19"]):
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1:]))
