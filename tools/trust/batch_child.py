"""`edge-llm batch` over an engine of fakes: `python -m tools.trust.batch_child SECONDS-A-STEP ARGUMENT...`."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from edge_llm.engine.client import ThreadClient
from edge_llm.engine.engine import Engine
from tests.engine.fakes import make_core

Opened = Callable[[str, Any], contextlib.AbstractContextManager[tuple[Engine, float]]]


def opener(step_s: float) -> Opened:
    """What takes the place of `answer.opened`: an engine each of whose steps takes so long."""

    @contextlib.contextmanager
    def opened(_model: str, _options: object) -> Iterator[tuple[Engine, float]]:
        core = make_core(slots=4)
        session: Any = core.session
        session.before_step = lambda _: time.sleep(step_s)
        with Engine(ThreadClient(core)) as engine:
            yield engine, 0.0

    return opened


if __name__ == "__main__":
    from edge_llm_cli import answer, main

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background has it ignored
    answer.opened = opener(float(sys.argv[1]))  # type: ignore[assignment]
    sys.argv[1:] = ["batch", *sys.argv[2:]]
    main.run()
