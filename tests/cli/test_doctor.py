from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from edge_llm_cli import doctor

from edge_llm.errors import SessionError

SECTIONS = [
    "versions",
    "config",
    "cpu",
    "threads",
    "tuning",
    "memory",
    "onnxruntime",
    "kernels",
    "providers",
    "folders",
    "models",
    "runs",
    "problems",
]


def test_it_says_what_would_run_and_changes_nothing(invoke, own_home: Path) -> None:
    result = invoke("doctor")
    assert result.exit_code == 0
    assert [line for line in result.stdout.splitlines() if not line.startswith(" ")] == SECTIONS
    assert "not made yet" in result.stdout
    assert not own_home.exists()


def test_json(invoke) -> None:
    value = json.loads(invoke("doctor", "--json").stdout)
    assert list(value) == SECTIONS
    assert value["cpu"]["lowering"] in ("avx512vnni", "avxvnni", "avx2", "neon", "generic")
    assert 1 <= value["threads"]["used"] <= value["threads"]["cpus_usable"]
    assert value["onnxruntime"]["library"]
    assert value["runs"]["layout"].startswith("ring")
    assert "error" not in json.dumps(value)


def test_a_fault_is_a_finding_and_hides_nothing(invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise SessionError("onnxruntime is not installed")

    monkeypatch.setattr("edge_llm.model.ort_capi.library_path", fail)
    value = json.loads(invoke("doctor", "--json").stdout)
    assert value["onnxruntime"] == {"error": "onnxruntime is not installed"}
    assert value["runs"]["layout"].startswith(
        "static, on the CPU by stock ops, which is slower: see the errors of onnxr"
    )
    assert value["threads"]["used"] >= 1


def test_a_provider_that_is_not_there_is_not_said_to_run(invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_llm.model.plugins.find_spec", lambda _: None)
    monkeypatch.setenv("EDGE_LLM_PROVIDER", "qnn")
    value = json.loads(invoke("doctor", "--json").stdout)
    assert value["providers"]["qnn"] == "qnn is not installed: pip install 'onnxruntime-qnn>=2.4'"
    assert value["runs"]["layout"].startswith("ring, on the CPU")
    assert value["runs"]["layout"].endswith("; not on qnn: qnn is not installed: pip install 'onnxruntime-qnn>=2.4'")


@pytest.mark.parametrize(("home", "code"), [("/dev/null/x", 1), ("relative/home", 0)])
def test_folders_that_cannot_be_used(
    invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: str, code: int
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EDGE_LLM_HOME", home)
    assert invoke("doctor").exit_code == code
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_model_is_named(invoke, own_home: Path) -> None:
    folder = own_home / "data" / "models" / "bad"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{")
    value = json.loads(invoke("doctor", "--json").stdout)
    assert value["models"]["bad"]["state"].startswith("damaged")


def test_a_machine_that_tells_nothing(invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("edge_llm.machine.available_memory", lambda: None)
    monkeypatch.setattr(doctor, "Path", lambda *_: tmp_path / "missing")
    assert invoke("doctor").exit_code == 0


def test_what_is_in_the_way_is_named_and_fails(invoke, own_home: Path) -> None:
    assert json.loads(invoke("doctor", "--json").stdout)["problems"] == {}
    (own_home / "config").mkdir(parents=True)
    (own_home / "config" / "config.toml").write_text("not toml")
    result = invoke("doctor")
    assert result.exit_code == 1
    assert "is not sound TOML" in result.stdout.split("problems")[-1]


def test_a_folder_that_takes_nothing_is_a_problem(invoke, own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own_home / "data" / "models").mkdir(parents=True)
    (own_home / "cache" / "kernels").mkdir(parents=True)
    (own_home / "cache" / "kernels").chmod(0o777)
    real = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: not (mode & os.W_OK and path.name == "models") and real(path, mode)
    )
    value = json.loads(invoke("doctor", "--json").stdout)
    reasons = {"data": f"{own_home}/data/models cannot be written"}
    reasons["cache"] = f"{own_home}/cache/kernels can be changed by other users"
    assert value["problems"] == {f"{name} folder": reason for name, reason in reasons.items()}
    assert all(reason in value["folders"][name] for name, reason in reasons.items())
    assert invoke("doctor").exit_code == 1


def test_a_full_disk_is_a_problem(invoke, own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own_home / "data").mkdir(parents=True)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    problems = json.loads(invoke("doctor", "--json").stdout)["problems"]
    assert problems == {"data folder": f"the disk of {own_home}/data is full"}


def test_an_unknown_setting_is_a_problem_of_the_config_alone(invoke, own_home: Path) -> None:
    (own_home / "config").mkdir(parents=True)
    (own_home / "config" / "config.toml").write_text("[engine]\nthread = 1\n")
    value = json.loads(invoke("doctor", "--json").stdout)
    assert list(value["problems"]) == ["config"]
    assert value["problems"]["config"].startswith("unknown setting thread in ")
    assert value["problems"]["config"].endswith("did you mean threads?")
    assert value["threads"]["used"] >= 1
    assert value["runs"]["layout"].startswith("nothing")
