"""What the chat does when it is told to end from outside, by `kill` or a terminal that goes away, or goes on after a stop."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

from textual.driver import Driver


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


def go_on_after_stops(driver: Driver, repaint: Callable[[], object]) -> None:
    """From now on SIGCONT gives the terminal to the chat again, whatever stopped it.

    Textual's own handler takes each for the end of a Ctrl+Z. After a SIGSTOP, of which nobody is told, it starts a second reader
    of the keyboard beside the first, and keys overtake one another.
    """
    if os.name != "posix":
        return
    from textual.drivers.linux_driver import LinuxDriver

    if not isinstance(driver, LinuxDriver):
        return

    def continued() -> None:
        if not driver._auto_restart:
            return
        if not driver._must_signal_resume:
            driver.suspend_application_mode()
        driver.resume_application_mode()
        repaint()

    asyncio.get_running_loop().add_signal_handler(signal.SIGCONT, continued)


def _let_go_of_lost_terminal() -> None:
    """Nobody reads any more, and what is written fails: then it shall go nowhere."""
    if not os.isatty(0):
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        os.close(nowhere)
