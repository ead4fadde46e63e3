from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from edge_llm.errors import InputError, ModelNotFoundError, StorageError
from edge_llm.install import importer
from edge_llm.install.store import ModelStore, is_model_name
from tests.install.fakes import FOLDER_FILES, GGUF, FakeExporter, files_under, sha256


@pytest.fixture
def installed(exporter: FakeExporter, tmp_path: Path) -> str:
    (tmp_path / "a.gguf").write_bytes(GGUF)
    return importer.import_file(tmp_path / "a.gguf", name="mine").name


def test_reading_creates_nothing(own_home: Path) -> None:
    store = ModelStore()
    assert store.names() == []
    assert not store.has("x")
    assert store.find_source("0" * 64) is None
    assert not own_home.exists()


def test_an_installed_model(installed: str) -> None:
    store = ModelStore()
    assert store.names() == [installed]
    assert stat.S_IMODE(store.root.stat().st_mode) == 0o700
    assert stat.S_IMODE(store.path(installed).stat().st_mode) == 0o700
    assert (
        store.size(installed)
        == sum(map(len, FOLDER_FILES.values())) + (store.path(installed) / "manifest.json").stat().st_size
    )
    assert store.find_source(sha256(GGUF)) == installed
    assert store.find_source("0" * 64) is None


def test_remove_gives_the_bytes_and_leaves_nothing(installed: str) -> None:
    store = ModelStore()
    size = store.size(installed)
    assert store.remove(installed) == size
    assert store.names() == []
    assert files_under(store.root.parent) == {"models"}
    with pytest.raises(ModelNotFoundError):
        store.remove(installed)


def test_a_folder_without_manifest_is_no_model_but_can_be_removed(own_home: Path) -> None:
    store = ModelStore()
    folder = store.path("half")
    folder.mkdir(parents=True)
    folder.parent.chmod(0o700)
    (folder / "weights.bin").write_bytes(b"123")
    assert store.names() == []
    assert store.remove("half") == 3
    assert not folder.exists()


def test_a_link_is_not_removed_with_what_it_points_to(installed: str, tmp_path: Path) -> None:
    store = ModelStore()
    target = tmp_path / "precious"
    target.mkdir()
    (target / "file").write_text("x")
    store.path("link").symlink_to(target)
    with pytest.raises(ModelNotFoundError):
        store.remove("link")
    assert (target / "file").read_text() == "x"


def test_a_model_with_an_unreadable_manifest_does_not_hide_others(installed: str) -> None:
    store = ModelStore()
    store.path("bad").mkdir()
    (store.path("bad") / "manifest.json").write_text("{")
    assert store.find_source(sha256(GGUF)) == installed


def test_a_model_that_cannot_be_looked_into_is_there(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one without rights is for anybody but root; it hides no other, and another name is free."""
    real, store = Path.lstat, ModelStore()

    def denied(path: Path) -> os.stat_result:
        if path.parent.name == "bad":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    store.path("bad").mkdir()
    monkeypatch.setattr(Path, "lstat", denied)
    assert store.names() == ["bad", installed]
    assert not store.has("free")
    assert store.size("bad") == 0
    assert store.find_source(sha256(GGUF)) == installed


def test_models_that_cannot_be_read_are_not_said_to_be_none(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "lstat", denied)
    monkeypatch.setattr(Path, "iterdir", denied)
    for look in (ModelStore().names, lambda: ModelStore().has(installed)):
        with pytest.raises(StorageError, match="cannot be read: Permission denied") as caught:
            look()
        assert caught.value.hint


def test_a_file_in_the_place_of_the_store_is_named(own_home: Path) -> None:
    own_home.write_text("")
    assert not ModelStore().has("x")
    with pytest.raises(StorageError, match=f"{own_home} is not a folder"):
        ModelStore().names()


def test_a_model_without_rights_can_be_removed(installed: str) -> None:
    store = ModelStore()
    size = store.size(installed)
    store.path(installed).chmod(0)
    assert store.remove(installed) == size
    assert files_under(store.root.parent) == {"models"}


def test_a_file_system_without_rights_or_links_is_enough(
    exporter: FakeExporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    for owner, name in ((os, "chmod"), (Path, "chmod"), (os, "link"), (os, "symlink")):
        monkeypatch.setattr(owner, name, refused)
    (tmp_path / "a.gguf").write_bytes(GGUF)
    folder = importer.import_file(tmp_path / "a.gguf", name="mine")
    (folder / "weights.bin").write_bytes(b"damaged")
    importer.import_file(tmp_path / "a.gguf", name="mine")
    assert importer.resolve("mine") == folder
    assert ModelStore().remove("mine") > 5000
    assert files_under(ModelStore().root.parent) == {"models"}


@pytest.mark.parametrize(
    "name", ["..", ".", "", "a/b", "a\\b", ".x", "-x", "nul", "NUL.txt", "a.", "a\n", "é", "x" * 101]
)
def test_names_that_are_refused(name: str, own_home: Path) -> None:
    assert not is_model_name(name)
    assert not ModelStore().has(name)
    for call in (ModelStore().path, ModelStore().remove, ModelStore().size):
        with pytest.raises(InputError):
            call(name)
    assert not own_home.exists()


@pytest.mark.parametrize("name", ["a", "smollm2-135m-instruct", "My.Model_1", "0", "console", "x" * 100])
def test_names_that_are_taken(name: str) -> None:
    assert is_model_name(name)
