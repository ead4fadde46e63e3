"""Files of one folder, and no way out of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_llm.errors import ParameterError
from edge_llm.toolbox.folder import MAX_FILE_BYTES, MAX_LISTED, ReadableFolder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("base")
    (base / "secret.txt").write_text("SECRET")
    inside = base / "inside"
    (inside / "notes" / "deep").mkdir(parents=True)
    (inside / "hello.txt").write_text("Hello, 世界\n", encoding="utf-8")
    (inside / "notes" / "deep" / "a.txt").write_text("deep")
    (inside / ".env").write_text("SECRET")
    (inside / "link.txt").symlink_to(base / "secret.txt")
    (inside / "away").symlink_to(base)
    (inside / "loop").symlink_to("loop")
    (inside / "big.txt").write_bytes(b"x" * (MAX_FILE_BYTES + 1))
    (inside / "binary").write_bytes(b"a\0b")
    os.mkfifo(inside / "pipe")
    return inside


@pytest.fixture(scope="module")
def folder(root: Path) -> Iterator[ReadableFolder]:
    opened = ReadableFolder(root)
    yield opened
    opened.close()
    opened.close()


def test_files_and_names(folder: ReadableFolder) -> None:
    assert folder.read("hello.txt") == "Hello, 世界\n"
    assert folder.read("./notes//deep/a.txt") == "deep"
    assert folder.read("notes") == folder.read("notes/") == "deep/"
    names = folder.read(".").splitlines()
    assert names == ["away", "big.txt", "binary", "hello.txt", "link.txt", "loop", "notes/", "pipe"]
    assert folder.read("big.txt").endswith(f"x\n[cut after {MAX_FILE_BYTES} bytes]")


@pytest.mark.parametrize(
    "path",
    [
        "../secret.txt", "/etc/passwd", "notes/../../secret.txt", "link.txt", "away/secret.txt", "away", "loop", ".env", "pipe",
        "binary", "hello.txt/", "hello.txt/x", "none", "a\0b", "..", "notes/..", "~/x", "x" * 2000, "..\\secret.txt",
        "notes/deep/../../../secret.txt", "//etc/passwd", ".../x", "n" * 300, "\ud800",
    ],
)  # fmt: skip
def test_nothing_else(folder: ReadableFolder, path: str) -> None:
    if path == "hello.txt/":
        assert folder.read(path).startswith("Hello")
        return
    with pytest.raises(ValueError, match=r"^(?!.*SECRET)."):
        folder.read(path)


@given(
    st.lists(
        st.sampled_from(["..", ".", "/", "away", "link.txt", "notes", "deep", "a.txt", "secret.txt", "\u2215", "%2e"])
    )
)
def test_no_path_leads_out(folder: ReadableFolder, parts: list[str]) -> None:
    for path in ("/".join(parts), "".join(parts)):
        try:
            text = folder.read(path)
        except ValueError as error:
            text = str(error)
        assert "SECRET" not in text


def test_the_folder_stays_the_one_that_was_opened(tmp_path: Path) -> None:
    first, second = tmp_path / "folder", tmp_path / "other"
    for path, text in ((first, "first"), (second, "second")):
        path.mkdir()
        (path / "a").write_text(text)
    opened = ReadableFolder(first)
    first.rename(tmp_path / "moved")
    first.symlink_to(second)
    assert opened.read("a") == "first"
    opened.close()


def test_long_listings_are_cut(tmp_path: Path) -> None:
    for number in range(MAX_LISTED + 3):
        (tmp_path / f"{number:03}").touch()
    opened = ReadableFolder(tmp_path)
    assert opened.read(".").splitlines()[-1] == "[and 3 more]"
    opened.close()


def test_no_descriptor_is_left(folder: ReadableFolder) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for path in ("hello.txt", "away/x", "binary", "notes/deep", "pipe", "none/x"):
        try:
            folder.read(path)
        except ValueError:
            continue
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "none", tmp_path / "file"):
        with pytest.raises(ParameterError, match="cannot be opened"):
            ReadableFolder(path)
