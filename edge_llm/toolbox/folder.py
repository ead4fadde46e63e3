"""A folder whose files may be read, and nothing outside of it: no path leaves it, and no link is followed."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from edge_llm.errors import ParameterError, quoted

MAX_FILE_BYTES = 64 << 10
"""read of one file; the rest is left out, and told"""
MAX_LISTED = 200
MAX_PATH = 1024
_REASONS = {
    errno.ENOENT: "there is no such file",
    errno.ENOTDIR: "there is no such file",
    errno.ELOOP: "it is a link, and links are not followed",
    errno.EMLINK: "it is a link, and links are not followed",
    errno.EACCES: "it may not be read",
    errno.EPERM: "it may not be read",
}


class ReadableFolder:
    """Opened once, so that no later change of its path matters. Raises `ParameterError` if it cannot be.

    Names that begin with a dot are not shown: that is where programs keep their secrets.
    """

    def __init__(self, path: Path) -> None:
        if os.open not in os.supports_dir_fd or not hasattr(os, "O_NOFOLLOW"):
            raise ParameterError("this system cannot keep a tool inside a folder")
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ParameterError(
                f"the folder {quoted(str(path))} cannot be opened: {error.strerror}",
                hint="check the path and its rights",
            ) from None

    def close(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def read(self, path: str) -> str:
        """The text of a file, or the names in a folder. Raises `ValueError` with the reason for a model."""
        names = _names(path)
        try:
            return self._read(names)
        except OSError as error:
            raise ValueError(_REASONS.get(error.errno or 0, "it cannot be read")) from None

    def _read(self, names: list[str]) -> str:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe would wait for its writer
        here = os.dup(self._descriptor)
        try:
            for name in names:
                inner = os.open(name, flags, dir_fd=here)
                os.close(here)
                here = inner
            kind = os.fstat(here).st_mode
            if stat.S_ISDIR(kind):
                return _listing(here)
            if not stat.S_ISREG(kind):
                raise ValueError("it is no regular file")
            with os.fdopen(os.dup(here), "rb") as file:
                return _text(file.read(MAX_FILE_BYTES + 1))
        finally:
            os.close(here)


def _names(path: str) -> list[str]:
    if len(path) > MAX_PATH or "\0" in path or path.startswith("/") or "\\" in path:
        raise ValueError("a path is relative, with / between its parts")
    names = [name for name in path.split("/") if name not in ("", ".")]
    if any(name.startswith(".") for name in names):
        raise ValueError("a path stays inside the folder, and hidden files are not shown")
    return names


def _listing(descriptor: int) -> str:
    with os.scandir(descriptor) as entries:
        names = sorted(
            entry.name + ("/" if entry.is_dir(follow_symlinks=False) else "")
            for entry in entries
            if not entry.name.startswith(".")
        )
    more = [f"[and {len(names) - MAX_LISTED} more]"] if len(names) > MAX_LISTED else []
    return "\n".join([*names[:MAX_LISTED], *more]) or "[the folder is empty]"


def _text(data: bytes) -> str:
    if b"\0" in data:
        raise ValueError("it is no text")
    text = data[:MAX_FILE_BYTES].decode("utf-8", "replace")
    return text if len(data) <= MAX_FILE_BYTES else f"{text}\n[cut after {MAX_FILE_BYTES} bytes]"
