"""SHA-256 of files and of streams on their way to a file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import IO

_CHUNK = 1 << 20


def copy_sha256(
    source: IO[bytes], target: IO[bytes] | None, advance: Callable[[int], None] | None = None, limit: int | None = None
) -> tuple[str, int]:
    """Reads `source` to its end, writing it to `target` if given: (hexadecimal SHA-256, bytes).

    `advance` is told the bytes so far. Reading ends once more than `limit` bytes have come, so that a promise of a
    small file cannot fill the disk; the excess is not written.
    """
    digest, done = hashlib.sha256(), 0
    while chunk := source.read(_CHUNK):
        done += len(chunk)
        if limit is not None and done > limit:
            break
        digest.update(chunk)
        if target is not None:
            target.write(chunk)
        if advance is not None:
            advance(done)
    return digest.hexdigest(), done


def file_sha256(file: IO[bytes], advance: Callable[[int], None] | None = None) -> str:
    """Hexadecimal SHA-256 of an open file, from its start."""
    file.seek(0)
    return copy_sha256(file, None, advance)[0]
