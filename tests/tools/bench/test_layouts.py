"""The benchmark of layouts as it is started, on the tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.conftest import export
from tools.bench import layouts
from tools.bench.worker_process import ROOT
from tools.tiny_model import write_tiny_gguf


def test_it_prints_ratios_loads_and_one_line_of_json(tmp_path: Path, kernels: object) -> None:
    (tmp_path / "long").mkdir()
    folder = export(write_tiny_gguf(tmp_path / "long" / "long.gguf", context=2048), tmp_path / "long" / "exported")
    command = [sys.executable, "-m", "tools.bench.layouts", str(folder), "--providers", "cpu"]
    done = subprocess.run(
        [*command, "--rounds", "1", "--threads", "1"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    *rows, last = done.stdout.splitlines()
    value = json.loads(last)
    assert [row.split(" | ")[0] for row in rows[:2]] == ["| one token after 200", "| 32 prompt tokens after 200"]
    assert {(one["depth"], one["name"]) for one in value["best"]} == {
        (depth, name) for depth in layouts.DEPTHS for name in ("ring", "cpu")
    }
    assert all(one["s"] > 0 for one in value["best"])
    assert all(load["seconds"] > 0 for load in value["loads"].values())
