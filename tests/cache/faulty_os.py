"""FaultyOS: the system's calls, of which one fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from edge_llm.cache import block_folder, prefix_store

CALLS = ("open", "write", "readv", "read", "replace", "unlink", "utime", "fstat", "scandir", "listdir", "close")
SHORT = 0
"""the number of a fault that is none: a write that writes less"""


class FaultyOS:
    """`os`, whose call number `at` of those that touch files fails; `close` closes first. `at` None: only counts."""

    def __init__(self, at: int | None, number: int) -> None:
        self.at, self.number, self.calls = at, number, 0

    def __getattr__(self, name: str) -> object:
        real = getattr(os, name)
        if name not in CALLS:
            return real

        def call(*arguments: object, **options: object) -> object:
            self.calls += 1
            if self.calls != self.at:
                return real(*arguments, **options)
            if name == "close":
                real(*arguments)
            if self.number == SHORT:
                if name == "write":
                    return real(arguments[0], arguments[1][: max(1, len(arguments[1]) // 3)])
                return real(*arguments, **options)
            raise OSError(self.number, os.strerror(self.number))

        return call


@contextmanager
def faulty(at: int | None, number: int) -> Iterator[FaultyOS]:
    """While it lasts, files of the prefix cache are used through a FaultyOS."""
    system = FaultyOS(at, number)
    block_folder.os = prefix_store.os = system
    try:
        yield system
    finally:
        block_folder.os = prefix_store.os = os
