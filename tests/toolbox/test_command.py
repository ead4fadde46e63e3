"""Programs as tools: killed with all they started, blind to our environment, bounded."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from edge_llm.toolbox.command import Command, CommandFailedError


def run(code: str, arguments: str = "{}", *, seconds: float = 20, most_bytes: int = 1000) -> str:
    return Command((sys.executable, "-c", code)).run(arguments, seconds=seconds, most_bytes=most_bytes)


def test_arguments_go_in_and_text_comes_out() -> None:
    code = "import json, sys; print(json.load(sys.stdin)['a'] * 2)"
    assert run(code, '{"a": "é"}') == "éé\n"
    assert run("print('x' * 70000)", '{"a": "' + "y" * 300_000 + '"}', most_bytes=80_000) == "x" * 70_000 + "\n"


def test_no_secret_of_ours_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "canary")
    assert "canary" not in run("import os; print(dict(os.environ))")
    assert run("import os; print('HOME' in os.environ)") == "False\n"


def test_output_is_bounded_and_ends_the_program() -> None:
    assert len(run("while True: print('x' * 1000)", most_bytes=5000)) <= 5000 + (1 << 16)


def test_a_program_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    code = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(note)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)"
    )
    with pytest.raises(CommandFailedError, match="more than 5 seconds"):
        run(code, seconds=5)
    status = Path(f"/proc/{int(note.read_text())}/status")
    until = time.monotonic() + 60  # it has been killed, but may not have come to its end yet
    while not (ended := _has_ended(status)) and time.monotonic() < until:
        time.sleep(0.01)
    assert ended


def _has_ended(status: Path) -> bool:
    try:
        return "Z (zombie)" in status.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import sys; sys.exit(3)", "exit code 3"),
        ("import os; os.close(1); import time; time.sleep(600)", "more than"),
    ],
)
def test_failures_are_told(code: str, reason: str) -> None:
    with pytest.raises(CommandFailedError, match=reason):
        run(code, seconds=1.5)


def test_what_cannot_be_started() -> None:
    with pytest.raises(CommandFailedError, match="cannot be started"):
        Command(("/nonexistent/program",)).run("{}", seconds=1, most_bytes=10)


def test_nothing_is_left_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    run("pass")
    assert len(os.listdir("/proc/self/fd")) == before
