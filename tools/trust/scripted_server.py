"""A server in a process of its own, over an engine that says `a` as often as it is asked to and takes a set time for a step."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edge_llm_server.exchange import Log
from edge_llm_server.serving import Serving
from edge_llm_server.settings import ServerSettings

from edge_llm.engine.client import EngineClient, ThreadClient
from tests.engine.fakes import byte_ids, make_core, says
from tests.server.harness import card, host_of

ROOT = Path(__file__).parents[2]
MOST_TOKENS = 4000


@dataclass(frozen=True)
class Script:
    """What the server is like; `step_s` is how long a step takes."""

    grace_s: float
    slots: int = 3
    step_s: float = 0.002

    @property
    def most_requests(self) -> int:
        """As many as `launch` lets in."""
        return 3 * self.slots + 8


@contextlib.contextmanager
def scripted_server(script: Script) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The process and its port; it is killed at the end of the block if it is still there."""
    command = [sys.executable, "-m", "tools.trust.scripted_server", json.dumps(asdict(script))]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def serve(script: Script) -> None:
    """Until SIGTERM."""
    core = make_core(says(byte_ids("a") * MOST_TOKENS), context=4096, slots=script.slots, prefix_cache="off")
    session: Any = core.session

    def pause(_step: object) -> None:
        session.steps.clear()  # thousands of them would look like a leak
        time.sleep(script.step_s)

    session.before_step = pause

    def load(_folder: Path) -> EngineClient:
        return ThreadClient(core)

    settings = ServerSettings(models=("fake",), port=0, grace_s=script.grace_s)
    host = host_of({"fake": Path("fake")}, load)
    serving = Serving(settings, host, {"fake": card("fake")}, log=Log(_Nowhere()), most_requests=script.most_requests)
    asyncio.run(serving.run(lambda: print(serving.port, flush=True)))


class _Nowhere(io.StringIO):
    def write(self, text: str) -> int:
        return len(text)


if __name__ == "__main__":
    serve(Script(**json.loads(sys.argv[1])))
