"""FileStore: files that clients have uploaded, and those made for them; each belongs to the key that it came with."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edge_llm.paths import private_dir
from edge_llm_server.api_error import ApiError

MAX_FILES = 256
"""of a key"""
MAX_BYTES = 1 << 30
"""of a key's files together"""
_ID = re.compile(r"file-[0-9a-f]{24}")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """What is known of a file. `created` is Unix time; `owner` a key's name, empty for a server without keys."""

    id: str
    filename: str
    bytes: int
    created: int
    purpose: str
    owner: str

    def shown(self) -> dict[str, Any]:
        """OpenAI's file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


class FileStore:
    """Files in a private folder, each beside what is known of it. Any thread."""

    def __init__(self, folder: Path) -> None:
        """Raises `StorageError` for a folder that others may change."""
        self._folder = private_dir(folder)
        for left in self._folder.glob("part-*"):  # by a server that was killed
            with contextlib.suppress(OSError):
                left.unlink()
        self._lock = threading.Lock()
        self._sizes: dict[str, dict[str, int]] = {}
        for path in self._folder.glob("file-*.json"):
            if (file := self._read(path.stem)) is not None:
                self.count(file.owner, file.id, file.bytes)

    def take(self, owner: str, name: str, size: int, *, instead_of: str = "") -> None:
        """`size` bytes of what an owner may have belong to something called `name`, which frees what it and `instead_of` had.

        Raises `ApiError` where the owner has too much already, and changes nothing.
        """
        with self._lock:
            own = self._sizes.setdefault(owner, {})
            others = {other: bytes_ for other, bytes_ in own.items() if other not in (name, instead_of)}
            if (name not in own and len(others) >= MAX_FILES) or sum(others.values()) + size > MAX_BYTES:
                raise ApiError(
                    429,
                    f"at most {MAX_FILES} files of together {MAX_BYTES >> 20} MiB are kept: delete some",
                    code="too_many_files",
                )
            self._sizes[owner] = {**others, name: size}

    def count(self, owner: str, name: str, size: int) -> None:
        """As `take`, for what is there already, however much it is."""
        with self._lock:
            self._sizes.setdefault(owner, {})[name] = size

    def give_back(self, owner: str, name: str) -> None:
        """What was called `name` is gone. Idempotent."""
        with self._lock:
            self._sizes.get(owner, {}).pop(name, None)

    def scratch(self) -> Path:
        """A new name for a file that is being received; it belongs to the caller."""
        return self._folder / f"part-{secrets.token_hex(12)}"

    def keep(self, scratch: Path, start: int, end: int, *, filename: str, purpose: str, owner: str) -> StoredFile:
        """Bytes `start` to `end` of a received file become a stored one. Raises `ApiError` where the owner has too many."""
        file = self._new(filename, purpose, owner, end - start)
        self.take(owner, file.id, file.bytes, instead_of=scratch.name)
        try:
            with scratch.open("rb") as source, _created(self.path(file.id)) as target:
                source.seek(start)
                left = end - start
                while left and (piece := source.read(min(left, 1 << 20))):
                    target.write(piece)
                    left -= len(piece)
            self._note(file)
        except BaseException:
            self.delete(file)
            raise
        return file

    def adopt(self, path: Path, file_id: str, *, filename: str, purpose: str, owner: str) -> None:
        """A file that was made here becomes the stored one of that `new_id`, and counts, however many its owner has.

        Does nothing if `path` is no more: it has become that. Raises `OSError`; then it may be tried again.
        """
        if path.exists():
            file = StoredFile(file_id, filename, path.stat().st_size, int(time.time()), purpose, owner)
            self._note(file)  # before it moves, or a disk that is full would lose it
            self.count(owner, file.id, file.bytes)
            shutil.move(path, self.path(file.id))

    def get(self, file_id: str, owner: str) -> StoredFile:
        """Raises `ApiError` 404, also for a file of somebody else."""
        file = self._read(file_id)
        if file is None or file.owner != owner:
            raise ApiError(404, f"there is no file {file_id[:64]!a}", code="file_not_found")
        return file

    def _read(self, file_id: str) -> StoredFile | None:
        try:
            if _ID.fullmatch(file_id):
                return StoredFile(**json.loads(self._note_path(file_id).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            pass
        return None

    def all(self, owner: str) -> list[StoredFile]:
        """The owner's files, the newest first."""
        files = []
        for path in self._folder.glob("file-*.json"):
            with contextlib.suppress(ApiError):
                files.append(self.get(path.stem, owner))
        return sorted(files, key=lambda file: (-file.created, file.id))

    def path(self, file_id: str) -> Path:
        return self._folder / file_id

    def delete(self, file: StoredFile) -> None:
        self._note_path(file.id).unlink(missing_ok=True)
        self.path(file.id).unlink(missing_ok=True)
        self.give_back(file.owner, file.id)

    def _new(self, filename: str, purpose: str, owner: str, size: int) -> StoredFile:
        return StoredFile(new_id(), filename[:512], size, int(time.time()), purpose, owner)

    def _note_path(self, file_id: str) -> Path:
        return self._folder / f"{file_id}.json"

    def _note(self, file: StoredFile) -> None:
        write_json(self._note_path(file.id), asdict(file))


def new_id() -> str:
    """A file's, which nobody can guess."""
    return f"file-{secrets.token_hex(12)}"


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Whole or not at all."""
    scratch = path.with_name(f"part-{secrets.token_hex(12)}")
    with _created(scratch) as file:
        file.write(json.dumps(value).encode("ascii"))
        os.fsync(file.fileno())
    scratch.replace(path)


@contextlib.contextmanager
def _created(path: Path) -> Iterator[Any]:
    """A new file that only its owner can read; nothing stays of it if its writing fails."""
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            yield file
    except BaseException:
        path.unlink(missing_ok=True)
        raise
