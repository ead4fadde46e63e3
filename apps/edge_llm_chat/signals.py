"""What the chat does when it is told to end from outside: `kill`, or a terminal that goes away."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable


def leave_on_signals(leave: Callable[[int], None]) -> None:
    """From now on SIGTERM and SIGHUP call `leave` with the exit code, once: a second one ends the process at once.

    A signal that is ignored (nohup) stays so. Where there are no such signals, nothing is done.
    """
    if os.name != "posix":
        return
    loop = asyncio.get_running_loop()
    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]

    def told(number: int) -> None:
        for other in numbers:
            loop.remove_signal_handler(other)
        if number == signal.SIGHUP:
            _let_go_of_lost_terminal()
        leave(128 + number)

    for number in numbers:
        loop.add_signal_handler(number, told, number)


def _let_go_of_lost_terminal() -> None:
    """Nobody reads any more, and what is written fails: then it shall go nowhere."""
    if not os.isatty(0):
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        os.close(nowhere)
