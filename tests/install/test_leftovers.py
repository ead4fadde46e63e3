"""What nobody needs any more is found and deleted; what somebody uses stays."""

from __future__ import annotations

import os
import time
from pathlib import Path

from edge_llm import paths
from edge_llm.install import leftovers
from edge_llm.install.catalog import Recipe
from edge_llm.install.store import ModelStore
from tests.install.fakes import files_under

HOUR_AGO = time.time() - 7200


def put(path: Path, *, when: float = HOUR_AGO) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * 1000)
    for entry in (path, path.parent):
        os.utime(entry, (when, when))


def test_looking_makes_nothing(own_home: Path) -> None:
    assert leftovers.sizes() == dict.fromkeys((*leftovers.KINDS, "leftovers"), 0)
    assert leftovers.clear_leftovers() == 0
    assert not own_home.exists()


def test_what_dead_processes_left_goes(recipe: Recipe, own_home: Path) -> None:
    cache = paths.cache_dir()
    kernels = cache / "kernels" / ("0" * 32)
    for path in (
        kernels / "tmp1234",
        cache / "static" / ".partial-ab" / "weights.bin",
        cache / "digests" / "1-2.77.ab.tmp",
        cache / "digests" / "1-2.json",  # of no file
        cache / "downloads" / ".tiny.77.ab.partial" / "wheel",
        cache / "downloads" / ".tiny.joined",
    ):
        put(path)
    kept = (
        kernels / "kernels.bin",
        cache / "kernels" / "of somebody else" / "file",
        cache / "static" / "form" / "weights.bin",
        cache / "downloads" / ".other.77.ab.partial" / "wheel",
    )
    for path in kept:
        put(path)
    fresh = (kernels / "tmp5678", cache / "digests" / "1-2.78.ab.tmp")
    for path in fresh:
        put(path, when=time.time())
    sizes = leftovers.sizes()
    assert (sizes["kernels"], sizes["leftovers"]) == (4000, 7000)
    assert leftovers.clear_leftovers() == 6000
    assert files_under(cache) == {str(path.relative_to(cache)) for path in (*kept, *fresh)}


def test_what_a_running_import_has_fetched_stays(recipe: Recipe, own_home: Path) -> None:
    joined = paths.cache_dir() / "downloads" / ".tiny.joined"
    put(joined)
    with ModelStore().lock(recipe.name):
        assert leftovers.clear_leftovers() == 0
        assert joined.exists()
    assert leftovers.clear_leftovers() == 1000
    assert not joined.exists()
