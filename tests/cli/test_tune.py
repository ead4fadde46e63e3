from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edge_llm import machine
from edge_llm.config import EngineConfig, load_config
from edge_llm.engine import tuning
from edge_llm.profile import Decision, profile_path, read_profile

FOUND = (Decision("threads", 2, 1, 0.25, 9, (1,)), Decision("slots", 8, 8, 0.0, 2, (16, 32)))


class FakeRig:
    """An engine is opened, nothing is measured."""

    closed = 0

    def __init__(self, *_: Any) -> None:
        pass

    def open(self, config: EngineConfig) -> Any:
        assert config == EngineConfig()
        return type("Core", (), {"info": type("Info", (), {"name": "tiny"})})

    def adapt(self, _config: EngineConfig) -> None:
        pass

    def close(self) -> None:
        type(self).closed += 1


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch, tiny_folder: Path) -> list[str]:
    """What is found in place of measuring; gives the arguments."""
    monkeypatch.setattr(tuning, "EngineRig", FakeRig)
    monkeypatch.setattr(tuning, "tune", lambda *_args, **_options: iter(FOUND))
    monkeypatch.setattr(machine, "waited_for_cpu", lambda: 0.0)
    return ["tune", "-m", str(tiny_folder)]


def test_what_is_found_is_kept_and_used_until_it_is_forgotten(invoke, found: list[str], own_home: Path) -> None:
    result = invoke(*found)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "setting  result",
        "threads  1 in place of 2: 25% faster (9 rounds)",
        "slots    8 stays: no difference found in favour of 16 and 32 (2 rounds)",
    ]
    assert str(profile_path()) in result.stderr
    profile = read_profile()
    assert profile is not None
    assert (profile.model, profile.decisions) == ("tiny", FOUND)
    assert [path.name for path in (own_home / "data").iterdir()] == ["tuning.json"]
    assert load_config(env={}).threads == 1
    assert "the defaults count again" in invoke("tune", "--reset").stdout
    assert load_config(env={}) == EngineConfig()
    assert "nothing was measured" in invoke("tune", "--reset").stdout


def test_json(invoke, found: list[str]) -> None:
    value = json.loads(invoke(*found, "--json").stdout)
    assert (value["model"], value["settings"]) == ("tiny", {"threads": 1})
    assert value["decisions"][1]["tried"] == [16, 32]
    assert Path(value["file"]) == profile_path()
    assert json.loads(invoke("tune", "--reset", "--json").stdout) == {"removed": True}
    assert json.loads(invoke("tune", "--reset", "--json").stdout) == {"removed": False}


@pytest.mark.parametrize("fault", ["interrupted", "busy"])
def test_what_does_not_come_to_its_end_loses_nothing(
    invoke, found: list[str], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    invoke(*found)
    kept = profile_path().read_bytes()
    if fault == "interrupted":

        def pressed(*_args: Any, **_options: Any) -> Any:
            yield FOUND[1]
            raise KeyboardInterrupt

        monkeypatch.setattr(tuning, "tune", pressed)
    else:
        waits = iter(range(0, 1000, 10))
        monkeypatch.setattr(machine, "waited_for_cpu", lambda: float(next(waits)))
    closed = FakeRig.closed
    result = invoke(*found)
    assert result.exit_code == (130 if fault == "interrupted" else 1)
    assert FakeRig.closed == closed + 1
    assert profile_path().read_bytes() == kept
    if fault == "busy":
        assert "other programs took the CPU" in result.stderr
        assert "--busy" in result.stderr
        assert invoke(*found, "--busy").exit_code == 0


def test_a_folder_that_cannot_be_written(invoke, found: list[str], own_home: Path) -> None:
    own_home.mkdir()
    (own_home / "data").touch()
    result = invoke(*found)
    assert result.exit_code == 2
    assert "hint:" in result.stderr


def test_a_real_model_is_measured(
    invoke, tiny_folder: Path, kernels: object, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGE_LLM_HOME", str(home))
    monkeypatch.setattr(tuning, "KNOBS", tuning.KNOBS[1:3])
    value = json.loads(invoke("tune", "-m", str(tiny_folder), "--busy", "--json").stdout)
    invoke("tune", "--reset")
    assert [decision["setting"] for decision in value["decisions"]] == ["max_chunk", "spin_us"]
    assert all(decision["rounds"] >= 2 for decision in value["decisions"])


def test_doctor_explains_it(invoke, found: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def seen() -> dict[str, str]:
        result = invoke("doctor", "--json")
        assert result.exit_code == 0
        return json.loads(result.stdout)["tuning"]

    assert seen()["state"].startswith("the defaults: edge-llm tune measures")
    invoke(*found)
    told = seen()
    assert told["state"].endswith("with tiny")
    assert told["threads"] == str(FOUND[0])
    assert told["slots"] == str(FOUND[1])
    assert json.loads(invoke("doctor", "--json").stdout)["threads"]["because"] == "edge-llm tune found it faster"
    monkeypatch.setenv("EDGE_LLM_THREADS", "2")
    assert seen()["threads"] == "2, which is set"
    profile_path().write_text("{")
    assert "ignored" in seen()["state"]
