"""Text files that go with a question: named by path, or by @path in the question itself."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from edge_llm.errors import InputError, StorageError, quoted
from edge_llm_chat.conversation import Attachment

MOST_BYTES = 1 << 20
MOST_COMPLETIONS = 50
_MENTION = re.compile(r"(?:^|(?<=\s))@(\S+)")


def read_attachment(path: str) -> Attachment:
    """The file at `path` (~ is the user's home). Raises `InputError` unless it is text of at most 1 MiB."""
    where = os.path.expanduser(path)
    try:
        _check_is_file(path, os.stat(where))  # to open a pipe or a device may wait, or do something
        with open(os.open(where, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
            _check_is_file(path, os.fstat(file.fileno()))  # it may have become another one
            data = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise StorageError(f"{quoted(path)} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > MOST_BYTES:
        raise InputError(f"{quoted(path)} is larger than {MOST_BYTES >> 20} MiB")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{quoted(path)} is not UTF-8 text") from None
    if "\0" in text:
        raise InputError(f"{quoted(path)} is not text")
    return Attachment(os.path.basename(path), text)


def _check_is_file(path: str, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "a pipe, a device or a socket"
        raise InputError(f"{quoted(path)} is {kind}, not a file")


def mentions(text: str) -> list[str]:
    """Paths that a question names with @, those that there are, files or not."""
    named = (match[1].rstrip(".,;:!?)") for match in _MENTION.finditer(text[:20_000]))
    return list(dict.fromkeys(path for path in named if path and os.path.exists(os.path.expanduser(path))))


def completions(text: str) -> list[str]:
    """What the @path at the end of `text` may become; folders end with a slash."""
    match = re.search(r"(?:^|\s)@(\S*)$", text[-4_000:])
    if match is None:
        return []
    folder, start = os.path.split(match[1])
    try:
        entries = sorted(os.scandir(Path(folder or ".").expanduser()), key=lambda entry: entry.name)
    except (OSError, RuntimeError):
        return []
    found = []
    for entry in entries:
        if entry.name.startswith(start) and (start.startswith(".") or not entry.name.startswith(".")):
            found.append(os.path.join(folder, entry.name) + ("/" if entry.is_dir() else ""))
    return found[:MOST_COMPLETIONS]
