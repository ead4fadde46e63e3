"""What nobody needs any more is found and deleted; what somebody uses stays."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from edge_llm import paths
from edge_llm.cache.block_folder import clear_folder, prefix_folder, verify_folder
from edge_llm.errors import StorageError
from edge_llm.install import leftovers
from edge_llm.install.catalog import Recipe
from edge_llm.install.store import ModelStore
from tests.install.fakes import files_under

HOUR_AGO = time.time() - 7200


def put(path: Path, *, when: float = HOUR_AGO) -> None:
    paths.private_cache(path.relative_to(paths.cache_dir()).parts[0])
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


def filled(folder: Path) -> set[str]:
    """A folder with files of somebody's, called as ours are; gives what is in it."""
    for name in ("letter.txt", "tmp1234", "1-2.json", "0/tmp1234", ".partial-ab/book", ".tiny.joined", "a.safetensors"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")
        os.utime(folder / name, (HOUR_AGO, HOUR_AGO))
        os.utime((folder / name).parent, (HOUR_AGO, HOUR_AGO))
    return files_under(folder)


@pytest.mark.parametrize("kind", [*leftovers.KINDS, "prefixes", f"kernels/{'0' * 32}", ""])
def test_nothing_goes_where_a_link_leads(recipe: Recipe, own_home: Path, tmp_path: Path, kind: str) -> None:
    before = filled(tmp_path / "documents")
    link = paths.cache_dir() / kind
    link.parent.mkdir(parents=True, mode=0o700)
    link.symlink_to(tmp_path / "documents")
    if kind == "":
        for folder in (*leftovers.KINDS, "prefixes"):
            (tmp_path / "documents" / folder).symlink_to("0")
    leftovers.sizes()
    leftovers.clear_leftovers()
    for clear in (clear_folder, verify_folder):
        if prefix_folder().exists():
            with pytest.raises(StorageError):
                clear(prefix_folder())
    assert files_under(tmp_path / "documents") >= before


def test_nothing_goes_from_a_folder_that_others_can_change(own_home: Path) -> None:
    path = paths.cache_dir() / "kernels" / ("0" * 32) / "tmp1234"
    put(path)
    paths.cache_dir().chmod(0o777)
    assert leftovers.clear_leftovers() == 0
    assert path.exists()


def test_files_of_another_form_among_the_digests_stay(own_home: Path) -> None:
    foreign = paths.cache_dir() / "digests" / "letter.json"
    put(foreign)
    assert leftovers.clear_leftovers() == 0
    assert foreign.exists()
