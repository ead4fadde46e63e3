"""The serving bench runs over a tiny model and counts what it should."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_llm.config import EngineConfig
from edge_llm.engine.engine import Engine
from edge_llm.kernels.warmup import KernelLibrary
from tools.bench import serving


def test_each_case_runs(tiny_folder: Path, kernels: KernelLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_CHATS", 3), ("_CHAT_TOKENS", 20), ("_PROMPT_TOKENS", 500), ("_OVERLOAD", 2)):
        monkeypatch.setattr(serving, name, value)
    with Engine.open(tiny_folder, EngineConfig(prefix_cache="off", speculation="off")) as engine:
        bench = serving.Bench(engine)
        chats = bench.chats()
        assert chats.same_tokens
        assert chats.alone > 0
        overload = bench.overload()
        assert overload.offered == 64
        assert 8 <= overload.accepted == overload.answered_as_alone <= 64
