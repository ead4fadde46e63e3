"""The suite as it is started, on the tiny model: real workers, real processes, a peer that is not there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from tools.bench.worker_process import ROOT


def test_a_quick_run_prints_tables_and_one_line_of_json(tiny_gguf: Path, kernels: object, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.bench", str(tiny_gguf), "--quick", "--peers", "llama.cpp"]
    options = ["--work", str(tmp_path / "work"), "--plot", str(tmp_path / "decode.svg"), "--threads", "1"]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    *text, last = done.stdout.splitlines()
    value = json.loads(last)
    assert "llama.cpp is skipped: python3 -m venv" in done.stderr
    assert "CMAKE_ARGS=" in value["skipped"]["llama.cpp"]
    assert list(value["skipped"]) == ["llama.cpp"]
    assert {cell["section"] for cell in value["cells"]} == {
        "decode",
        "prefill",
        "batched decode",
        "first token",
        "a token's text",
        "whole process",
    }
    for cell in value["cells"]:
        assert cell["failures"] == {}, cell
        assert cell["results"]["edge_llm"]["median"] > 0
    assert value["limits"]["1"]["read_gb_per_s"] > 0
    assert value["limits"]["1"]["dot_gop_per_s"] > 0
    assert "**decode, 1 thread**" in text
    ElementTree.parse(tmp_path / "decode.svg")


def test_an_unknown_peer_is_one_line_and_a_hint(tmp_path: Path, tiny_gguf: Path) -> None:
    command = [sys.executable, "-m", "tools.bench", str(tiny_gguf), "--peers", "x", "--work", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-2:] == [
        "error: no peer is called x",
        "hint: known are: llama.cpp, llama.cpp-amx, genai, openvino",
    ]
