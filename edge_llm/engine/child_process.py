"""ChildProcess: an engine's process as its parent sees it: how it is started, what it says, how it ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref

from edge_llm.engine.channel import Channel
from edge_llm.errors import EngineStoppedError, quoted

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]);"
    "from edge_llm.engine.child import main; main(int(sys.argv[1]))"
)
_ENVIRONMENT = frozenset(
    {"PATH", "HOME", "LANG", "TZ", "TMPDIR", "TEMP", "TMP", "EDGE_LLM_HOME", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"}
    | {"GLIBC_TUNABLES"}
)
_ENVIRONMENT_PREFIXES = ("LC_", "XDG_", "NUMBA_", "PYTHON", "EDGE_LLM_TEST_", "MALLOC_")
_KEPT_OUTPUT = 1 << 14

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


class ChildProcess:
    """Starts at once. `channel` leads to it, and says nothing more once it has ended, whatever the reason."""

    def __init__(self) -> None:
        """Raises `EngineStoppedError` if the system starts no process."""
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                # the same modules as ours, from nowhere else
                [sys.executable, "-P", "-c", _START, str(theirs.fileno()), json.dumps([*map(str, sys.path)])],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                env=clean_environment(),
                process_group=0,  # a Ctrl-C at the terminal is not for it
            )
        except OSError as error:
            ours.close()
            raise EngineStoppedError(f"the engine's process cannot be started: {error.strerror}") from None
        finally:
            theirs.close()
        _sockets.add(ours)
        self.channel = Channel(ours)
        self._output = b""
        self._listener = threading.Thread(target=self._listen, name="edge-llm output", daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """End it at once; any thread."""
        self._process.kill()

    def end(self, grace_s: float) -> EngineStoppedError:
        """Close the channel, and kill the process if it does not end within `grace_s`. Tells how it ended."""
        self.channel.close()
        try:
            code = self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._listener.join()
        how = f"exit code {code}" if code >= 0 else _signal_name(-code)
        lines = self._output.decode("utf-8", "replace").strip().split("\n")
        last = next((line for line in lines if line.startswith("Fatal Python error")), lines[-1])
        return EngineStoppedError(
            f"the engine's process has ended ({how})", hint=f"its last words: {quoted(last)}" if last else None
        )

    def _listen(self) -> None:
        """Keep the last of what it prints: nothing is expected but the reason of its death."""
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            while data := stream.read1(_KEPT_OUTPUT):  # type: ignore[attr-defined]
                self._output = (self._output + data)[-_KEPT_OUTPUT:]


def clean_environment() -> dict[str, str]:
    """Ours without what a process that we start has no business with: keys and tokens, above all."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in _ENVIRONMENT or name.startswith(_ENVIRONMENT_PREFIXES)
    }


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _close_sockets() -> None:
    """In a forked child: whoever else holds a connection keeps its engine alive after our parent's end."""
    for connection in list(_sockets):
        connection.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_sockets)
