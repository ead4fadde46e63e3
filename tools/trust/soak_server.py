"""The server as `edge-llm serve` runs it, in a process that also tells how its event loop is doing.

    python -m tools.trust.soak_server FOLDER CONFIG

FOLDER is a model's, CONFIG fields of an `EngineConfig` as JSON. The port comes on stdout once the model is loaded. From then on
each line of stdin is answered by one of JSON: `watch` goes on watching the event loop, `rest` stops and tells what was
seen since `new`, `forget` all of that but what was seen since the last `watch`.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
import time
from array import array
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from edge_llm_server import launch
from edge_llm_server.settings import ServerSettings

from edge_llm.config import EngineConfig
from edge_llm.engine.process_client import ProcessClient

_STEP_S = 0.005
_BIN_S, _BINS = 0.0001, 20_000


@dataclass(frozen=True)
class Late:
    """By how many milliseconds an event loop was late for what was due; the most that its thread computed between two looks,
    however many others wanted the processor; and how many tasks it had in the end."""

    looks: int
    p50_ms: float
    p999_ms: float
    max_ms: float
    most_cpu_ms: float
    tasks: int


class LoopWatch:
    """How late an event loop is, looked at every 5 ms. A stall counts for each look that it kept from being taken."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._counts = array("Q", bytes(8 * _BINS))
        self._max_s = self._most_cpu_s = 0.0
        self._due = self._cpu_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        self._before = self._counts[:], self._max_s, self._most_cpu_s
        self._look_again()

    def rest(self, *, forget: bool = False) -> Late:
        """Until `watch`; what was seen so far, or until the last `watch`."""
        assert self._timer is not None
        self._timer.cancel()
        if forget:
            self._counts, self._max_s, self._most_cpu_s = self._before
        looks = sum(self._counts)
        p50, p999 = (self._quantile(looks * share) for share in (0.5, 0.999))
        tasks = len(asyncio.all_tasks(self._loop))
        return Late(looks, p50, p999, 1e3 * self._max_s, 1e3 * self._most_cpu_s, tasks)

    def _look(self) -> None:
        late_s = self._loop.time() - self._due
        self._max_s = max(self._max_s, late_s)
        self._most_cpu_s = max(self._most_cpu_s, time.thread_time() - self._cpu_s)
        while late_s >= 0:
            self._counts[min(int(late_s / _BIN_S), _BINS - 1)] += 1
            late_s -= _STEP_S
        self._look_again()

    def _look_again(self) -> None:
        self._due, self._cpu_s = self._loop.time() + _STEP_S, time.thread_time()
        self._timer = self._loop.call_at(self._due, self._look)

    def _quantile(self, least: float) -> float:
        """The milliseconds that as many looks do not exceed."""
        seen = 0
        for number, count in enumerate(self._counts):
            seen += count
            if seen >= least:
                return 1e3 * _BIN_S * (number + 1)
        return 1e3 * _BIN_S * _BINS


def serve(folder: Path, config: EngineConfig) -> None:
    """Until SIGTERM."""

    def note(text: str) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return  # it has only begun
        found = re.search(r":([0-9]+)/v1", text)
        assert found is not None, text
        threading.Thread(target=_answer, args=(loop,), daemon=True).start()
        print(found[1], flush=True)

    # whoever stops all of us for a while (SIGSTOP) means no hang
    launch.ProcessClient = partial(ProcessClient, reply_timeout_s=3600.0)  # type: ignore[assignment,attr-defined]
    settings = ServerSettings(models=(folder.name,), port=0)
    launch.launch(settings, {folder.name: folder}, config, note=note)


def _answer(loop: asyncio.AbstractEventLoop) -> None:
    """Questions of whoever started the process."""
    watch = LoopWatch(loop)

    async def told(question: str) -> object:
        nonlocal watch
        match question:
            case "new":
                watch = LoopWatch(loop)
            case "watch":
                watch.watch()
            case "rest" | "forget":
                return asdict(watch.rest(forget=question == "forget"))
        return None

    for line in sys.stdin:
        print(json.dumps(asyncio.run_coroutine_threadsafe(told(line.strip()), loop).result()), flush=True)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), EngineConfig(**json.loads(sys.argv[2])))
