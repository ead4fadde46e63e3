from __future__ import annotations

import os
from pathlib import Path

import pytest

from edge_llm.errors import IntegrityError, ModelFormatError
from edge_llm.model.verify import FileState, require_intact, verify
from tests.install.fakes import FOLDER_FILES, GGUF, FakeExporter


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.gguf").write_bytes(GGUF)
    folder = tmp_path / "mine"
    folder.mkdir()
    FakeExporter()(tmp_path / "a.gguf", folder, name="mine", source_sha256="0" * 64, progress=lambda *_: None)
    return folder


def test_a_sound_folder(folder: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    report = verify(folder, lambda *step: seen.append(step))
    assert report.ok
    assert report.complete
    assert report.summary() == "ok"
    assert report.files == dict.fromkeys(FOLDER_FILES, FileState.OK)
    assert report.extra == ()
    total = sum(map(len, FOLDER_FILES.values()))
    assert seen[-1] == ("checking", total, total)
    assert verify(folder, digests=False).summary() == "ok (sizes)"
    assert require_intact(folder) == folder


def test_every_flipped_byte_is_found(folder: Path) -> None:
    path = folder / "tokenizer.json"
    data = path.read_bytes()
    for i in range(len(data)):
        path.write_bytes(data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :])
        assert verify(folder).files["tokenizer.json"] is FileState.WRONG_DIGEST
    assert verify(folder, digests=False).ok, "sizes alone do not see it"


def missing(path: Path) -> None:
    path.unlink()


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def linked(path: Path) -> None:
    target = path.with_name("elsewhere")
    path.rename(target)
    path.symlink_to(target)


def replaced_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replaced_by_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("damage", "state"),
    [
        (missing, FileState.MISSING),
        (truncated, FileState.WRONG_SIZE),
        (linked, FileState.NOT_A_FILE),
        (replaced_by_a_folder, FileState.NOT_A_FILE),
        (replaced_by_a_pipe, FileState.NOT_A_FILE),
    ],
)
@pytest.mark.parametrize("digests", [True, False])
def test_damage_is_named(folder: Path, damage, state: FileState, digests: bool) -> None:
    damage(folder / "weights.bin")
    report = verify(folder, digests=digests)
    assert not report.ok
    assert report.files["weights.bin"] is state
    assert report.summary() == f"weights.bin: {state}"
    with pytest.raises(IntegrityError, match="damaged") as caught:
        require_intact(folder)
    assert str(caught.value.hint).endswith(str(folder))  # and no model of the same name that is sound


def test_other_files_are_named_and_do_no_harm(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")
    report = verify(folder)
    assert report.extra == ("notes.txt",)
    assert report.ok


@pytest.mark.parametrize("content", [None, "", "{}", "[1]", "\x00"])
def test_a_folder_without_a_sound_manifest(folder: Path, content: str | None) -> None:
    (folder / "manifest.json").unlink()
    if content is not None:
        (folder / "manifest.json").write_text(content)
    with pytest.raises(ModelFormatError):
        verify(folder)
