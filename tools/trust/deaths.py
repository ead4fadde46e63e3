"""F16: engines that die in the middle of answers. A trial is one death, or a child that runs out of memory or stands still.

    python -m tools.trust.deaths [--size commit|nightly] [--seed N]

Some requests to a tiny model run in a child process, when something happens to it at a random moment. Each of them ends, with
the answer that it has alone or with one clean error; and the next one, asked twice at most, is right.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edge_llm.config import EngineConfig
from edge_llm.engine import supervisor
from edge_llm.engine.handle import Handle
from edge_llm.engine.process_client import ProcessClient
from edge_llm.engine.request import Request
from edge_llm.errors import EdgeLLMError, EngineStoppedError
from edge_llm.export.exporter import export_gguf
from edge_llm.sampling.params import SamplingParams
from tools.tiny_model import write_tiny_gguf
from tools.trust.figure import Figure

QUESTIONS = 6
_CONFIG = EngineConfig(context=512, slots=3, max_chunk=64, max_queued_requests=8)
_REPLY_TIMEOUT_S = 3.0
_UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


def trials(count: int, seed: int) -> int:
    """Deaths of one client's children; gives how many there were. The slowest of all is told on stderr."""
    generator = random.Random(seed)
    supervisor._STEADY_S = 0.0  # deaths are what this is about: none makes the next start wait
    told, back = [], []
    with tempfile.TemporaryDirectory() as folder:
        client = ProcessClient(_model(Path(folder)), _CONFIG, reply_timeout_s=_REPLY_TIMEOUT_S)
        try:
            right = [_tokens(client.submit(_question(i))) for i in range(QUESTIONS)]
            for number in range(count):
                error_s, back_s = _trial(client, right, generator)
                told.append(error_s)
                back.append(back_s)
                assert threading.active_count() < 32, f"threads pile up: trial {number}"
        finally:
            client.close()
    for what, seconds in (("every reader knew", told), ("the next answer was there", back)):
        print(f"{what} after {statistics.median(seconds):.2f} s, at most {max(seconds):.2f} s", file=sys.stderr)
    return count


def _model(folder: Path, name: str = "tiny", **options: Any) -> Path:
    exported = folder / name
    exported.mkdir()
    export_gguf(write_tiny_gguf(folder / f"{name}.gguf", **options), exported, name=name, source_sha256="0" * 64)
    return exported


def _question(i: int) -> Request:
    params = SamplingParams(max_tokens=150, seed=i, ignore_eos=True)
    return Request.completion(f"Question {i}: " + "what is it? " * 3 * i, params)


def _tokens(handle: Handle) -> tuple[int, ...]:
    return handle.result().token_ids


def _trial(client: ProcessClient, right: list[tuple[int, ...]], generator: random.Random) -> tuple[float, float]:
    """Seconds from the fault until the last reader had its end, and until the next answer was there."""
    asked = [generator.randrange(QUESTIONS) for _ in range(generator.randint(1, 6))]
    handles = [client.submit(_question(i)) for i in asked]
    time.sleep(generator.uniform(0.0, 0.15))
    fault = generator.choice(FAULTS)
    pid = client._supervisor._child.pid  # type: ignore[union-attr]
    start = time.monotonic()
    fault(client, pid)
    ends: list[str] = []
    for i, handle in zip(asked, handles, strict=True):
        try:
            assert _tokens(handle) == right[i], "an answer is wrong"
            ends.append("answered")
        except EdgeLLMError as error:
            ends.append(type(error).__name__)
    told = time.monotonic() - start
    if fault is _starve:
        _lift(pid)
    i = generator.randrange(QUESTIONS)
    assert _answer(client, i) == right[i], f"the next answer is wrong, after {ends}"
    return told, time.monotonic() - start


def _answer(client: ProcessClient, i: int) -> tuple[int, ...]:
    """An answer that is asked for again if the engine is only just dying."""
    try:
        return _tokens(client.submit(_question(i)))
    except EngineStoppedError:
        return _tokens(client.submit(_question(i)))


def _signal(number: signal.Signals) -> Callable[[ProcessClient, int], None]:
    return lambda client, pid: os.kill(pid, number)


def _stand_still(client: ProcessClient, pid: int) -> None:
    """A child that hangs, which the next request finds out."""
    os.kill(pid, signal.SIGSTOP)
    try:
        client.submit(_question(0))
    except EngineStoppedError:
        return
    raise AssertionError("a child that stands still has replied")


def _starve(client: ProcessClient, pid: int) -> None:
    """No more memory than it has, for a while."""
    resource.prlimit(pid, resource.RLIMIT_AS, (1 << 20, resource.RLIM_INFINITY))
    time.sleep(0.05)


def _lift(pid: int) -> None:
    try:
        resource.prlimit(pid, resource.RLIMIT_AS, _UNLIMITED)
    except ProcessLookupError:
        return  # it did not survive


FAULTS: tuple[Callable[[ProcessClient, int], None], ...] = (
    _signal(signal.SIGKILL),
    _signal(signal.SIGSEGV),
    _signal(signal.SIGABRT),
    _signal(signal.SIGBUS),
    _starve,
    _stand_still,
)

FIGURE = Figure(
    "F16",
    "deaths, hangs and starvation of an engine's process in the middle of answers",
    "python -m tools.trust.deaths",
    {"commit": 30, "nightly": 1000},
    trials,
)

if __name__ == "__main__":
    sys.exit(FIGURE.main(sys.argv[1:]))
