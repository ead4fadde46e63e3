from __future__ import annotations

import io
import sys

import pytest
from edge_llm_cli.progress import ProgressDisplay


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def replaced_stderr(monkeypatch: pytest.MonkeyPatch, term: str = "xterm") -> Terminal:
    terminal = Terminal()  # in the test itself: pytest changes sys.stderr between a fixture and its test
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", term)
    return terminal


def test_a_bar_on_a_terminal_that_vanishes(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = replaced_stderr(monkeypatch)
    with ProgressDisplay() as progress:
        progress("downloading", 0, 100)
        progress("downloading", 50, 100)
        progress("importing weights", 1, 2)
        progress.kernels("linear", 3, 9)
        progress("waiting for another process", 0, 0)
    shown = stderr.getvalue()
    assert "waiting for another process" in shown
    assert "\x1b[2K" in shown.rsplit("waiting", 1)[1], "the line must be erased at the end"


def test_no_report_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = replaced_stderr(monkeypatch)
    with ProgressDisplay():
        pass
    assert stderr.getvalue() == ""


def test_lines_for_long_stages_on_a_dumb_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = replaced_stderr(monkeypatch, "dumb")
    with ProgressDisplay() as progress:
        for done in range(3):
            progress("reading", done, 3)
        for done in range(3):
            progress("downloading", done, 93_000_000)
        for done in range(3):
            progress.kernels("x", done, 3)
    assert stderr.getvalue() == "downloading (93 MB) ...\ncompiling kernels (once) ...\n"


def test_a_licence_is_a_line_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = replaced_stderr(monkeypatch)
    with ProgressDisplay() as progress:
        progress("waiting for another process", 0, 0)
        progress("licence: x comes under the Terms", 0, 0)
        progress("downloading", 1, 2)
    before, after = stderr.getvalue().split("licence: x comes under the Terms\n")
    assert before.endswith("\x1b[2K"), "the bar is gone before the line"
    assert after.startswith("\x1b[?25l"), "and a new one comes after it"
    stderr = replaced_stderr(monkeypatch, "dumb")
    with ProgressDisplay() as progress:
        progress("licence: x comes under the Terms", 0, 0)
        progress("downloading part 1 of 2", 1, 2)
    assert stderr.getvalue() == "licence: x comes under the Terms\ndownloading part 1 of 2 ...\n"


def test_the_bar_goes_away_when_the_work_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = replaced_stderr(monkeypatch)

    def fail() -> None:
        with ProgressDisplay() as progress:
            progress("downloading", 1, 2)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert "\x1b[?25h" in stderr.getvalue(), "the cursor must be shown again"
