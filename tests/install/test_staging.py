from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from edge_llm.errors import StorageError
from edge_llm.install import staging

CHILD = """
import sys, time
from pathlib import Path
from edge_llm.install import staging
root = Path(sys.argv[1])
with staging.lock(root, "model"), staging.staging(root, "model") as folder:
    (folder / "half").write_bytes(b"x" * 1000)
    print("in", flush=True)
    time.sleep(60)
"""


def test_a_staging_folder_is_private_and_goes_away(tmp_path: Path) -> None:
    with staging.lock(tmp_path, "m"), staging.staging(tmp_path, "m") as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "a").write_text("1")
    assert list(tmp_path.iterdir()) == []


def test_it_goes_away_when_the_work_fails(tmp_path: Path) -> None:
    def fail() -> None:
        with staging.lock(tmp_path, "m"), staging.staging(tmp_path, "m") as folder:
            (folder / "a").write_text("1")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_publish_replaces_a_folder_whole(tmp_path: Path) -> None:
    for text in ("old", "new"):
        with staging.lock(tmp_path, "m"), staging.staging(tmp_path, "m") as folder:
            (folder / text).write_text(text)
            staging.publish(folder, tmp_path / "m")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]
    assert [path.name for path in (tmp_path / "m").iterdir()] == ["new"]


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_failed_publish_leaves_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    with staging.lock(tmp_path, "m"), staging.staging(tmp_path, "m") as folder:
        (folder / "old").write_text("old")
        staging.publish(folder, tmp_path / "m")
    failures = iter([False, True] if call == "rename" else [True])

    def fail(real):
        def faulty(*arguments):
            if next(failures, False):
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*arguments)

        return faulty

    with staging.lock(tmp_path, "m"), staging.staging(tmp_path, "m") as folder:
        (folder / "new").write_text("new")
        owner = os if call == "fsync" else Path
        monkeypatch.setattr(owner, call, fail(getattr(owner, call)))
        with pytest.raises(StorageError, match="full"):
            staging.publish(folder, tmp_path / "m")
    assert [path.name for path in (tmp_path / "m").iterdir()] == ["old"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]


def test_a_killed_process_leaves_no_lock_and_its_staging_is_swept(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"in\n"
        staging.sweep(tmp_path)
        assert len(list(tmp_path.glob(".model.*.partial"))) == 1, "a living process's staging folder was swept"
        child.kill()
    assert len(list(tmp_path.glob(".model.*.partial"))) == 1
    with staging.lock(tmp_path, "model.2"), staging.staging(tmp_path, "model.2"):
        assert len(list(tmp_path.glob(".model.*.partial"))) == 2, "another model's staging folder was swept"
    staging.sweep(tmp_path)
    assert list(tmp_path.glob("*")) == []
    assert list(tmp_path.glob(".*")) == []


def test_only_one_thread_or_process_is_in_the_lock(tmp_path: Path) -> None:
    inside, worst, waited = 0, 0, []

    def work() -> None:
        nonlocal inside, worst
        for _ in range(10):
            with staging.lock(tmp_path, "m", on_wait=lambda: waited.append(1), poll_s=0.001):
                inside += 1
                worst = max(worst, inside)
                time.sleep(0.001)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert worst == 1
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_known_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="MB are needed") as caught:
        staging.require_space(tmp_path, 1 << 60)
    assert caught.value.hint
    staging.require_space(tmp_path, 1)


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_folder_that_others_can_write_is_not_used(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(StorageError, match="other users"), staging.lock(shared, "m"):
        pass
    assert list(shared.iterdir()) == []


def test_a_link_in_place_of_the_folder_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(StorageError), staging.lock(tmp_path / "link", "m"):
        pass
    assert list((tmp_path / "real").iterdir()) == []
