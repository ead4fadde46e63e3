"""What goes to stdout and stderr. Text of models, files and errors is made harmless where a terminal could read it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from edge_llm.errors import EdgeLLMError


def prepare() -> None:
    """Makes the standard streams take any text: what their encoding lacks is written as \\uXXXX."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - lives as long as the process
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - as above
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    warnings.showwarning = lambda message, *_rest, **_options: note(f"warning: {message}")


def is_terminal(stream: Any) -> bool:
    """Whether a person sees what is written to `stream`."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError, OSError):
        return False


class AnswerWriter:
    """An answer to stdout, piece by piece and at once: harmless on a terminal, unchanged into a pipe or file."""

    def __init__(self) -> None:
        from edge_llm.text.terminal import TerminalFilter

        self._filter = TerminalFilter() if is_terminal(sys.stdout) else None
        self._last = "\n"

    def write(self, text: str) -> None:
        self._put(self._filter.feed(text) if self._filter else text)

    def finish(self) -> None:
        """Ends the answer's last line."""
        self._put(self._filter.flush() if self._filter else "")
        if self._last != "\n":
            self._put("\n")

    def _put(self, text: str) -> None:
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()
            self._last = text[-1]


def line(text: str = "") -> None:
    """One line to stdout, harmless."""
    from edge_llm.text.terminal import clean_line

    sys.stdout.write(clean_line(text) + "\n")


def data(value: Any) -> None:
    """One JSON object to stdout; pure ASCII, so it is safe on any terminal."""
    sys.stdout.write(json.dumps(value) + "\n")


def note(text: str) -> None:
    """One line to stderr, harmless: logs are read on terminals too."""
    _note(text, "", "")


def dim_note(text: str) -> None:
    """As `note`, for what nobody has to act on: fainter where a terminal can show that."""
    fainter = is_terminal(sys.stderr) and os.name == "posix" and os.environ.get("TERM") not in (None, "dumb")
    _note(text, *(("\x1b[2m", "\x1b[0m") if fainter else ("", "")))


def _note(text: str, before: str, after: str) -> None:
    from edge_llm.text.terminal import clean_line

    with contextlib.suppress(OSError, ValueError):  # nobody is listening
        sys.stderr.write(f"{before}{clean_line(' '.join(text.split()))}{after}\n")
        sys.stderr.flush()


def report(error: EdgeLLMError) -> None:
    """What went wrong, and on the next line what to do about it."""
    from edge_llm_cli.wording import for_command_line

    text, hint = for_command_line(error)
    note(f"error: {text}")
    if hint:
        note(f"hint: {hint}")


def agreed(question: str) -> bool:
    """Whether the person at the terminal says yes. Raises `KeyboardInterrupt` for Ctrl-C, and where there is no answer."""
    import typer

    try:
        return typer.confirm(question, err=True)
    except typer.Abort:
        note("")  # the line of the question is still open
        raise KeyboardInterrupt from None


def table(rows: Sequence[tuple[str, ...]]) -> None:
    """Rows in aligned columns to stdout."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def package_version(name: str) -> str:
    """Version of an installed package, or that there is none."""
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def counted(count: int, one: str, several: str) -> str:
    """The number, and what there is of it."""
    return f"{count} {one if count == 1 else several}"


def megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
