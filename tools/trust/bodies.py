"""F10 and F11: bodies of requests with something wrong in them, asked of the whole application over a tiny model.

    python -m tools.trust.bodies F10|F11 [--size commit|nightly] [--seed N]

F10: every field of every path's body with values at and beyond its bounds, and of other types. F11: chats with parts changed,
taken away, doubled, and bytes changed. Each is answered, or refused with a 4xx in its protocol's own shape, in one line.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from edge_llm.export.exporter import export_gguf
from tests.server.test_boundaries import BODIES, Direct, try_bodies, try_fields
from tools.tiny_model import write_tiny_gguf
from tools.trust.figure import Figure


@contextlib.contextmanager
def _application() -> Iterator[Direct]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "tiny")
        folder.mkdir()
        export_gguf(write_tiny_gguf(Path(name, "tiny.gguf")), folder, name="tiny", source_sha256="0" * 64)
        direct = Direct(folder)
        try:
            asyncio.run(direct.engines.start())  # kernels may have to be compiled, for which no request waits
            yield direct
        finally:
            direct.engines.close()


def fields(count: int, _seed: int) -> int:
    """All of them, as often as makes `count`."""
    tried = 0
    with _application() as direct:
        while tried < count:
            for path in BODIES:
                tried += asyncio.run(try_fields(direct, path))
    return tried


def bodies(count: int, seed: int) -> int:
    """Runs `count` bodies."""
    with _application() as direct:
        asyncio.run(try_bodies(direct, count, seed))
    return count


FIGURES = {
    "F10": Figure(
        "F10",
        "fields of all requests at and beyond their bounds",
        "python -m tools.trust.bodies F10",
        {"commit": 1, "nightly": 100_000},
        fields,
    ),
    "F11": Figure(
        "F11",
        "chats with something wrong in their bodies",
        "python -m tools.trust.bodies F11",
        {"commit": 2000, "nightly": 200_000},
        bodies,
    ),
}

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in FIGURES:
        sys.exit(__doc__)
    sys.exit(FIGURES[sys.argv[1]].main(sys.argv[2:]))
