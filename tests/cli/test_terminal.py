"""On a terminal: nothing that a model, a file or an error says may reach it as a control sequence (trust.md F26)."""

from __future__ import annotations

import os
import pty
import random
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

import pytest

from tests.cli.conftest import ROOT, stub_command

PAYLOADS = [
    "\x1b[2J\x1b[H",
    "\x1b]0;title\x07",
    "\x1b]52;c;ZXZpbA==\x1b\\",
    "\x1b]8;;http://evil.example\x1b\\click\x1b]8;;\x1b\\",
    "\x1bP+q544e\x1b\\",
    "\x1b[6n\x1b[c",
    "\x1bc",
    "\x9b31m\x9d0;x\x9c",
    "\x07\x08\x0b\x0c\x0e\x0f\x7f",
    "safe\rforged",
    "\u202egnp.exe\u202c",
    "\u2066\u2069\u200b\u200d\ufeff",
    "\U000e0041\U000e007f",
    "\ud800",
    "[link=http://evil]markup[/link] [bold red]x[/]",
]
FOREIGN = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\x80-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff\U000e0000-\U000e007f]"
)


class Terminal:
    """A child on a pseudo-terminal; `out` has what it wrote there."""

    def __init__(self, command: list[str], **environment: str) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=_take_terminal,  # noqa: PLW1509 - no threads are running here
            env={**os.environ, **environment},
        )
        os.close(slave)
        self.out = ""
        self._data = b""
        self._seen = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    def read_until(self, text: str, timeout: float = 20.0) -> None:
        """Reads on to where `text` comes next."""
        end = time.monotonic() + timeout
        while text not in self.out[self._seen :]:
            assert time.monotonic() < end, f"{text!r} did not come: {self.out!r}"
            if select.select([self._master], [], [], 0.1)[0] and not self._take():
                break
        self._seen = self.out.index(text, self._seen) + len(text)

    def finish(self) -> int:
        while self._take():
            pass
        return self.process.wait(20)

    def hang_up(self) -> None:
        """The window is closed."""
        os.close(self._master)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def _take(self) -> bool:
        try:
            data = os.read(self._master, 65536)
        except OSError:  # the other end is closed
            return False
        self._data += data
        self.out = self._data.decode("utf-8", "replace").replace("\r\n", "\n")
        return bool(data)


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    for number in (signal.SIGINT, signal.SIGHUP):  # a test run in the background was started with them ignored
        signal.signal(number, signal.SIG_DFL)


def on_terminal(command: list[str]) -> tuple[int, str]:
    with Terminal(command) as terminal:
        return terminal.finish(), terminal.out


@pytest.mark.parametrize("cut", [1, 2, 3, 1000])
def test_hostile_answers_are_shown_harmless(own_home: Path, cut: int) -> None:
    text = "BEGIN" + "|".join(PAYLOADS) + "END"
    pieces = [text[i : i + cut] for i in range(0, len(text), cut)]
    code, out = on_terminal(stub_command({"pieces": pieces}, "run", "Hi"))
    assert code == 0
    assert not FOREIGN.findall(out)
    assert out.startswith("BEGIN")
    assert "END\n" in out
    assert "[link=http://evil]markup[/link] [bold red]x[/]" in out


@pytest.mark.parametrize(("term", "before", "after"), [("xterm", "\x1b[2m", "\x1b[0m"), ("dumb", "", "")])
def test_what_fell_out_is_told_faintly_where_that_can_be_shown(
    own_home: Path, term: str, before: str, after: str
) -> None:
    with Terminal(stub_command({"pieces": ["Hello."], "seen": 3}, "chat", "--plain"), TERM=term) as terminal:
        terminal.read_until("> ")
        terminal.type("one two\n")
        terminal.read_until(f"Hello.\n{before}the conversation is longer than the context of 64 tokens{after}\n")


