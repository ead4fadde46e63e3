"""The serving path: what a token costs the CPU between the engine and a client's socket, without a model.

    python -m tools.bench.serving_path [--rounds N] [--tokens N] [--step-ms MS] [--json]

The engine is real but for its steps: each waits `--step-ms` and gives words at random. Three doors lead to it, measured
alternately: `engine`, its own thread and nobody who reads; `process`, a `ProcessClient` read by tasks of an event loop;
`server`, HTTP streams read by another program. Figures are milliseconds of CPU a token over those of `engine`: of the parent,
of the child, and both. CPU time, for a clock on the wall would measure the other programs of the machine: so it does in
`speed_%`, tokens a second in percent of those of `engine`, which is for a quiet one. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from edge_llm.config import EngineConfig
from edge_llm.engine import assembly, child, child_process
from edge_llm.engine.client import ThreadClient
from edge_llm.engine.core import EngineCore
from edge_llm.engine.process_client import ProcessClient
from edge_llm.engine.request import Request
from edge_llm.export.exporter import export_gguf
from edge_llm.messages import Finished
from edge_llm.model.step import Step
from edge_llm.sampling.params import SamplingParams
from tools.bench.worker_process import WorkerProcess
from tools.tiny_model import SMALLEST_VOCAB, write_tiny_gguf

CONFIG = EngineConfig(slots=8, threads=1, prefix_cache="off", speculation="off")
Figures = dict[str, float]
_STREAMS = (1, 8)
_WARM_UP_TOKENS = 20
_PROMPT = "the and that"


# --- the engine ---


class PacedSession:
    """Waits as long as a step takes, and says words at random in place of what a model would."""

    def __init__(self, vocab: int, max_rows: int, step_s: float) -> None:
        self.max_rows, self._step_s = max_rows, step_s
        self._logits = np.random.default_rng(0).standard_normal((max_rows, vocab)).astype(np.float32)
        self._logits[:, :SMALLEST_VOCAB] = -50.0  # half characters and control tokens say nothing

    def forward(self, step: Step) -> np.ndarray:
        time.sleep(self._step_s)
        return self._logits[: step.logit_rows]

    def hidden_states(self, rows: int) -> np.ndarray:
        raise AssertionError("nobody asks for them here")

    def close(self) -> None:
        pass


def open_paced(folder: Path, config: EngineConfig, step_s: float) -> EngineCore:
    core = assembly.open_engine(folder, config)
    core.session.close()
    core.session = PacedSession(core.info.vocab, core.session.max_rows, step_s)
    return core


def serve_engine(descriptor: int, step_s: float) -> None:
    """The child's program in place of its own."""
    vars(child)["open_engine"] = lambda folder, config, _progress: open_paced(folder, config, step_s)
    child.main(descriptor)


def _request(seed: int, tokens: int) -> Request:
    return Request.completion(
        _PROMPT, SamplingParams(temperature=1.0, seed=seed, max_tokens=tokens, ignore_eos=True), cache=False
    )


# --- what is measured, each a function of (streams, tokens) ---


class EngineDoor:
    """Milliseconds of CPU that the engine takes alone; runs in a worker."""

    def __init__(self, folder: Path, step_s: float) -> None:
        self._client = ThreadClient(open_paced(folder, CONFIG, step_s))

    def measure(self, streams: int, tokens: int) -> Figures:
        left, ttft_s = threading.Semaphore(0), list[float]()

        def emit(event: object) -> None:
            if isinstance(event, Finished):
                assert event.timings.ttft_s is not None
                ttft_s.append(event.timings.ttft_s)
                left.release()

        start, began = time.process_time(), time.perf_counter()
        for seed in range(streams):
            self._client.start(_request(seed, tokens), emit)
        for _ in range(streams):
            left.acquire()
        return {
            "seconds": time.perf_counter() - began,
            "ttft_ms": 1e3 * statistics.median(ttft_s),
            "child": 1e3 * (time.process_time() - start) / (streams * tokens),
        }


