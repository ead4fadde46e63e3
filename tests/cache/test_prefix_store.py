"""PrefixStore: files that several processes share, and everything that may happen to them."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from edge_llm.cache import block_folder, prefix_store
from edge_llm.cache.block_file import BlockName
from edge_llm.cache.block_folder import clear_folder, folder_stats, locked, verify_folder
from edge_llm.cache.blocks import child_key
from edge_llm.cache.prefix_store import PAUSE_S, QUEUED_BLOCKS
from edge_llm.errors import StorageError
from tests.cache.blocks_rig import BUDGET, FORM, ROOT, block, files, leftovers, open_store, same, stored

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


# --- faults of the system ---------------------------------------------------------------------------------------------

FAULTS = [28, 5, 24, 13, 4]  # ENOSPC, EIO, EMFILE, EACCES, EINTR
CALLS = ("open", "write", "readv", "read", "replace", "unlink", "utime", "fstat", "scandir", "listdir", "close")


class FaultyOS:
    """`os`, whose call number `at` of those that touch files fails; `close` closes first. `at` None: only counts."""

    def __init__(self, at: int | None, number: int | str) -> None:
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
            if self.number == "short":
                if name == "write":
                    return real(arguments[0], arguments[1][: max(1, len(arguments[1]) // 3)])
                return real(*arguments, **options)
            assert isinstance(self.number, int)
            raise OSError(self.number, os.strerror(self.number))

        return call


def use_the_store(folder: Path, monkeypatch: pytest.MonkeyPatch, faulty: FaultyOS) -> bool:
    """One life of a store; whether what was read is right."""
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(block_folder, "os", faulty)
    monkeypatch.setattr(prefix_store, "os", faulty)
    store = open_store(folder, budget=2 * FORM.size)
    for one in (WHOLE, REST, block(3)):
        store.write(one)
        store.close()
    store.touch([child_key(ROOT, block(3).ids)])
    store.close()
    right = all(
        found is None or same(found, one)
        for one, found in (
            (WHOLE, store.read(ROOT, WHOLE.ids)),
            (REST, store.read_rest(ROOT)),
            (block(3), store.read(ROOT, block(3).ids)),
        )
    )
    monkeypatch.undo()
    return right


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no /proc")
@pytest.mark.parametrize("fault", [*FAULTS, "short"])
def test_any_call_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: int | str) -> None:
    """F4 for the store: whichever call it is, nothing is raised or leaked, and what is there afterwards is whole."""
    counting = FaultyOS(None, fault)
    assert use_the_store(tmp_path / "all", monkeypatch, counting)
    assert counting.calls > 30
    opened = len(os.listdir("/proc/self/fd"))
    for at in range(1, counting.calls + 1):
        folder = tmp_path / f"p{at}"
        assert use_the_store(folder, monkeypatch, FaultyOS(at, fault))
        assert verify_folder(folder).damaged == 0
        stored(folder, block(4))  # the next one cleans up
        assert not leftovers(folder)
    assert len(os.listdir("/proc/self/fd")) == opened


def test_a_full_disk_is_left_alone_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B28: and it goes on without a restart."""
    now = [100.0]
    store = open_store(tmp_path / "p", clock=lambda: now[0])
    monkeypatch.setattr(block_folder, "os", FaultyOS(5, 28))
    store.write(WHOLE)
    store.close()
    monkeypatch.undo()
    assert (store.counts.failed, store.counts.dropped, store.has_room) == (1, 1, False)
    store.write(WHOLE)
    store.close()
    assert (files(tmp_path / "p"), leftovers(tmp_path / "p")) == ([], [])
    now[0] += PAUSE_S
    assert store.has_room
    store.write(WHOLE)
    store.close()
    assert same(store.read(ROOT, WHOLE.ids), WHOLE)


# --- several processes ------------------------------------------------------------------------------------------------

CHILD = """
import sys, time
from pathlib import Path
from edge_llm.cache.block_folder import folder_stats
from tests.cache.blocks_rig import FORM, ROOT, block, open_store, same
folder, first, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
store, until, slowest, seed = open_store(folder, budget=8 * FORM.size), time.monotonic() + seconds, 0.0, first
print("ready", flush=True)
while time.monotonic() < until:
    seed += 1
    one = block(seed % 24, tokens=64 if seed % 5 else 9)
    begun = time.monotonic()
    if store.has_room:
        store.write(one)
    found = store.read(ROOT, one.ids) if one.whole else store.read_rest(ROOT)
    slowest = max(slowest, time.monotonic() - begun)
    assert found is None or not one.whole or same(found, one)
    assert folder_stats(folder).size <= 9 * FORM.size
    time.sleep(0.001)
store.close()
assert slowest < 1.0, slowest
print(store.counts.damaged, store.counts.written > 0)
"""


def test_four_processes_share_a_folder_and_one_is_killed(tmp_path: Path) -> None:
    """F1, F6, B27 at commit size: writers, readers and evictions at once, kill -9 in the middle; no read is wrong."""
    folder = tmp_path / "p"
    children = [
        subprocess.Popen([sys.executable, "-c", CHILD, str(folder), str(i * 6), "2"], stdout=-1, stderr=-1, text=True)
        for i in range(4)
    ]
    try:
        assert all(child.stdout is not None and child.stdout.readline() == "ready\n" for child in children)
        time.sleep(0.5)
        children[0].kill()
        for child in children[1:]:
            out, err = child.communicate(timeout=60)
            assert (child.returncode, out) == (0, "0 True\n"), err
    finally:
        for child in children:
            child.kill()
            child.communicate()
    stored(folder, block(77), budget=BUDGET)
    assert not leftovers(folder)
    assert verify_folder(folder).damaged == 0
