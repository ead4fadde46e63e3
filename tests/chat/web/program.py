"""`edge-llm chat --web` as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from tests.cli.conftest import ROOT

START = "from edge_llm_cli.entry import run; run()"


class Program:
    """`link` is the one that it prints at its start."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.said = ""
        self.link = ""

    async def read_link(self) -> str:
        assert self.process.stderr is not None
        while not (found := re.search(r"http://\S+#\S+", self.said)):
            line = await self.process.stderr.readline()
            assert line, self.said
            self.said += line.decode()
        self.said = ""
        self.link = found[0]
        return self.link

    async def end(self, number: int = signal.SIGINT) -> int:
        self.process.send_signal(number)
        async with asyncio.timeout(60):
            return await self.process.wait()


@contextlib.asynccontextmanager
async def chat_web(home: Path, *arguments: str) -> AsyncIterator[Program]:
    """The program, with a link to be opened."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", START, "chat", "--web", "--web-port", "0", *arguments),
        env={**os.environ, "EDGE_LLM_HOME": str(home), "PYTHONPATH": f"{ROOT / 'apps'}{os.pathsep}{ROOT}"},
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    program = Program(process)
    try:
        async with asyncio.timeout(120):
            await program.read_link()
        yield program
    finally:
        if process.returncode is None:
            await program.end(signal.SIGKILL)


def descendants(pid: int) -> Iterator[int]:
    """The processes that this one has started, and theirs. Linux only."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield int(child)
            yield from descendants(int(child))


def lives(pid: int) -> bool:
    """A process that ended and was not buried by its new parent counts as one that does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
