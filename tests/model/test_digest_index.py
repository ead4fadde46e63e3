from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest

from edge_llm.model import digest_index
from edge_llm.model.digest_index import DigestIndex

OLD, NEW = b"a" * 3000, b"b" * 3000


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The index's folder in a home of its own; what was written just now counts as settled."""
    monkeypatch.setenv("EDGE_LLM_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(digest_index, "_SETTLED_NS", -1)
    return tmp_path / "home" / "cache" / "digests"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights.bin"
    path.write_bytes(OLD)
    return path


def rewrite(path: Path, data: bytes) -> None:
    """In another tick of the file system's clock than whatever was written before: that is what the index waits for."""
    scratch, before = path.with_name("scratch"), path.stat().st_ctime_ns
    while True:
        scratch.touch()
        if scratch.stat().st_ctime_ns > before:
            break
    path.write_bytes(data)


def found(path: Path) -> tuple[bytes, bool]:
    """(which content the index says a file has, whether it was read for that)."""
    told: list[int] = []
    with path.open("rb") as opened:
        sha256 = DigestIndex().sha256(opened, told.append)
    content = {hashlib.sha256(data).hexdigest(): data for data in (OLD, NEW)}[sha256]
    return content, bool(told)


def test_a_file_is_read_once(cache: Path, file: Path) -> None:
    assert [found(file) for _ in range(3)] == [(OLD, True), (OLD, False), (OLD, False)]
    assert cache.stat().st_mode & 0o777 == 0o700
    moved = file.rename(file.with_name("moved"))
    os.utime(moved, ns=(0, moved.stat().st_mtime_ns))
    assert found(moved)[0] == OLD


def test_a_file_that_changed_is_read_again(cache: Path, file: Path) -> None:
    found(file)
    rewrite(file, NEW)
    assert found(file) == (NEW, True)
    rewrite(file, OLD)
    assert found(file) == (OLD, True)


def test_a_time_that_was_set_back_hides_nothing(cache: Path, file: Path) -> None:
    found(file)
    before = file.stat()
    rewrite(file, NEW)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert found(file) == (NEW, True)


def test_a_copy_is_another_file(cache: Path, file: Path) -> None:
    found(file)
    copy = file.with_name("copy")
    copy.write_bytes(NEW)
    os.utime(copy, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    assert found(copy) == (NEW, True)
    assert found(file) == (OLD, False)
    os.replace(copy, file)
    assert found(file)[0] == NEW


def test_a_file_that_has_just_been_written_is_not_remembered(
    cache: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could change again within the same tick of the file system's clock."""
    monkeypatch.setattr(digest_index, "_SETTLED_NS", 1 << 62)
    assert [found(file) for _ in range(2)] == [(OLD, True)] * 2
    assert not list(cache.iterdir())


def test_what_changes_while_it_is_read_is_read_again(cache: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def changing(opened, advance) -> str:
        sha256 = hashlib.sha256(opened.read()).hexdigest()
        rewrite(file, NEW)
        return sha256

    with monkeypatch.context() as patch:
        patch.setattr(digest_index, "file_sha256", changing)
        assert found(file)[0] == OLD
    assert found(file) == (NEW, True)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"sha256": 5}', '{"sha256": "zz"}', "[" * 5000, "\xff"], ids=range(8)
)
def test_a_damaged_entry_is_a_miss(cache: Path, file: Path, content: str) -> None:
    found(file)
    (entry,) = cache.iterdir()
    sound = entry.read_bytes()
    entry.write_text(content, "latin-1")
    assert found(file) == (OLD, True)
    assert entry.read_bytes() == sound


def test_an_index_that_cannot_be_written_does_no_harm(cache: Path, file: Path) -> None:
    cache.parent.mkdir(parents=True, mode=0o700)
    cache.write_text("in the way")
    assert [found(file) for _ in range(2)] == [(OLD, True)] * 2


def test_what_is_known_of_files_that_are_gone_goes(cache: Path, tmp_path: Path) -> None:
    """When something is written; nothing looks for it at a start that writes nothing."""
    files = [tmp_path / name for name in "abcd"]
    for path in files:
        path.write_bytes(OLD)
        found(path)
    assert len(list(cache.iterdir())) == 4
    files[0].unlink()
    files[1].rename(tmp_path / "moved")
    files[2].unlink()
    files[2].mkdir()
    for name, age in (("1-2.5.ab.tmp", 1e5), ("1-2.6.ab.tmp", 0)):
        (cache / name).write_text("")
        os.utime(cache / name, (time.time() - age, time.time() - age))
    assert found(files[3]) == (OLD, False)
    assert len(list(cache.iterdir())) == 6
    (tmp_path / "new").write_bytes(NEW)
    found(tmp_path / "new")
    assert len(list(cache.iterdir())) == 3
    assert (cache / "1-2.6.ab.tmp").exists()
    assert [found(path) for path in (files[3], tmp_path / "new")] == [(OLD, False), (NEW, False)]


@pytest.mark.parametrize("mode", [0o777, 0o720])
def test_an_index_that_others_can_write_is_not_believed(cache: Path, file: Path, mode: int) -> None:
    found(file)
    cache.chmod(mode)
    assert found(file) == (OLD, True)
