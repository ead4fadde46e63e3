"""A home folder of its own for each test, and the program run in this process or as a child."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from edge_llm_cli import answer
from edge_llm_cli.main import application
from typer.testing import CliRunner, Result

from tests.cli.stub import StubEngine, opener

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    own_home = tmp_path / "home"
    monkeypatch.setenv("EDGE_LLM_HOME", str(own_home))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'apps'}{os.pathsep}{ROOT}")
    monkeypatch.setenv("TERM", "xterm")
    return own_home


@pytest.fixture
def invoke() -> Callable[..., Result]:
    """invoke(*arguments, piped="") runs the program in this process."""

    def run(*arguments: str, piped: str | bytes = "") -> Result:
        return CliRunner().invoke(application(), list(arguments), input=piped, prog_name="edge-llm")

    return run


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> StubEngine:
    """Takes the place of every model."""
    engine = StubEngine(["Hel", "lo."])
    monkeypatch.setattr(answer, "opened", opener(engine))
    return engine


def stub_command(spec: dict[str, Any], *arguments: str) -> list[str]:
    return [sys.executable, "-m", "tests.cli.stub", json.dumps(spec), *arguments]


@contextlib.contextmanager
def running(command: list[str], *, stdin: int = subprocess.DEVNULL) -> Iterator[subprocess.Popen[str]]:
    """The program as a child with pipes for what it says; one that hangs fails its test and ends with it."""
    with subprocess.Popen(command, cwd=ROOT, stdin=stdin, stdout=-1, stderr=-1, text=True) as process:
        try:
            yield process
        finally:
            process.kill()
