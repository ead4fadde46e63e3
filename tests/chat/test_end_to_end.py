"""The program itself in a real terminal (tmux), with the real model."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from edge_llm_chat.widgets.status import BARS

from tests.cli.conftest import ROOT

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed"),
]
PROGRAM = "from edge_llm_cli.entry import run; run()"


class Terminal:
    """A tmux session of its own server; `screen` is what it shows."""

    def __init__(self, home: Path, folder: Path) -> None:
        self._socket = f"edge-llm-test-{uuid.uuid4().hex[:8]}"
        self._environment = {**os.environ, "EDGE_LLM_HOME": str(home), "PYTHONPATH": f"{ROOT / 'apps'}:{ROOT}"}
        self._environment.pop("TMUX", None)
        self._tmux("-f", os.devnull, "new-session", "-d", "-x", "90", "-y", "28", "-c", str(folder), "sh")
        self._tmux("set", "-g", "escape-time", "0")

    def _tmux(self, *arguments: str) -> str:
        command = ["tmux", "-L", self._socket, *arguments]
        return subprocess.run(command, env=self._environment, capture_output=True, text=True, check=True).stdout

    def close(self) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):
            self._tmux("kill-session")

    def run(self, *arguments: str) -> None:
        quoted = " ".join(f"'{argument}'" for argument in arguments)
        self._tmux("send-keys", f"clear; {sys.executable} -c '{PROGRAM}' chat {quoted}; echo code=$?", "Enter")

    def type(self, text: str) -> None:
        self._tmux("send-keys", "-l", text)

    def press(self, *keys: str) -> None:
        for key in keys:
            self._tmux("send-keys", key)

    @property
    def screen(self) -> str:
        return self._tmux("capture-pane", "-p")

    def wait(self, *texts: str, gone: str = "\0", seconds: float = 60.0) -> None:
        """Until all `texts` are to be seen, and `gone` is not."""
        end = time.monotonic() + seconds
        while not all(text in self.screen for text in texts) or gone in self.screen:
            assert time.monotonic() < end, f"{texts} did not come:\n{self.screen}"
            time.sleep(0.1)

    def wait_for_tokens(self) -> None:
        """Until the little bars tell that an answer is coming."""
        end = time.monotonic() + 60.0
        while not any(bar in self.screen for bar in BARS):
            assert time.monotonic() < end, f"no tokens came:\n{self.screen}"
            time.sleep(0.1)


@pytest.fixture
def terminal(model_home: Path, tmp_path: Path) -> Iterator[Terminal]:
    made = Terminal(model_home, tmp_path)
    yield made
    made.close()


def test_a_session(terminal: Terminal) -> None:
    """Start, ask, stream, stop, branch, search, quit, resume."""
    terminal.run("-m", "smollm", "--max-tokens", "20", "--temperature", "0")
    terminal.wait("Ask anything", "● smollm")
    terminal.type("What is the capital of France?")
    terminal.press("Enter")
    terminal.wait("▎ What is the capital", "tok/s", "hit")
    for setting in ("max_tokens 1000000", "repetition_penalty 0.5"):  # it repeats itself for ever, and fast
        terminal.type(f"/set {setting}")
        terminal.press("Enter")
    terminal.type("Count to one thousand in words.")
    terminal.press("Enter")
    terminal.wait_for_tokens()
    terminal.press("Escape")
    terminal.wait("stopped")
    terminal.press("C-r")
    terminal.wait("‹ 2/2 ›", gone="stopped")
    terminal.wait_for_tokens()
    terminal.press("Escape")
    terminal.wait("‹ 2/2 › · stopped")
    terminal.press("C-n")
    terminal.wait("New chat")
    terminal.press("C-o")
    terminal.wait("Chats")
    terminal.type("thousand")
    terminal.wait("Count to one thousand in words.", "Chats")
    terminal.press("Enter")
    terminal.wait("‹ 2/2 ›", gone="Chats")
    terminal.press("C-q")
    terminal.wait("code=0")
    assert "Ask anything" not in terminal.screen, "the terminal is as it was before"
    terminal.run("-m", "smollm", "--last")
    terminal.wait("‹ 2/2 ›", "Ask anything")
    terminal.press("C-q")
    terminal.wait("code=0")
    terminal.type("echo spilled")
    terminal.press("Enter")
    terminal.wait("spilled\n")


def test_a_private_chat_leaves_nothing_on_the_disk(terminal: Terminal, model_home: Path, tmp_path: Path) -> None:
    """B60: not in the history, the prefix cache, logs or temporary files; of the question and of the answer's tokens."""
    secret = "zanzibar-quokka-7719"
    before = {path for path in model_home.rglob("*") if path.is_file()}
    terminal.run("-m", "smollm", "--private", "--max-tokens", "20")
    terminal.wait("private", "● smollm")
    terminal.type(f"Repeat this word: {secret}")
    terminal.press("Enter")
    terminal.wait("hit")
    terminal.press("C-q")
    terminal.wait("code=0")
    assert {path for path in model_home.rglob("*") if path.is_file()} == before
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        assert secret.encode() not in path.read_bytes(), path


def test_leaving_while_the_model_loads_and_a_model_that_is_not_there(terminal: Terminal) -> None:
    terminal.run("-m", "smollm")
    terminal.wait("Ask anything")
    terminal.press("C-q")
    terminal.wait("code=0")
    terminal.run("-m", "no-such-model")
    terminal.wait("no model is called")
    terminal.press("C-q")
    terminal.wait("code=0")
