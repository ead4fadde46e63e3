"""What an engine is made of is closed when the last part of it cannot be had."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_llm.config import EngineConfig
from edge_llm.engine import assembly
from edge_llm.engine.intake import Intake
from edge_llm.errors import ParameterError, StorageError
from edge_llm.model.session import Session


@pytest.mark.parametrize("part", ["open_intake", "prefix_store", "EngineCore"])
def test_a_failure_closes_what_is_open(tiny_folder: Path, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[type] = []

    def fail(*_arguments: object, **_options: object) -> None:
        raise StorageError("no room")

    for kind in (Session, Intake):
        real = kind.close
        monkeypatch.setattr(kind, "close", lambda self, real=real: (closed.append(type(self)), real(self)))
    monkeypatch.setattr(assembly, part, fail)
    with pytest.raises(StorageError, match="no room"):
        assembly.open_engine(tiny_folder, EngineConfig(context=256))
    assert set(closed) == ({Session} if part == "open_intake" else {Session, Intake})


def test_a_budget_that_is_too_small_is_told_before_the_model_is_read(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "Meanwhile", lambda _: pytest.fail("the model is being read"))
    with pytest.raises(ParameterError, match="kv_budget_bytes is 1"):
        assembly.open_engine(tiny_folder, EngineConfig(context=256, kv_budget_bytes=1))