def test_random_answers_are_shown_harmless(own_home: Path) -> None:
    draw = random.Random(7)
    alphabet = [chr(c) for c in [*range(256), 0x200B, 0x202E, 0x2066, 0xFEFF, 0xE0041, 0x1F600, 0xD800]]
    text = "".join(draw.choice(alphabet) for _ in range(20_000))
    pieces = [text[i : i + 37] for i in range(0, len(text), 37)]
    code, out = on_terminal(stub_command({"pieces": pieces}, "run", "Hi"))
    assert code == 0
    assert not FOREIGN.findall(out)


def test_into_a_pipe_the_answer_goes_unchanged(own_home: Path) -> None:
    text = "|".join(payload for payload in PAYLOADS if payload != "\ud800")
    done = subprocess.run(
        stub_command({"pieces": [text]}, "run", "Hi"),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )
    assert done.stdout.decode("utf-8").replace(os.linesep, "\n") == text + "\n"


@pytest.mark.parametrize("payload", [p for p in PAYLOADS if "\0" not in p and p != "\ud800"])
@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "Hi", "--cache", "{}"],
        ["models", "show", "{}"],
        ["models", "{}"],
        ["pull", "{}"],
        ["import", "{}.gguf"],
        ["run", "Hi", "--top-k", "{}"],
        ["run", "Hi", "--{}"],
        ["{}"],
    ],
)
def test_hostile_arguments_in_errors_are_shown_harmless(invoke, payload: str, arguments: list[str]) -> None:
    result = invoke(*(argument.replace("{}", payload) for argument in arguments))
    assert result.exit_code == 2
    assert not FOREIGN.findall(result.stderr + result.stdout)
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) <= 2


def test_hostile_errors_are_one_harmless_line(invoke, engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from edge_llm.errors import ModelFormatError

    def chat(*_arguments: object, **_options: object) -> None:
        raise ModelFormatError("tensor " + "\n".join(PAYLOADS) + " is bad", hint="\x1b[31mno\n\nhint")

    monkeypatch.setattr(engine, "chat", chat)
    result = invoke("run", "Hi")
    assert result.exit_code == 2
    assert [line.split()[0] for line in result.stderr.splitlines()] == ["error:", "hint:"]
    assert not FOREIGN.findall(result.stderr)


def test_ctrl_c_in_a_chat_stops_the_answer_and_keeps_the_chat(own_home: Path) -> None:
    with Terminal(stub_command({"pieces": ["word "], "times": 2000, "delay": 0.01}, "chat", "--plain")) as terminal:
        terminal.read_until("> ")
        terminal.type("tell me\n")
        terminal.read_until("word word")
        terminal.type("\x03")
        terminal.read_until("stopped; the answer is kept")
        terminal.read_until("> ")
        time.sleep(0.3)  # readline is deaf for a moment after it has shown the prompt
        terminal.type("\x03")  # here it only abandons the line
        terminal.read_until("> ")
        terminal.type("again\n")
        terminal.read_until("word word")
        terminal.type("\x03")
        terminal.read_until("kept as far as it came")
        terminal.read_until("> ")
        terminal.type("\x04")
        assert terminal.finish() == 0
        assert "Traceback" not in terminal.out


DEAF = """
import time
from edge_llm_cli import answer, main
from tests.cli import stub

class Deaf(stub.StubEngine):
    def _say(self, mailbox, cancelled, params):
        for _ in range(6000):
            mailbox.put(stub.TextDelta("word "))
            time.sleep(0.01)

answer.opened = stub.opener(Deaf([]))
main.run()
"""


def test_ctrl_c_twice_leaves_at_once(own_home: Path) -> None:
    with Terminal([sys.executable, "-c", DEAF, "run", "Hi"]) as terminal:
        terminal.read_until("word word")
        terminal.type("\x03")
        time.sleep(0.3)
        terminal.type("\x03")
        assert terminal.finish() == 130
        assert "Traceback" not in terminal.out
        assert len(terminal.out) < 6000 * 5


def test_a_terminated_run_dies(own_home: Path) -> None:
    with Terminal(stub_command({"pieces": ["word "], "times": 2000, "delay": 0.01}, "run", "Hi")) as terminal:
        terminal.read_until("word")
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.finish() == -signal.SIGTERM
