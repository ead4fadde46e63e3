"""What the cache folder holds beside conversations, and what of it nobody needs: left by processes that died, or about files
that are gone."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from edge_llm import paths
from edge_llm.export import static_export
from edge_llm.install import staging
from edge_llm.install.pull import discard_unfinished, downloads_dir
from edge_llm.install.store import ModelStore
from edge_llm.kernels import warmup
from edge_llm.model import digest_index

KINDS = ("kernels", "static", "providers", "downloads", "digests")
"""folders in the cache folder, all of which can be made again"""


def sizes() -> dict[str, int]:
    """Bytes of each kind, and as `leftovers` of what `clear_leftovers` would delete of them. Creates nothing."""
    cache = paths.cache_dir()
    return {kind: _bytes([cache / kind]) for kind in KINDS} | {"leftovers": _bytes([*_stale(), downloads_dir()])}


def clear_leftovers() -> int:
    """Deletes them; what running processes use stays. Gives the bytes that are free again."""
    places = [paths.cache_dir() / kind for kind in KINDS]
    before = _bytes(places)
    for path in _stale():
        staging.discard(path)
    discard_unfinished(ModelStore().root)
    return max(0, before - _bytes(places))


def _stale() -> list[Path]:
    cache = paths.cache_dir()
    return [
        *digest_index.stale(cache / "digests"),
        *warmup.stale(cache / "kernels"),
        *static_export.stale(static_export.static_root()),
    ]


def _bytes(places: Iterable[Path]) -> int:
    """Of files, and of all files in folders, as far as they can be seen."""
    size = 0
    for place in places:
        inside = [Path(folder, name) for folder, _, names in os.walk(place) for name in names]
        for path in (place, *inside):
            with contextlib.suppress(OSError):
                size += path.lstat().st_size if not path.is_dir() else 0
    return size
