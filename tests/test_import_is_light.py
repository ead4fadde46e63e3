"""What an import may load: a start must not pay for what it does not use."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {
    "huggingface_hub",
    "jinja2",
    "llguidance",
    "llvmlite",
    "numba",
    "numpy",
    "onnx",
    "onnxruntime",
    "platformdirs",
    "rich",
    "textual",
    "tokenizers",
    "typer",
}


def loaded_by(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in result.stdout.split()} & HEAVY


@pytest.mark.parametrize(
    ("statement", "allowed"),
    [
        ("import edge_llm", set()),
        ("from edge_llm import Message, SamplingParams, EdgeLLMError", set()),
        ("from edge_llm import Engine, EngineConfig", {"numpy", "platformdirs"}),
        ("from edge_llm.engine.process_client import ProcessClient", {"platformdirs"}),
        ("from edge_llm.engine.host import EngineHost", {"platformdirs"}),
        ("import edge_llm_cli.main", {"typer", "rich", "platformdirs"}),
    ],
)
def test_imports_stay_light(statement: str, allowed: set[str]) -> None:
    assert loaded_by(statement) <= allowed


def test_importing_writes_and_prints_nothing() -> None:
    result = subprocess.run([sys.executable, "-c", "import edge_llm, edge_llm_cli"], capture_output=True, check=True)
    assert (result.stdout, result.stderr) == (b"", b"")
