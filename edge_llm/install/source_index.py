"""SourceIndex: digests of GGUF files that were read before: `run -m FILE.gguf` does not hash gigabytes at each start.

It lives in the cache folder and is only an aid: lost, unreadable or unwritable, the file is hashed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
from pathlib import Path

from edge_llm import paths
from edge_llm.errors import StorageError

_VERSION = 1


class SourceIndex:
    """sha256 of files by path; an entry holds as long as size, modification time and inode do."""

    def __init__(self) -> None:
        self.root = paths.cache_dir() / "sources"

    def get(self, source: Path, info: os.stat_result) -> str | None:
        """The digest of `source`, whose status is `info`, if it was put before and is unchanged."""
        try:
            entry = json.loads(self._path(source).read_text("utf-8"))
            sha256 = entry.pop("sha256")
        except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError):
            return None
        sound = isinstance(sha256, str) and re.fullmatch(r"[0-9a-f]{64}", sha256) is not None
        return sha256 if sound and entry == _state(info) else None

    def put(self, source: Path, info: os.stat_result, sha256: str) -> None:
        """Remembers a digest; a failure to write is of no consequence."""
        path = self._path(source)
        with contextlib.suppress(OSError, StorageError):
            paths.private_dir(paths.cache_dir())
            paths.private_dir(self.root)
            temporary = path.with_suffix(f".{os.getpid()}.{secrets.token_hex(4)}.tmp")
            try:
                temporary.write_text(json.dumps({**_state(info), "sha256": sha256}), "utf-8")
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)

    def _path(self, source: Path) -> Path:
        key = os.fsencode(source.resolve())
        return self.root / f"{hashlib.sha256(key).hexdigest()[:32]}.json"


def _state(info: os.stat_result) -> dict[str, int]:
    return {"version": _VERSION, "size": info.st_size, "mtime_ns": info.st_mtime_ns, "inode": info.st_ino}
