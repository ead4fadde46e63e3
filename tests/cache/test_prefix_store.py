"""PrefixStore: files that several processes share, and everything that may happen to them."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from edge_llm.cache.block_file import BlockName
from edge_llm.cache.block_folder import clear_folder, folder_stats, locked, verify_folder
from edge_llm.cache.blocks import child_key
from edge_llm.cache.prefix_store import PAUSE_S, QUEUED_BLOCKS
from edge_llm.errors import StorageError
from tests.cache.blocks_rig import FORM, ROOT, block, files, leftovers, open_store, same, stored
from tests.cache.faulty_os import faulty

WHOLE, REST = block(1), block(2, tokens=10)


def test_blocks_outlive_the_store(tmp_path: Path) -> None:
    stored(tmp_path / "p", WHOLE, REST)
    store = open_store(tmp_path / "p")
    assert same(store.read(ROOT, WHOLE.ids), WHOLE)
    assert same(store.read_rest(ROOT), REST)
    assert store.read(ROOT, block(3).ids) is None
    assert store.read_rest(child_key(ROOT, WHOLE.ids)) is None
    assert (store.counts.damaged, store.counts.failed) == (0, 0)


def test_only_the_owner_can_read_them(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        stored(tmp_path / "p", WHOLE)
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "p").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "p").iterdir()} == {0o600}


@pytest.mark.parametrize("kind", ["open", "link", "file"])
def test_a_folder_that_others_could_change_is_refused(tmp_path: Path, kind: str) -> None:
    if kind == "open":
        (tmp_path / "p").mkdir()
        (tmp_path / "p").chmod(0o777)
    elif kind == "link":
        (tmp_path / "other").mkdir()
        (tmp_path / "p").symlink_to(tmp_path / "other")
    else:
        (tmp_path / "p").touch()
    with pytest.raises(StorageError):
        open_store(tmp_path / "p")


def test_a_longer_end_is_not_replaced_by_a_shorter_one(tmp_path: Path) -> None:
    """B24."""
    long, other = block(1, tokens=40), block(2, tokens=5)
    short = type(long)(ROOT, long.ids[:20], long.arrays)
    store = stored(tmp_path / "p", long, short)
    assert same(store.read_rest(ROOT), long)
    stored(tmp_path / "p", short, long)
    assert same(store.read_rest(ROOT), long)
    stored(tmp_path / "p", other)
    assert same(store.read_rest(ROOT), other)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: path.write_bytes(path.read_bytes()[: FORM.size // 2]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "flipped": lambda path: path.write_bytes(path.read_bytes()[:-300] + b"\xff" * 8 + path.read_bytes()[-292:]),
    "another's": lambda path: path.write_bytes(FORM.encode(block(9))),
    "zeros": lambda path: path.write_bytes(bytes(FORM.size)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_a_miss_and_is_deleted(tmp_path: Path, damage: str) -> None:
    """B25: and the block is written again."""
    store = stored(tmp_path / "p", WHOLE)
    (path,) = files(tmp_path / "p")
    DAMAGES[damage](path)
    assert store.read(ROOT, WHOLE.ids) is None
    assert store.counts.damaged == 1
    assert not files(tmp_path / "p")
    store.write(WHOLE)
    store.close()
    assert same(store.read(ROOT, WHOLE.ids), WHOLE)


@pytest.mark.parametrize("damage", ["flipped", "half", "another's"])
def test_verify_finds_what_is_damaged(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "p"
    stored(folder, WHOLE, REST, block(3))
    assert (verify_folder(folder).files, verify_folder(folder).damaged) == (3, 0)
    DAMAGES[damage](folder / str(BlockName.of(WHOLE)))
    assert verify_folder(folder).damaged == 1
    assert verify_folder(folder).files == 2


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names")
@pytest.mark.parametrize("thing", ["fifo", "folder", "link"])
def test_what_is_no_file_does_not_hang_or_mislead(tmp_path: Path, thing: str) -> None:
    store = stored(tmp_path / "p", WHOLE)
    (path,) = files(tmp_path / "p")
    kept = path.rename(tmp_path / "kept")
    {"fifo": os.mkfifo, "folder": os.mkdir, "link": lambda name: os.symlink(kept, name)}[thing](path)
    assert store.read(ROOT, WHOLE.ids) is None


def test_the_least_recently_used_goes_first_and_parents_last(tmp_path: Path) -> None:
    folder, budget = tmp_path / "p", 4 * FORM.size
    chain = [block(1)]
    for seed in (2, 3):
        chain.append(block(seed, parent=child_key(chain[-1].parent, chain[-1].ids)))
    store = stored(folder, *chain, budget=budget)
    keys = [child_key(one.parent, one.ids) for one in chain]
    store.touch(keys)
    store.close()
    found = []
    for seed in (11, 12, 13):
        stored(folder, block(seed), budget=budget)
        assert folder_stats(folder).size <= budget
        found.append([store.read(one.parent, one.ids) is not None for one in chain])
    assert found == [[True, True, True], [True, True, False], [True, False, False]]


def test_a_block_that_is_larger_than_the_budget_is_not_kept(tmp_path: Path) -> None:
    store = stored(tmp_path / "p", WHOLE, budget=FORM.size - 1)
    assert not files(tmp_path / "p")
    assert (store.counts.written, store.counts.dropped) == (0, 1)


def test_what_comes_too_fast_is_dropped(tmp_path: Path) -> None:
    store = open_store(tmp_path / "p")
    with locked(tmp_path / "p"):  # the writer waits
        store.write(block(100))
        time.sleep(0.05)
        for seed in range(QUEUED_BLOCKS + 5):
            store.write(block(seed))
        assert not store.has_room
    store.close()
    assert store.counts.dropped >= 4
    assert store.counts.written + store.counts.dropped == QUEUED_BLOCKS + 6
    assert store.has_room


def test_temporary_files_of_others_that_died_are_swept(tmp_path: Path) -> None:
    folder = tmp_path / "p"
    stored(folder, WHOLE)
    (folder / ".tmp-1-1").write_bytes(b"half a blo")
    stored(folder, block(3))
    assert not leftovers(folder)
    assert len(files(folder)) == 2


def test_clear(tmp_path: Path) -> None:
    folder = tmp_path / "p"
    assert (clear_folder(folder).files, folder_stats(folder).files) == (0, 0)
    stored(folder, WHOLE, REST)
    gone = clear_folder(folder)
    assert (gone.files, gone.size) == (2, 2 * FORM.size)
    assert not files(folder)
    stored(folder, WHOLE)
    assert len(files(folder)) == 1


def test_a_full_disk_is_left_alone_for_a_while(tmp_path: Path) -> None:
    """B28: and it goes on without a restart."""
    now = [100.0]
    store = open_store(tmp_path / "p", clock=lambda: now[0])
    with faulty(5, errno.ENOSPC):
        store.write(WHOLE)
        store.close()
    assert (store.counts.failed, store.counts.dropped, store.has_room) == (1, 1, False)
    store.write(WHOLE)
    store.close()
    assert (files(tmp_path / "p"), leftovers(tmp_path / "p")) == ([], [])
    now[0] += PAUSE_S
    assert store.has_room
    store.write(WHOLE)
    store.close()
    assert same(store.read(ROOT, WHOLE.ids), WHOLE)
