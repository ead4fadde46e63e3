"""A tool that is a program of its own: it can be killed, sees nothing of our environment, and says a bounded amount."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

_ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "TZ")
"""what a program is told of ours: no keys, no home"""


class CommandFailedError(Exception):
    """The program did not end well; the text is for the model."""


@dataclass(frozen=True, slots=True)
class Command:
    """`argv` is started as it is, by no shell; the arguments of a call are JSON on its standard input."""

    argv: tuple[str, ...]

    def run(self, arguments: str, *, seconds: float, most_bytes: int) -> str:
        """What it writes to standard output, up to `most_bytes` and one more. Raises `CommandFailedError`.

        After `seconds`, or enough output, it and all it has started are killed.
        """
        process = _started(self.argv)
        try:
            output, why = _talk(process, arguments.encode("utf-8", "replace"), seconds, most_bytes)
            code = process.poll()  # None where it has said enough and still runs
        finally:
            _kill(process)
        if why is None and code:
            why = f"it failed with exit code {code}"
        if why is not None:
            raise CommandFailedError(why)
        return output.decode("utf-8", "replace")


def _started(argv: Sequence[str]) -> subprocess.Popen[bytes]:
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    try:
        return subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
            close_fds=True,
        )
    except OSError as error:
        raise CommandFailedError(f"it cannot be started: {error.strerror}") from None


def _talk(process: subprocess.Popen[bytes], data: bytes, seconds: float, most_bytes: int) -> tuple[bytes, str | None]:
    """(output, what is wrong or None). Reading and writing take turns: a program may do either first."""
    assert process.stdin is not None
    assert process.stdout is not None
    deadline = time.monotonic() + seconds
    output = bytearray()
    with selectors.DefaultSelector() as selector:
        for stream, event in ((process.stdin, selectors.EVENT_WRITE), (process.stdout, selectors.EVENT_READ)):
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, event)
        while len(output) <= most_bytes:
            left = deadline - time.monotonic()
            ready = selector.select(left) if left > 0 else []
            if not ready:
                return bytes(output), f"it took more than {seconds:g} seconds"
            for key, _ in ready:
                if key.fileobj is process.stdin:
                    data = _written(process, data)
                    if not data:
                        selector.unregister(process.stdin)
                        with contextlib.suppress(OSError):
                            process.stdin.close()
                elif chunk := os.read(key.fd, 1 << 16):
                    output += chunk
                else:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(max(0.0, deadline - time.monotonic()))
                    late = f"it took more than {seconds:g} seconds" if process.poll() is None else None
                    return bytes(output), late
    return bytes(output), None


def _written(process: subprocess.Popen[bytes], data: bytes) -> bytes:
    """What is left to write."""
    assert process.stdin is not None
    try:
        return data[os.write(process.stdin.fileno(), data[: 1 << 16]) :]
    except BrokenPipeError:
        return b""


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The program and its children, which share its session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