class ClientDoor:
    """Streams read over HTTP; runs in a worker."""

    def __init__(self, port: int) -> None:
        self._port = port

    def measure(self, streams: int, tokens: int) -> Figures:
        began = time.perf_counter()
        with ThreadPoolExecutor(streams) as pool:
            firsts = list(pool.map(lambda seed: self._read(seed, tokens), range(streams)))
        return {"seconds": time.perf_counter() - began, "ttft_ms": 1e3 * statistics.median(firsts)}

    def _read(self, seed: int, tokens: int) -> float:
        body = {
            "prompt": _PROMPT,
            "stream": True,
            "max_tokens": tokens,
            "seed": seed,
            "temperature": 1.0,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        start = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        assert reply.status == 200, reply.read()
        line = reply.readline()
        first = time.perf_counter() - start
        pieces = 0
        while line:
            pieces += line.startswith(b"data: {")
            line = reply.readline()
        assert pieces > tokens, f"{pieces} pieces of {tokens} tokens"
        return first


def worker(kind: str, argument: str, step_s: float) -> None:
    """Answer lines of JSON with what was measured."""
    door = EngineDoor(Path(argument), step_s) if kind == "engine" else ClientDoor(int(argument))
    print(json.dumps({"info": {}}), flush=True)
    for line in sys.stdin:
        print(json.dumps(door.measure(**json.loads(line))), flush=True)


# --- this process: the parent ---


def _cpu_s(pid: int) -> float:
    """CPU time of all threads of a process."""
    total = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            total += int((thread / "schedstat").read_text().split()[0])
    return total / 1e9


@contextlib.contextmanager
def _serving(load: Callable[[Path], ProcessClient], folder: Path) -> Iterator[int]:
    """A server of this engine; gives its port."""
    from edge_llm_server.cards import ModelCard
    from edge_llm_server.exchange import Log
    from edge_llm_server.serving import Serving
    from edge_llm_server.settings import ServerSettings

    from edge_llm.engine.host import EngineHost

    name = "paced"
    host = EngineHost({name: folder}, load, bytes_of=lambda _: 1, budget_bytes=1 << 40, keep_alive_s=1e9)
    settings = ServerSettings(models=(name,), port=0, request_timeout_s=600.0)
    with open(os.devnull, "w") as nowhere:
        serving = Serving(settings, host, {name: ModelCard.read(folder)}, log=Log(nowhere))
        ready = threading.Event()
        thread = threading.Thread(target=lambda: asyncio.run(serving.run(ready.set)))
        thread.start()
        try:
            assert ready.wait(300)  # kernels may have to be compiled
            yield serving.port
        finally:
            serving.stop()
            thread.join()


class Doors:
    """The three ways to an engine, each asked for so many streams of so many tokens."""

    def __init__(self, client: ProcessClient, engine: WorkerProcess, reader: WorkerProcess) -> None:
        self._client, self._engine, self._reader = client, engine, reader
        process = client._supervisor._child
        assert process is not None
        self._pid = process.pid

    def engine(self, streams: int, tokens: int) -> Figures:
        return self._engine.ask({"streams": streams, "tokens": tokens})

    def server(self, streams: int, tokens: int) -> Figures:
        return self._measured(streams * tokens, lambda: self._reader.ask({"streams": streams, "tokens": tokens}))

    def process(self, streams: int, tokens: int) -> Figures:
        async def read(seed: int) -> None:
            async for _ in self._client.submit(_request(seed, tokens)):
                pass

        async def read_all() -> None:
            await asyncio.gather(*(read(seed) for seed in range(streams)))

        def work() -> Figures:
            began = time.perf_counter()
            asyncio.run(read_all())
            return {"seconds": time.perf_counter() - began}

        return self._measured(streams * tokens, work)

    def _measured(self, count: int, work: Callable[[], Figures]) -> Figures:
        """What each of `count` tokens costs this process and the engine's while `work` runs."""
        parent, of_child = time.process_time(), _cpu_s(self._pid)
        figures = work()
        parent, of_child = time.process_time() - parent, _cpu_s(self._pid) - of_child
        return {**figures, "parent": 1e3 * parent / count, "child": 1e3 * of_child / count}


def measure(rounds: int, tokens: int, step_s: float, folder: Path) -> dict[str, Figures]:
    """Medians of the rounds for each number of streams and each door."""
    child_process._START = (
        "import json, sys; sys.path[:] = json.loads(sys.argv[2]);"
        f"from tools.bench.serving_path import serve_engine; serve_engine(int(sys.argv[1]), {step_s})"
    )
    clients: list[ProcessClient] = []

    def load(_folder: Path) -> ProcessClient:
        clients.append(ProcessClient(folder, CONFIG))
        return clients[-1]

    def start(kind: str, argument: object) -> WorkerProcess:
        options = ["--worker", kind, str(argument), "--step-ms", str(1e3 * step_s)]
        command = [sys.executable, "-m", "tools.bench.serving_path", *options]
        return WorkerProcess(command, folder / f"{kind}.log", timeout_s=600)

    measured: dict[str, list[Figures]] = {}
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(_serving(load, folder))
        workers = [start("engine", folder), start("client", port)]
        for one in workers:
            stack.callback(one.close)
        doors = Doors(clients[0], *workers)
        for turn in range(rounds + 1):
            for streams in _STREAMS:
                for door in (doors.engine, doors.process, doors.server):
                    figures = door(streams, tokens if turn else _WARM_UP_TOKENS)
                    if turn:
                        measured.setdefault(f"{streams} {door.__name__}", []).append(figures)
    return {title: _over_engine(title, measured) for title in measured}


def _over_engine(title: str, measured: dict[str, list[Figures]]) -> Figures:
    rounds = measured[title]
    middle = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
    if "parent" in middle:
        engine = measured[f"{title.split(maxsplit=1)[0]} engine"]
        middle["child"] -= statistics.median(one["child"] for one in engine)
        middle["both"] = middle["parent"] + middle["child"]
        speeds = [100 * alone["seconds"] / one["seconds"] for alone, one in zip(engine, rounds, strict=True)]
        middle["speed_%"] = statistics.median(speeds)
    return middle


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.serving_path", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--step-ms", type=float, default=3.0, help="how long a step takes")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        kind, argument = options.worker
        worker(kind, argument, options.step_ms / 1e3)
        return
    with tempfile.TemporaryDirectory() as name:
        gguf, folder = Path(name, "tiny.gguf"), Path(name, "model")
        folder.mkdir()
        write_tiny_gguf(gguf, vocab=400, context=4096)
        export_gguf(gguf, folder, name="paced", source_sha256="0" * 64)
        lines = measure(options.rounds, options.tokens, options.step_ms / 1e3, folder)
    if options.json:
        print(json.dumps(lines))
        return
    for title, figures in lines.items():
        print(f"{title:10}", *(f"{name} {value:.3f}" for name, value in figures.items()), sep="  ")


if __name__ == "__main__":
    main()
