"""Where the installed command begins: loads the program so that Ctrl-C meanwhile is no traceback. Only the standard library."""

from __future__ import annotations

import gc
import os
import signal

_INTERRUPTED = 130


def _leave(_number: int, _frame: object) -> None:
    os.write(2, b"interrupted\n")
    os._exit(_INTERRUPTED)


def run() -> None:
    """The program `edge-llm`."""
    previous = signal.signal(signal.SIGINT, _leave)
    gc.disable()  # nothing of a program is garbage while it loads
    from edge_llm_cli import main

    program = main.load()
    gc.enable()
    signal.signal(signal.SIGINT, previous)
    main.run(program)
