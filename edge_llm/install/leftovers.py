"""What the cache folder holds beside conversations, and what of it nobody needs: left by processes that died, or about files
that are gone."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from edge_llm import paths
from edge_llm.errors import StorageError
from edge_llm.export import static_export
from edge_llm.install import staging
from edge_llm.install.pull import discard_unfinished
from edge_llm.install.store import ModelStore
from edge_llm.kernels import warmup
from edge_llm.model import digest_index

KINDS = ("kernels", "static", "providers", "downloads", "digests")
"""folders in the cache folder, all of which can be made again"""


def sizes() -> dict[str, int]:
    """Bytes of each kind, and as `leftovers` of what `clear_leftovers` would delete of them. Creates nothing."""
    ours = _ours()
    unfinished = ours.get("downloads")
    left = _bytes([*_stale(ours), *([unfinished] if unfinished else [])])
    return {kind: _bytes([ours[kind]] if kind in ours else []) for kind in KINDS} | {"leftovers": left}


def clear_leftovers() -> int:
    """Deletes them; what running processes use stays. Gives the bytes that are free again."""
    ours = _ours()
    before = _bytes(ours.values())
    for path in _stale(ours):
        staging.discard(path)
    if "downloads" in ours:
        discard_unfinished(ModelStore().root)
    return max(0, before - _bytes(ours.values()))


def _ours() -> dict[str, Path]:
    """The folders of all kinds that nobody else can change: where a link leads, files of others may lie."""
    found, cache = {}, paths.cache_dir()
    for kind in KINDS:
        with contextlib.suppress(StorageError):
            paths.require_private(cache)
            paths.require_private(cache / kind)
            found[kind] = cache / kind
    return found


def _stale(ours: Mapping[str, Path]) -> list[Path]:
    finders = {"digests": digest_index.stale, "kernels": warmup.stale, "static": static_export.stale}
    return [path for kind, find in finders.items() if kind in ours for path in find(ours[kind])]


def _bytes(places: Iterable[Path]) -> int:
    """Of files, and of all files in folders, as far as they can be seen."""
    size = 0
    for place in places:
        inside = [Path(folder, name) for folder, _, names in os.walk(place) for name in names]
        for path in (place, *inside):
            with contextlib.suppress(OSError):
                size += path.lstat().st_size if not path.is_dir() else 0
    return size
