"""The profile of a machine, and what a config takes from it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_llm import machine, profile
from edge_llm.config import EngineConfig, load_config
from edge_llm.errors import InputError
from edge_llm.profile import Decision, Profile, profile_path, read_profile

FOUND = Profile(
    "some-model",
    "2026-11-30",
    (
        Decision("threads", 2, 1, 0.25, 9, (1,)),
        Decision("max_chunk", 256, 256, 0.0, 2, (128, 512)),
        Decision("slots", 8, 32, 0.5, 9, (16, 32)),
    ),
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGE_LLM_HOME", str(tmp_path))
    (tmp_path / "data").mkdir()
    return tmp_path


def keep(data: bytes = FOUND.encoded()) -> None:
    profile_path().write_bytes(data)


def changed(**values: Any) -> bytes:
    return json.dumps(json.loads(FOUND.encoded()) | values).encode()


def row(**values: Any) -> list[dict[str, Any]]:
    return [json.loads(FOUND.encoded())["decisions"][0] | values]


def test_what_was_kept_is_read_again_and_says_what_changes() -> None:
    assert read_profile() is None
    keep()
    assert read_profile() == FOUND
    assert FOUND.settings == {"threads": 1, "slots": 32}
    assert [str(decision) for decision in FOUND.decisions] == [
        "1 in place of 2: 25% faster (9 rounds)",
        "256 stays: no difference found in favour of 128 and 512 (2 rounds)",
        "32 in place of 8: 50% faster (9 rounds)",
    ]
    assert str(Decision("threads", 1, 1, 0.0, 0, ())) == "1 stays: there is nothing else to try"


def test_it_lies_between_the_defaults_and_all_that_is_set(home: Path) -> None:
    keep()
    assert load_config(env={}) == EngineConfig(threads=1, slots=32)
    assert load_config(env={}, tuned=False) == EngineConfig()
    assert load_config(env={}, defaults={"slots": 3, "prefix_cache": "disk"}).slots == 32
    assert load_config(env={"EDGE_LLM_THREADS": "3"}, slots=4) == EngineConfig(threads=3, slots=4)
    (home / "config").mkdir()
    (home / "config" / "config.toml").write_text("[engine]\nthreads = 2\n")
    assert load_config(env={}) == EngineConfig(threads=2, slots=32)


def test_it_never_makes_a_sound_config_unsound_and_is_of_our_own_kernels_alone() -> None:
    keep()
    assert load_config(env={}, max_chunk=16) == EngineConfig(max_chunk=16)
    assert load_config(env={}, layout="static").threads is None
    assert load_config(env={}, provider="openvino").threads is None
    assert load_config(env={}, provider="cpu").threads == 1


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not sound"),
        (b"[]", "not sound"),
        (b"\xff", "not sound"),
        (b"[" * 60_000, "not sound"),
        (b" " * 70_000, "not sound"),
        (changed(format=2), "another version"),
        (changed(version="0"), "another version"),
        (changed(machine="0" * 32), "another machine"),
        (changed(model=1), "not sound"),
        (changed(decisions={}), "not sound"),
        (changed(decisions=[1]), "not sound"),
        (changed(decisions=row(setting="context")), "not sound"),
        (changed(decisions=row(setting=[])), "not sound"),
        (changed(decisions=row(chosen=0)), "not sound"),
        (changed(decisions=row(chosen=True)), "not sound"),
        (changed(decisions=row(chosen=None)), "not sound"),
        (changed(decisions=row(tried=[2000])), "not sound"),
        (changed(decisions=row(gain=-1.0)), "not sound"),
        (changed(decisions=row(gain=float("nan"))), "not sound"),
        (changed(decisions=row(gain=10**400)), "not sound"),
        (changed(decisions=row(rounds="9")), "not sound"),
        (changed(decisions=row(more=1)), "not sound"),
        (changed(decisions=row() + row()), "not sound"),
    ],
    ids=itertools.count(),
)
def test_what_does_not_count_is_ignored(data: bytes, words: str) -> None:
    keep(data)
    with pytest.raises(InputError, match=words):
        read_profile()
    assert load_config(env={}) == EngineConfig()


@given(st.integers(0, len(FOUND.encoded()) - 1), st.integers(0, 255))
def test_a_changed_byte_gives_a_profile_or_an_error(position: int, byte: int) -> None:
    data = bytearray(FOUND.encoded())
    data[position] = byte
    try:
        found = profile._decoded(bytes(data))
    except InputError:
        return
    assert load_config(env={}, **found.settings)


def test_a_folder_in_its_place_is_no_profile() -> None:
    profile_path().mkdir()
    with pytest.raises(InputError, match="cannot be read"):
        read_profile()


def test_the_identity_is_of_the_cpu_and_what_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    identities = {profile.machine_identity()}
    for name, value in (
        ("cpu_identity", "another"),
        ("cpu_identity", None),
        ("usable_cpus", frozenset(range(77))),
        ("physical_cores", 55),
        ("cpu_quota", 0.125),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(machine, name, lambda *_, value=value: value)
            identities.add(profile.machine_identity())
    assert len(identities) == 6
