"""F26: what models, names and errors say reaches a terminal as text, never as a command: `python -m tools.trust.terminal`.

The programs run on a pty, and all that comes out of it is read: control characters, escape sequences, and characters that
hide or turn others. Each payload has a number of seven digits, which must come out as text and in no sequence.
"""

from __future__ import annotations

import json
import random
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.cli.conftest import stub_command
from tests.cli.test_terminal import FOREIGN, Terminal
from tools.trust.figure import Figure

_SEQUENCES = (
    *(
        "\x1b[{}m",
        "\x1b[{};1H",
        "\x1b[?{}h",
        "\x1b[{}n",
        "\x1b[{}t",
        "\x1b[{} q",
        "\x1b[>{}c",
        "\x1b[38;5;{}m",
        "\x1b[{}",
    ),
    *(
        "\x1b]0;{}\x07",
        "\x1b]52;c;{}\x1b\\",
        "\x1b]8;;http://{}\x1b\\",
        "\x1b]{};?\x07",
        "\x1b]1337;{}\x07",
        "\x1b]0;{}",
    ),
    *(
        "\x1bP{}\x1b\\",
        "\x1b_{}\x1b\\",
        "\x1b^{}\x1b\\",
        "\x1bX{}\x1b\\",
        "\x1bc{}",
        "\x1b#8{}",
        "\x1b{}",
        "\x1b(0{}",
        "\x1b\x1b[{}m",
    ),
    *("\x9b{}m", "\x9d0;{}\x9c", "\x90{}\x9c", "\x9f{}\x9c", "\x85{}", "\x84{}", "\x8d{}"),
    *("\r{}", "\x08\x08{}", "\x7f{}", "\x0e{}\x0f", "\x07{}", "\x0b{}\x0c", "\x00{}", "\x05{}", "\x18{}\x1a"),
    *(
        "\u202e{}\u202c",
        "\u2066{}\u2069",
        "\u200f{}",
        "\U000e0041{}\U000e007f",
        "\ufeff{}",
        "\u2028{}\u2029",
        "\ud800{}",
    ),
    *(
        "&#27;[{}m",
        "&#x9b;{}m",
        "[link=http://{}]x[/]",
        "[bold]{}",
        "[@click=app.quit]{}[/]",
        "\\x1b[{}m",
        "\x1b[200~{}\x1b[201~",
    ),
)
_PLACES = (
    *(
        "{}",
        "# {}",
        "- {}",
        "> {}",
        "**{}**",
        "`{}`",
        "| a | {} |\n|---|---|\n| {} | b |",
        "[{}](http://x)",
        "[x](http://{})",
    ),
    *("```\n{}\n```", "```{}\nx {}\n```", "<b>{}</b>", "1. {}", "![{}](x)", "~~{}~~", "    {}", "\\{}", "---\n{}"),
)
_OWN = re.compile(  # what Textual and Rich write: colours, places and shapes of the cursor, modes
    r"\x1b\[(?:[0-9;]*m|[0-9]+;[0-9]+H|\?[0-9]+(?:\$p|[hl])|[<>=]?[0-9]*u|[0-9]*[JK])|\x1b[78]|\x1b\]22;[a-z-]*\x07"
)
_NUMBER = re.compile("[0-9]{7}")
_PROGRAM = "from edge_llm_cli.entry import run; run()"
_IN_ONE = 6
_IN_RUN = 120
_SHOWN = 0.9
"""of the numbers: some lie where nothing is to be seen, as the address of a link does"""


class Payloads:
    """Numbered ones, without end."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self._next = 1_000_000
        self.given = 0

    def one(self) -> str:
        self._next += self.chance.randint(1, 9)
        self.given += 1
        return self.chance.choice(_SEQUENCES).replace("{}", str(self._next))

    def answer(self) -> dict[str, Any]:
        """What `terminal_chat` plays."""
        chance = self.chance
        text = "\n\n".join(chance.choice(_PLACES).replace("{}", self.one()) for _ in range(_IN_ONE - 3))
        return {
            "question": f"q {self.one()}",
            "model": f"m {self.one()}",
            "reasoning": f"r {self.one()}" if chance.random() < 0.5 else "",
            "pieces": list(_cut(chance, text)),
            "error": self.one() if chance.random() < 0.2 else None,
        }


def _cut(chance: random.Random, text: str) -> Iterator[str]:
    while text:
        size = chance.choice((1, 2, 5, 40))
        yield text[:size]
        text = text[size:]


def harm(out: str) -> str | None:
    """What in the output of a terminal is neither text nor a sequence of our own; None: nothing."""
    for sequence in _OWN.findall(out):
        if _NUMBER.search(sequence):
            return ascii(sequence)
    rest = _OWN.sub("", out.replace("\r\n", "\n"))
    found = FOREIGN.search(rest) or re.search(r"\r", rest)
    return None if found is None else ascii(rest[max(0, found.start() - 40) : found.end() + 40])


def shown_in_chat(payloads: Payloads, answers: int, folder: Path) -> str:
    file = folder / "answers.json"
    file.write_text(json.dumps([payloads.answer() for _ in range(answers)]), encoding="utf-8")
    command = [sys.executable, "-m", "tools.trust.terminal_chat", str(file)]
    return _output(command, folder, columns=100, rows=50)


def shown_by_run(payloads: Payloads, folder: Path) -> str:
    """An answer of `edge-llm run`, and then an error that names what was asked for."""
    text = "\n".join(payloads.one() for _ in range(_IN_RUN))
    out = _output(stub_command({"pieces": list(_cut(payloads.chance, text))}, "run", "Hi"), folder)
    name = " ".join(payloads.one() for _ in range(10)).replace("\x00", "").replace("\ud800", "")
    return out + _output([sys.executable, "-c", _PROGRAM, "run", "-m", name, "Hi"], folder)


def _output(command: list[str], folder: Path, columns: int = 80, rows: int = 24) -> str:
    environment = {"EDGE_LLM_HOME": str(folder), "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    size = {"COLUMNS": str(columns), "LINES": str(rows)}
    with Terminal(command, **environment, **size) as terminal:
        terminal.finish()
        return terminal.out


def trials(count: int, seed: int) -> int:
    """Show so many payloads; raises on the first that gets through."""
    payloads = Payloads(seed)
    with tempfile.TemporaryDirectory() as name:
        while payloads.given < count:
            before = payloads.given
            outputs = [shown_in_chat(payloads, 60, Path(name)), shown_by_run(payloads, Path(name))]
            numbers: set[str] = set()
            for out in outputs:
                found = harm(out)
                assert found is None, f"got through: {found}"
                numbers |= set(_NUMBER.findall(_OWN.sub("", out)))
            # a figure in which nothing was shown would be no figure
            assert len(numbers) >= _SHOWN * (payloads.given - before), (
                f"{len(numbers)} of {payloads.given - before} were shown"
            )
    return payloads.given


FIGURE = Figure(
    "F26",
    "payloads for a terminal, in answers, thoughts, names and errors, through a pty",
    "python -m tools.trust.terminal",
    {"commit": 300, "nightly": 100_000},
    trials,
)

if __name__ == "__main__":
    sys.exit(FIGURE.main(sys.argv[1:]))
