"""The chat is told to end from outside, in the middle of an answer."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from edge_llm_chat.conversation import State
from edge_llm_chat.store import Store
from edge_llm_chat.writer import Writer
from textual.drivers._writer_thread import MAX_QUEUED_WRITES

from tests.cli.conftest import ROOT
from tests.cli.test_terminal import Terminal


@pytest.fixture
def answering(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'apps'}{os.pathsep}{ROOT}")
    terminal = Terminal([sys.executable, "-m", "tests.chat.session", "held"], TERM="xterm-256color")
    terminal.read_until("sk anything")
    terminal.type("tell me\r")
    terminal.read_until("ANSWERED")
    return terminal


def check_kept() -> None:
    store = Store.open()
    (summary,) = store.find()
    question, answer = store.load(summary.id).path()
    assert question.content == "tell me"
    assert (answer.content, answer.state) == ("ANSWERED", State.STOPPED)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_killed_chat_gives_the_terminal_back_and_keeps_what_was_said(answering: Terminal, number: int) -> None:
    with answering as terminal:
        terminal.process.send_signal(number)
        assert terminal.finish() == 128 + number
        for mode in (1049, 1000, 1003, 1006, 2004, 1004):
            assert terminal.out.rindex(f"\x1b[?{mode}l") > terminal.out.rindex(f"\x1b[?{mode}h"), mode
        assert terminal.out.rindex("\x1b[?25h") > terminal.out.rindex("\x1b[?25l"), "the cursor is to be seen"
        assert "Traceback" not in terminal.out
    check_kept()


def test_a_terminal_that_is_closed_ends_the_chat(answering: Terminal) -> None:
    answering.hang_up()
    assert answering.process.wait(20) == 128 + signal.SIGHUP
    check_kept()


def test_a_chat_that_was_stopped_goes_on_with_one_reader_of_its_keys(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'apps'}{os.pathsep}{ROOT}")
    terminal = Terminal([sys.executable, "-m", "tests.chat.session"], TERM="xterm-256color")
    with terminal:
        terminal.read_until("commands · F1 help")
        threads = len(os.listdir(f"/proc/{terminal.process.pid}/task"))
        for _ in range(2):
            terminal.process.send_signal(signal.SIGSTOP)
            terminal.process.send_signal(signal.SIGCONT)
            terminal.read_until("commands · F1 help")  # all is painted again
        assert len(os.listdir(f"/proc/{terminal.process.pid}/task")) <= threads
        terminal.type("tell me\r")
        terminal.read_until("ANSWERED")
        terminal.type("\x11")
        assert terminal.finish() == 0


class LostTerminal(io.StringIO):
    def write(self, _text: str) -> int:
        raise OSError(errno.EIO, "Input/output error")


def test_what_cannot_be_written_holds_nothing_up() -> None:
    writer = Writer(LostTerminal())
    writer.start()
    for number in range(3 * MAX_QUEUED_WRITES):
        writer.write(str(number))
    writer.stop()
    assert not writer.is_alive()


def test_what_is_written_comes_out_in_order() -> None:
    file = io.StringIO()
    writer = Writer(file)
    writer.start()
    for number in range(100):
        writer.write(f"{number} ")
    writer.stop()
    assert file.getvalue().split() == [str(number) for number in range(100)]


def test_a_terminal_that_goes_unseen_while_an_answer_is_drawn_holds_nothing_up(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with nohup, or when the write that fails comes before the signal."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'apps'}{os.pathsep}{ROOT}")
    terminal = Terminal([sys.executable, "-m", "tests.chat.session", "drawing"], TERM="xterm-256color")
    terminal.read_until("sk anything")
    terminal.type("tell me\r")
    terminal.read_until("word 9")
    terminal.hang_up()
    time.sleep(4)  # more is drawn than a queue holds that nobody empties
    terminal.process.send_signal(signal.SIGTERM)
    try:
        assert terminal.process.wait(30) == 128 + signal.SIGTERM
    finally:
        terminal.process.kill()
