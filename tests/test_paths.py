from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from edge_llm import paths
from edge_llm.errors import StorageError

FOLDERS = (paths.config_dir, paths.data_dir, paths.cache_dir)


def test_a_home_of_ones_own_holds_all_three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGE_LLM_HOME", str(tmp_path / "home"))
    assert [folder() for folder in FOLDERS] == [tmp_path / "home" / kind for kind in ("config", "data", "cache")]
    assert not (tmp_path / "home").exists(), "asking creates nothing"


def test_a_relative_home_does_not_move_with_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGE_LLM_HOME", "home")
    monkeypatch.chdir(tmp_path)
    assert paths.data_dir() == tmp_path / "home" / "data"


@pytest.mark.parametrize("default", ["~/.local/share/edge-llm", None])
def test_a_user_without_a_home_gets_a_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, default: str | None
) -> None:
    def lookup(*_arguments: object) -> str:
        if default is None:
            raise RuntimeError("could not determine the home directory")
        return default

    monkeypatch.delenv("EDGE_LLM_HOME")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for kind in ("config", "data", "cache"):
        monkeypatch.setattr(f"platformdirs.user_{kind}_dir", lookup)
    assert all(folder().is_relative_to(tmp_path) for folder in FOLDERS)
    assert len({folder() for folder in FOLDERS}) == 3
    (tmp_path / "mine").mkdir()
    (tmp_path / f"edge-llm-{os.geteuid()}").symlink_to(tmp_path / "mine")
    for folder in FOLDERS:
        with pytest.raises(StorageError):  # somebody else's config and models
            folder()


def test_sockets_have_short_paths_of_their_own_in_each_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    for home in ("/a", "/b", f"/{'long/' * 30}a", f"/{'long/' * 30}b"):
        monkeypatch.setenv("EDGE_LLM_HOME", home)
        for path in (paths.server_socket(), paths.web_socket(5), paths.web_socket(56)):
            assert len(bytes(path)) <= 100
            found.add(path)
    assert len(found) == 12


def test_where_nothing_can_be_written_sockets_lie_among_the_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EDGE_LLM_HOME", str(tmp_path / "file"))
    assert paths.server_socket() == paths.server_socket()
    assert paths.server_socket().is_relative_to(tempfile.gettempdir())
    monkeypatch.setenv("EDGE_LLM_HOME", "/h")
    monkeypatch.setattr(paths, "obstacle", lambda _: None)
    assert paths.server_socket() == Path("/h/run/server.sock")


def test_an_obstacle_is_named_and_nothing_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    assert paths.obstacle(tmp_path) is None
    assert paths.obstacle(tmp_path / "a" / "b") is None
    assert paths.obstacle(tmp_path / "file" / "a" / "b") == f"{tmp_path / 'file'} is not a folder"
    monkeypatch.setattr(os, "access", lambda path, _: path != tmp_path)
    assert paths.obstacle(tmp_path / "a" / "b") == f"{tmp_path} cannot be written"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_is_in_the_way_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=f"{tmp_path / 'file'} is not a folder"):
        paths.private_dir(tmp_path / "file" / "a" / "b")


def test_a_private_folder_is_made_and_kept(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    assert paths.private_dir(folder) == paths.private_dir(folder) == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.skipif(os.name != "posix", reason="modes of POSIX")
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o722])
def test_a_folder_that_others_can_change_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(mode)
    with pytest.raises(StorageError, match="other users") as caught:
        paths.private_dir(tmp_path / "shared")
    assert caught.value.hint


def test_links_files_and_impossible_places_are_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "link", tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StorageError) as caught:
            paths.private_dir(path)
        assert caught.value.hint


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder where all may make entries, as /tmp."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def give_away(entry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else made this."""
    if os.geteuid() == 0:
        os.chown(entry, 4321, 4321, follow_symlinks=False)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4321)


@pytest.mark.skipif(os.name != "posix", reason="modes of POSIX")
@pytest.mark.parametrize("below", ["cache", "a/b/cache"])
def test_nothing_is_kept_behind_a_link_of_somebody_else(
    tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch, below: str
) -> None:
    """The link would lead elsewhere once the folder behind it was found to be ours."""
    (tmp_path / "mine").mkdir()
    (shared / "link").symlink_to(tmp_path / "mine")
    assert paths.private_dir(shared / "link" / "ours").is_dir()
    (tmp_path / "mine" / "ours").rmdir()
    give_away(shared / "link", monkeypatch)
    for check in (paths.private_dir, paths.require_private):
        with pytest.raises(StorageError):
            check(shared / "link" / below)
    assert not list((tmp_path / "mine").iterdir())
    # nor behind one of ours that leads to theirs
    (tmp_path / "around").symlink_to(shared)
    with pytest.raises(StorageError, match="link belongs to another user"):
        paths.private_dir(tmp_path / "around" / "link" / below)


@pytest.mark.skipif(os.name != "posix", reason="modes of POSIX")
def test_nothing_is_kept_where_a_folder_above_can_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "open" / "a" / "b" / "cache"
    folder.mkdir(parents=True)
    assert paths.private_dir(folder) == folder
    (tmp_path / "open").chmod(0o777)
    for check in (paths.private_dir, paths.require_private):
        with pytest.raises(StorageError, match="open, which holds a, can be changed by other users") as caught:
            check(folder)
        assert str(tmp_path / "open") in (caught.value.hint or "")


def test_links_that_lead_nowhere_end(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(StorageError):
        paths.private_dir(tmp_path / "loop" / "cache")
    with pytest.raises(StorageError, match="No such file"):
        paths.require_private(tmp_path / "missing")
