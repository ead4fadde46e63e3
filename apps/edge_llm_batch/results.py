"""Where the answers of a batch go: a file that also remembers what is done, or a stream that does not."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from edge_llm.errors import InputError, StorageError
from edge_llm.install.staging import DISK_FULL
from edge_llm_batch.lines import LineId

SYNC_SECONDS = 5.0
MAX_RESULT_BYTES = 256 << 20
_BEGINNING = b'{"id": "batch_req_'


class Results(Protocol):
    """`done` has the lines that were answered before, with what they were; `errors` is how many of them in vain."""

    done: dict[int, LineId]
    errors: int

    def write(self, result: dict[str, Any]) -> None:
        """Add a line. Raises `StorageError`, or `BrokenPipeError` when nobody reads any more."""
        ...

    def close(self) -> None: ...


class ResultStream:
    """Lines to whoever reads them."""

    def __init__(self, stream: BinaryIO, *, closes: bool = False) -> None:
        """With `closes` the stream is closed at the end."""
        self.done: dict[int, LineId] = {}
        self.errors = 0
        self._stream, self._closes = stream, closes

    def write(self, result: dict[str, Any]) -> None:
        self._stream.write(_line(result))
        self._stream.flush()

    def close(self) -> None:
        if self._closes:
            self._stream.close()


class ResultFile:
    """Lines at the end of a file, which one process at a time may write.

    A line is whole or it is cut off by the next process. A process that dies loses none; what a power cut may lose was
    written within the last `SYNC_SECONDS`.
    """

    def __init__(self, path: Path) -> None:
        """Reads what is there. Raises `StorageError`, and `InputError` for a file that holds something else."""
        self.done: dict[int, LineId] = {}
        self.errors = 0
        self._path = path
        with _storage_errors(path):
            self._file = open(  # noqa: SIM115 - closed by `close`
                os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o666), "r+b", 0
            )
        self._synced = time.monotonic()
        try:
            with _storage_errors(path):
                _lock(self._file, path)
                self._read()
        except BaseException:
            self._file.close()
            raise

    def write(self, result: dict[str, Any]) -> None:
        data = memoryview(_line(result))
        with _storage_errors(self._path):
            while data:
                data = data[self._file.write(data) :]
            if time.monotonic() - self._synced >= SYNC_SECONDS:
                self._sync()

    def close(self) -> None:
        with _storage_errors(self._path), self._file:
            self._sync()

    def _sync(self) -> None:
        os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def _read(self) -> None:
        with open(os.dup(self._file.fileno()), "rb") as file:
            number = end = 0
            while data := file.readline(MAX_RESULT_BYTES):
                number += 1
                known = self._note(data)
                if not data.endswith(b"\n"):
                    self._mend(data, end, known=known, number=number)
                elif not known:
                    raise self._foreign(number)
                end += len(data)

    def _note(self, data: bytes) -> bool:
        """Remember a line; False if it is none of ours."""
        try:
            result = json.loads(data)
            line, response = LineId.parse(result["id"]), result["response"]
            failed = response is None or response["status_code"] != 200
        except (ValueError, RecursionError, TypeError, LookupError):
            return False
        if line is None:
            return False
        if line.number in self.done:
            raise InputError(f"{self._path} answers line {line.number} twice", hint="give another output file")
        self.done[line.number] = line
        self.errors += failed
        return True

    def _mend(self, rest: bytes, end: int, *, known: bool, number: int) -> None:
        """End the last line, or cut it off if somebody was stopped while writing it."""
        if known:
            self._file.write(b"\n")
        elif rest.startswith(_BEGINNING[: len(rest)]) or not rest.strip(b"\0"):
            self._file.truncate(end)
        else:
            raise self._foreign(number)

    def _foreign(self, number: int) -> InputError:
        return InputError(
            f"line {number} of {self._path} is no answer of a batch",
            hint="give another output file",
        )


def _line(result: dict[str, Any]) -> bytes:
    return json.dumps(result).encode("ascii") + b"\n"


@contextlib.contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        full = error.errno in DISK_FULL
        hint = "free some space and start it again: it goes on where it was" if full else "give another output file"
        raise StorageError(f"{path}: {error.strerror or error}", hint=hint) from error


def _lock(file: BinaryIO, path: Path) -> None:
    try:
        import fcntl
    except ImportError:
        return  # no such locks there
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StorageError(f"another process writes {path}", hint="give each process an output file") from None


def open_results(path: Path) -> Results:
    """A file of results; or a stream, for what is no file. Raises as `ResultFile`."""
    with _storage_errors(path):
        if path.exists() and not stat.S_ISREG(path.stat().st_mode):
            return ResultStream(path.open("wb", 0), closes=True)
    return ResultFile(path)
