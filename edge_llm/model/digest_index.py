"""DigestIndex: digests of files that were read before, so that a start hashes neither a model nor a GGUF file again.

It lives in the cache folder and is only an aid: lost, unreadable or unwritable, files are hashed again. When something is
written, what is known of files that are gone goes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from edge_llm import paths
from edge_llm.errors import StorageError
from edge_llm.model.digest import file_sha256

_VERSION = 3
_SETTLED_NS = 2_000_000_000
"""the coarsest clock of a file system: a file that changes again within one tick would look the same"""
_NAME = re.compile(r"[0-9a-f]+-[0-9a-f]+(\.json|\.\d+\.[0-9a-f]+\.tmp)")
_TEMPORARY_S = 600
"""age at which a temporary file belongs to nobody any more"""


class DigestIndex:
    """sha256 of files by device and inode; an entry holds as long as size and all times do: a time that was set back leaves
    another ctime. Only our own folder, which nobody else can write to, is believed."""

    def __init__(self) -> None:
        self.root: Path | None = None
        with contextlib.suppress(StorageError):
            self.root = paths.private_cache("digests")

    def sha256(self, file: IO[bytes], advance: Callable[[int], None] | None = None) -> str:
        """Of an open file: as it was found before, if it is unchanged, else by reading it, which tells `advance` the bytes."""
        info = os.fstat(file.fileno())  # before it is read: what changes meanwhile is no longer this
        if known := self._get(info):
            return known
        age_ns = time.time_ns() - max(info.st_mtime_ns, info.st_ctime_ns)  # now, however long reading takes
        sha256 = file_sha256(file, advance)
        if age_ns > _SETTLED_NS:
            self._put(file, info, sha256)
        return sha256

    def _get(self, info: os.stat_result) -> str | None:
        if self.root is None:
            return None
        try:
            entry = json.loads(_path(self.root, info).read_text("utf-8"))
            sha256, _ = entry.pop("sha256"), entry.pop("path")
        except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError):
            return None
        sound = isinstance(sha256, str) and re.fullmatch(r"[0-9a-f]{64}", sha256) is not None
        return sha256 if sound and entry == _state(info) else None

    def _put(self, file: IO[bytes], info: os.stat_result, sha256: str) -> None:
        """A failure to write is of no consequence."""
        if self.root is None:
            return
        path = _path(self.root, info)
        temporary = path.with_suffix(f".{os.getpid()}.{secrets.token_hex(4)}.tmp")
        with contextlib.suppress(OSError):
            try:
                entry = {**_state(info), "sha256": sha256, "path": os.path.abspath(file.name)}
                temporary.write_text(json.dumps(entry), "utf-8")
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
            for old in stale(self.root):  # what was just read has cost more
                old.unlink(missing_ok=True)


def stale(root: Path) -> list[Path]:
    """Files of an index that tell of files that are gone, or that dead processes have left."""
    try:
        return [path for path in root.iterdir() if _NAME.fullmatch(path.name) and _is_stale(path)]
    except OSError:  # there is none
        return []


def _is_stale(path: Path) -> bool:
    try:
        if path.suffix == ".tmp":
            return path.stat().st_mtime < time.time() - _TEMPORARY_S
        return _path(path.parent, os.stat(json.loads(path.read_text("utf-8"))["path"])) != path
    except PermissionError:  # it may be there
        return False
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return True


def _path(root: Path, info: os.stat_result) -> Path:
    return root / f"{info.st_dev:x}-{info.st_ino:x}.json"


def _state(info: os.stat_result) -> dict[str, int]:
    times = {"mtime_ns": info.st_mtime_ns, "ctime_ns": info.st_ctime_ns}
    return {"version": _VERSION, "size": info.st_size, **times}
