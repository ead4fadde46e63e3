"""The folder of blocks: files that appear whole or not at all, whose turn it is to write, and what a person may ask.

Deleting a file that others read is safe: they have it open, or it is a miss. All writers hold one lock while they write,
so a temporary file that another writer finds belongs to one that is no more.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edge_llm import paths
from edge_llm.cache.block_file import is_sound
from edge_llm.errors import StorageError

try:
    import fcntl
except ImportError:  # Windows: whoever writes there may evict a file too many
    fcntl = None  # type: ignore[assignment]

_LOCK_S = 3.0
"""how long the others may take before what was to be written is dropped"""
_SUFFIX, _TEMPORARY, _LOCK = ".safetensors", ".tmp-", ".lock"
_READ = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)


def prefix_folder() -> Path:
    """Where blocks are kept; may not exist yet."""
    return paths.cache_dir() / "prefixes"


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """One file of blocks; the least recently used is the smallest."""

    used_ns: int
    name: str
    size: int


def entries(folder: Path) -> Iterator[Entry]:
    """The files of a folder that hold blocks. Raises `OSError`."""
    with os.scandir(folder) as found:
        for item in found:
            if item.name.endswith(_SUFFIX):
                with contextlib.suppress(FileNotFoundError):
                    info = item.stat(follow_symlinks=False)
                    yield Entry(info.st_mtime_ns, item.name, info.st_size)


class Usage:
    """What the folder holds, known to whoever has the lock."""

    def __init__(self, folder: Path, files: list[Entry]) -> None:
        self._folder = folder
        self._files = sorted(files, reverse=True)
        self._total = sum(entry.size for entry in files)

    @classmethod
    def of(cls, folder: Path) -> Usage:
        """Raises `OSError`."""
        return cls(folder, list(entries(folder)))

    def make_room(self, size: int, budget: int) -> None:
        """Delete what was used least recently until `size` more bytes fit. Raises `OSError` if they never do."""
        while self._files and self._total + size > budget:
            entry = self._files.pop()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._folder / entry.name)
            self._total -= entry.size
        if self._total + size > budget:
            raise OSError("one block is larger than the budget")
        self._total += size


def sweep(folder: Path) -> None:
    """Delete temporary files; under the lock no other writer has one that it still needs. Raises `OSError`."""
    for name in os.listdir(folder):
        if name.startswith(_TEMPORARY):
            delete(folder / name)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The right to write and delete in a folder, which one process has at a time. Raises `OSError` if it does not come."""
    handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
    try:
        until = time.monotonic() + _LOCK_S
        while fcntl is not None:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.005)
        yield
    finally:
        os.close(handle)


def write_file(path: Path, data: bytearray) -> None:
    """A whole file of that name, or none. Raises `OSError`."""
    temporary = path.parent / f"{_TEMPORARY}{os.getpid()}-{threading.get_ident()}"
    handle = os.open(temporary, _WRITE, 0o600)
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(handle, view) :]
        finally:
            os.close(handle)
        os.replace(temporary, path)
    except BaseException:
        delete(temporary)
        raise


def read_file(path: Path, size: int) -> bytearray:
    """The bytes of a regular file of `size` bytes, or as many as it has, or none if it has another size. `OSError`."""
    handle = os.open(path, _READ)
    try:
        info = os.fstat(handle)
        data = bytearray(size if stat.S_ISREG(info.st_mode) and info.st_size == size else 0)
        view = memoryview(data)
        while view:
            count = os.readv(handle, [view]) if hasattr(os, "readv") else _read_into(handle, view)
            if not count:
                return bytearray()
            view = view[count:]
        return data
    finally:
        os.close(handle)


def _read_into(handle: int, view: memoryview) -> int:
    part = os.read(handle, len(view))
    view[: len(part)] = part
    return len(part)


def delete(path: Path) -> None:
    """Delete a file if that is possible."""
    with contextlib.suppress(OSError):
        os.unlink(path)


# --- what a person may ask about the folder ---


@dataclass(frozen=True, slots=True)
class FolderReport:
    """Files and bytes in the folder, and how many files were damaged (and are deleted)."""

    files: int
    size: int
    damaged: int = 0


def folder_stats(folder: Path) -> FolderReport:
    """Raises `StorageError`."""
    with _told():
        found = list(entries(folder)) if folder.is_dir() else []
    return FolderReport(len(found), sum(entry.size for entry in found))


def clear_folder(folder: Path) -> FolderReport:
    """Delete all blocks; gives what there was. The folder stays. Raises `StorageError`, also for one that is not ours alone."""
    if not folder.is_dir():
        return FolderReport(0, 0)
    paths.require_private(folder)  # where a link leads, files of others may lie, and models end in the same letters
    with _told(), locked(folder):
        found = list(entries(folder))
        for entry in found:
            os.unlink(folder / entry.name)
        sweep(folder)
    return FolderReport(len(found), sum(entry.size for entry in found))


def verify_folder(folder: Path) -> FolderReport:
    """Read every file and delete those that are not as they were written. Raises `StorageError`, as `clear_folder`."""
    if folder.is_dir():
        paths.require_private(folder)
    files = size = damaged = 0
    with _told():
        for entry in list(entries(folder)) if folder.is_dir() else []:
            try:
                sound = is_sound(bytes(read_file(folder / entry.name, entry.size)), entry.name)
            except FileNotFoundError:  # evicted meanwhile
                continue
            files, size, damaged = files + 1, size + entry.size, damaged + (not sound)
            if not sound:
                os.unlink(folder / entry.name)
    return FolderReport(files, size, damaged)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"the folder of cached prefixes: {error.strerror or error}") from None
