"""An engine's process over fakes: its model folder's name says what happens to it, and so do the requests."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from edge_llm.config import EngineConfig
from edge_llm.engine import child
from edge_llm.engine.core import EngineCore
from edge_llm.errors import ModelFormatError
from tests.engine.fakes import PARIS, byte_ids, make_core, says

START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]);"
    "from tests.engine.fake_child import main; main(int(sys.argv[1]))"
)
FAULT, HANG = byte_ids("!")[0], byte_ids("?")[0]
"""first tokens of requests that the engine does not survive, and that are never taken in"""


def open_engine(folder: Path, config: EngineConfig, progress: Callable[[str, int, int], None]) -> EngineCore:
    progress("kernels", 1, 2)
    if folder.name == "broken" or (folder / "broken").exists():
        raise ModelFormatError("the file is broken", hint="mend it")
    if folder.name == "crashes":
        sys.stderr.write("a line\nno room for it\x1b[31m\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGABRT)
    if folder.name == "slow":
        threading.Event().wait()
    core = make_core(says(PARIS), context=config.context, slots=2)
    sequence = core.intake.sequence

    def fault(step: object) -> None:
        if any(FAULT in segment.token_ids for segment in step.segments):
            raise MemoryError("no room")

    def hang(request: object, *rest: object) -> object:
        if request.token_ids and HANG in request.token_ids:
            threading.Event().wait()
        return sequence(request, *rest)

    core.session.before_step = fault
    core.intake.sequence = hang
    return core


def main(descriptor: int) -> None:
    child.open_engine = open_engine
    child.main(descriptor)
