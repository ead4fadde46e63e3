"""The lowering of this CPU, and all the others it can run, each in a process of its own that names another CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import llvmlite.binding as llvm
import numba.core.config
import pytest
from llvmlite import ir

from edge_llm.kernels import lowering
from tests.kernels.lowering_rig import check_activations_of_steps, check_dots, check_half_to_float

ROOT = Path(__file__).parents[2]
TARGETS = {
    "avx512vnni": ("cascadelake", "+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512vnni,+avx2,+fma,+f16c,+bmi2"),
    "avxvnni": ("alderlake", "+avx2,+fma,+f16c,+bmi2,+avxvnni"),
    "avx2": ("haswell", "+avx2,+fma,+f16c,+bmi2"),
    "sse4.1": ("nehalem", "+sse4.1,+ssse3"),
    "neondot": ("cortex-a76", "+neon,+dotprod"),
    "neon": ("cortex-a72", "+neon"),
    "generic": ("generic", ""),
}


def test_the_dot_products_are_exact() -> None:
    check_dots()


def test_activations_reach_every_lane() -> None:
    check_activations_of_steps()


def test_fp16_is_converted_exactly() -> None:
    check_half_to_float()


@pytest.fixture(scope="module")
def processes() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """All lowerings but this process's own, checked side by side."""
    host = llvm.get_host_cpu_features()
    started = {}
    for name, (cpu, features) in TARGETS.items():
        runs_here = all(host.get(feature[1:], False) for feature in features.split(",") if feature)
        if runs_here and name != lowering.detect_lowering().name:
            environment = {**os.environ, "NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features}
            if name == "generic":
                environment["NUMBA_BOUNDSCHECK"] = "1"
            command = [sys.executable, "-W", "error", "-m", "tests.kernels.lowering_rig"]
            started[name] = subprocess.Popen(
                command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
    yield started
    for process in started.values():
        process.kill()
        process.communicate()


@pytest.mark.parametrize("name", TARGETS)
def test_every_other_lowering_is_right(name: str, processes: dict[str, subprocess.Popen[str]]) -> None:
    if name not in processes:
        pytest.skip("the lowering of this process (tested in place), or this CPU lacks it")
    output, errors = processes[name].communicate(timeout=300)
    assert processes[name].returncode == 0, errors
    assert output.strip() == name


@pytest.mark.parametrize("name", TARGETS)
def test_the_features_choose_the_lowering(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, features = TARGETS[name]
    monkeypatch.setattr(numba.core.config, "CPU_NAME", cpu)
    monkeypatch.setattr(numba.core.config, "CPU_FEATURES", features)
    assert lowering.target_cpu() == (cpu, features)
    assert lowering.detect_lowering().name == name


@pytest.mark.parametrize(
    ("cpu", "features", "name"),
    [
        ("cortex-a76", "+crc,+neon", "neondot"),  # what LLVM tells of a Raspberry Pi 5: its name has to say the rest
        ("neoverse-n1", "+neon", "neondot"),
        ("cortex-a72", "+crc,+neon", "neon"),
        ("generic", "+neon", "neon"),
        ("cortex-a76", "+neon,-dotprod", "neon"),
        ("cortex-a76", "", "generic"),
    ],
)
def test_an_arm_cpu_is_known_by_its_name(cpu: str, features: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.core.config, "CPU_NAME", cpu)
    monkeypatch.setattr(numba.core.config, "CPU_FEATURES", features)
    assert lowering.detect_lowering().name == name


def test_a_feature_switched_off_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.core.config, "CPU_FEATURES", TARGETS["avxvnni"][1].replace("+avxvnni", "-avxvnni"))
    assert lowering.detect_lowering() is lowering.AVX2


def test_sums_that_would_overflow_are_refused() -> None:
    with pytest.raises(ValueError, match="overflow"):
        lowering.dot_nibbles(ir.IRBuilder(), lowering.AVX2, None, [(None, None)] * (lowering.MAX_STEPS + 1))
