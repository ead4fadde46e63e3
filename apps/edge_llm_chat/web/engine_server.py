"""EngineServer: the one server behind all tabs, a process of its own on a unix socket that only this user can open."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import secrets
import signal
import sys
import threading
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from pathlib import Path

from edge_llm import paths
from edge_llm.config import EngineConfig
from edge_llm.engine.child_process import clean_environment
from edge_llm.errors import EdgeLLMError, EngineStoppedError, InputError
from edge_llm_chat.running_server import answers
from edge_llm_chat.web.processes import python_command, see_end

_END_S = 15.0
"""more than the server's own grace"""
_LOOK_S = 0.1
_ERROR = "error: "


class EngineServer:
    """Runs while the `async with` block does; `socket` answers once it is `ready`."""

    def __init__(self, folder: Path, config: EngineConfig) -> None:
        self._folder, self._config = folder, config
        self.socket = paths.web_socket(os.getpid())
        self._process: Process | None = None

    async def __aenter__(self) -> EngineServer:
        _remove_left_sockets(self.socket.parent)
        settings = {"folder": str(self._folder), "uds": str(self.socket), "config": dataclasses.asdict(self._config)}
        self._process = await asyncio.create_subprocess_exec(
            *python_command("from edge_llm_chat.web.engine_server import main; main(json.loads(sys.argv[2]))"),
            json.dumps(settings),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            env=clean_environment(),
            process_group=0,
        )
        return self

    async def ready(self) -> None:
        """Waits until the model is loaded. Raises the reason why it cannot be."""
        while not await asyncio.to_thread(answers, self.socket):
            await self._check()
            await asyncio.sleep(_LOOK_S)

    async def ended(self) -> None:
        """Waits for an end that nobody asked for, and raises its reason."""
        assert self._process is not None
        await self._process.wait()
        await self._check()

    async def _check(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        if self._process.returncode is None:
            return
        last = (await self._process.stdout.read()).decode("utf-8", "replace").strip().rpartition("\n")[2]
        if not last.startswith(_ERROR):
            raise EngineStoppedError("the server of the models has ended")
        message, hint = json.loads(last.removeprefix(_ERROR))
        raise InputError(message, hint=hint)

    async def __aexit__(self, *_: object) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await see_end(process, _END_S)
        self.socket.unlink(missing_ok=True)


def main(given: dict[str, object]) -> None:
    """The process. Its input is a pipe from its parent, whose end it does not outlive."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from edge_llm_server.keys import ApiKey
    from edge_llm_server.launch import launch
    from edge_llm_server.settings import ServerSettings

    folder = str(given["folder"])
    # a server listens on a port as well; a key that nobody has keeps it shut
    key = ApiKey.of("nobody", secrets.token_urlsafe(32))
    settings = ServerSettings(models=(folder,), port=0, uds=Path(str(given["uds"])), keys=(key,), grace_s=1.0)
    try:
        config = EngineConfig(**given["config"])  # type: ignore[arg-type]
        launch(settings, {folder: Path(folder)}, config, note=lambda _text: None, with_batches=False)
    except EdgeLLMError as error:
        print(_ERROR + json.dumps([str(error), error.hint]), flush=True)
        sys.exit(1)


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_END_S)
    os._exit(1)


def _remove_left_sockets(folder: Path) -> None:
    """Those of programs that were killed together with their servers."""
    for path in folder.glob("web-*.sock"):
        found = re.match(r"web-(\d{1,9})\b", path.name)
        if found is not None and not _runs(int(found[1])) and not answers(path):
            with contextlib.suppress(OSError):
                path.unlink()


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True
