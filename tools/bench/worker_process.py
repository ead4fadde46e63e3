"""WorkerProcess: a loaded model in a process of its own, asked one thing at a time."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]


class WorkerError(Exception):
    """A worker could not be started, died, or did not answer in time. One line."""


class WorkerProcess:
    """The program of tools/bench/workers behind `ask`. What it writes to stderr goes to `log`."""

    def __init__(self, command: Sequence[str], log: Path, timeout_s: float) -> None:
        """Start it and wait until its model is loaded. Raises `WorkerError`."""
        self._log, self._timeout_s = log, timeout_s
        with log.open("ab") as errors:
            self._process = _started(command, errors)
        self.info: dict[str, Any] = self._line()["info"]

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one request. Raises `WorkerError`; the worker is of no more use then."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it has died, which reading its answer will tell
        return self._line()

    def close(self) -> None:
        """End it. Idempotent."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._process.communicate(timeout=10)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        with _killed_after(self._process, self._timeout_s) as late:
            line = self._process.stdout.readline()
        try:
            return dict(json.loads(line))
        except ValueError:
            self.close()
            ended = f"no answer in {self._timeout_s:g} s" if late.is_set() else f"it ended ({self._process.returncode})"
            raise WorkerError(f"{ended}: {last_line(self._log)}") from None


def run_once(command: Sequence[str], log: Path, timeout_s: float, stdin: str = "") -> tuple[float, dict[str, Any]]:
    """Run a whole program: seconds from its start to its line of JSON, and what that says. Raises `WorkerError`."""
    start = time.perf_counter()
    with log.open("ab") as errors, _started(command, errors) as process, _killed_after(process, timeout_s):
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.write(stdin.encode())
            process.stdin.close()
        line = process.stdout.readline()
        seconds = time.perf_counter() - start
        process.stdout.read()
        code = process.wait()
    try:
        return seconds, dict(json.loads(line))
    except ValueError:
        raise WorkerError(f"it ended ({code}): {last_line(log)}") from None


def environment() -> dict[str, str]:
    """That of a worker: our tools can be imported, whatever Python it is; nobody asks the network for anything."""
    places = [str(ROOT), str(ROOT / "apps"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places)), "HF_HUB_OFFLINE": "1"}


def last_line(log: Path) -> str:
    """The end of a log, where the reason mostly stands."""
    try:
        lines = log.read_text("utf-8", "replace").split("\n")
    except OSError:
        lines = []
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


def _started(command: Sequence[str], errors: IO[bytes]) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, cwd=ROOT, env=environment())


@contextlib.contextmanager
def _killed_after(process: subprocess.Popen[bytes], seconds: float) -> Iterator[threading.Event]:
    """Kills the process if the block takes longer, and then sets the event."""
    late = threading.Event()

    def kill() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(seconds, kill)
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()
