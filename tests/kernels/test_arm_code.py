"""The NEON lowerings compile to the instructions they are made for. Looked at as assembly, so on any machine;
tools/check_aarch64 runs the kernels themselves."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.kernels.test_lowering import TARGETS

ROOT = Path(__file__).parents[2]
NAMES = ("neondot", "neon")
PRODUCTS = {"neondot": ("sdot",), "neon": ("smull", "smull2", "smlal", "smlal2")}
PER_STEP = {"neondot": 1, "neon": 2}
"""instructions that multiply 16 bytes"""


@pytest.fixture(scope="module")
def assembly() -> dict[str, dict[str, list[str]]]:
    """Of each NEON lowering and each of its functions: the instructions."""
    started = {}
    for name in NAMES:
        cpu, features = TARGETS[name]
        environment = {**os.environ, "NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features}
        command = [sys.executable, "-W", "error", "-m", "tests.kernels.arm_rig"]
        started[name] = subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    texts = {}
    for name, process in started.items():
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        texts[name] = {key: _instructions(text) for key, text in json.loads(output).items()}
    return texts


def _instructions(text: str) -> list[str]:
    return [line.split()[0] for line in text.splitlines() if re.match(r"\t[a-z]", line)]


def counts(instructions: list[str], names: tuple[str, ...]) -> int:
    found = Counter(instructions)
    return sum(found[name] for name in names)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_left_to_a_library(name: str, assembly: dict[str, dict[str, list[str]]]) -> None:
    """An operation that the CPU lacks becomes a call, or a few scalar instructions a lane."""
    assert len(assembly[name]) > 20
    for key, instructions in assembly[name].items():
        assert not {"bl", "blr"} & {*instructions}, key


@pytest.mark.parametrize("name", NAMES)
def test_a_block_of_weights_costs_its_dot_products(name: str, assembly: dict[str, dict[str, list[str]]]) -> None:
    """16 outputs of 32 inputs are 32 steps of 16 bytes; a tile's code has a loop of 4 rows and one of the rest, each over
    two vectors of outputs. Signed codes with a minimum take the sum of the activations: two steps a row."""
    for key, instructions in assembly[name].items():
        if not key.startswith(("row_", "tile_")):
            continue
        steps, rows = (32, 1) if key.startswith("row_") else (5 * 16, 5)
        steps += 2 * rows if key.endswith("8_32_minimum") else 0
        products = counts(instructions, PRODUCTS[name])
        if name == "neon" and key.endswith("8_32_minimum"):  # times one is an addition there
            products += 2 * 2 * rows
        assert products == PER_STEP[name] * steps, key
        assert counts(instructions, ("fmla",)) > 0, key
        assert counts(instructions, ("fcvtl",)) > 0, key


@pytest.mark.parametrize("name", NAMES)
def test_attention_multiplies_bytes(name: str, assembly: dict[str, dict[str, list[str]]]) -> None:
    for key in ("scores_int8", "values_int8"):
        assert counts(assembly[name][key], PRODUCTS[name]) >= 64, key
        assert counts(assembly[name][key], ("mul", "mla")) == 0, key


def test_plain_neon_has_no_dot_product(assembly: dict[str, dict[str, list[str]]]) -> None:
    for key, instructions in assembly["neon"].items():
        assert "sdot" not in instructions, key


def test_instructions_of_a_cpu_are_named_in_one_file() -> None:
    files = {
        path.name
        for path in (ROOT / "edge_llm").rglob("*.py")
        if re.search(r"llvm\.(x86|aarch64)\.", path.read_text(encoding="utf-8"))
    }
    assert files == {"lowering.py"}
