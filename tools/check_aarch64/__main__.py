"""Does everything work on a Raspberry Pi? Run our code on one that qemu emulates on this x86-64 machine.

    python -m tools.check_aarch64 [--cpu pi5|pi4] [--model FOLDER] [--step NAME ...]

`--model` is an imported SmolLM2-135M-Instruct (default: the installed one). The first run makes a Debian sysroot and fetches
wheels, half a gigabyte in the cache folder. Functions are checked, never speed. Exit code 0: all steps passed, 1: some failed,
2: something is missing here.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import platformdirs

from edge_llm.install.store import ModelStore
from tools.check_aarch64.machine import BOARDS, ROOT, Machine, MissingToolError

_MODEL = "smollm2-135m-instruct"
_KERNEL_TESTS = ("ring", "random", "sampling", "warmup")
"""those whose kernels the steps lowering and attention do not compile and check already"""
_TOLERANCE = 0.25
"""largest difference of a log-probability of a token that is among the likely ones on both CPUs"""
_LIKELY = math.log(0.01)

Step = Callable[[Machine, Path], str]
"""gives what was found; raises ValueError if something is wrong"""


def _doctor(machine: Machine, _: Path) -> str:
    program = "from edge_llm_cli.entry import run; run()"
    result = machine.run("-c", program, "doctor", "--json")
    findings = json.loads(result.stdout)
    problems = {section: facts for section, facts in findings["problems"].items() if section != "models"}
    cpu, threads = findings["cpu"], findings["threads"]
    if problems or (cpu["lowering"], cpu["compiled_for"]) != (machine.board.lowering, machine.board.cpu):
        raise ValueError(f"{cpu}, {problems}")
    return f"{cpu['model']}: {cpu['compiled_for']}, lowering {cpu['lowering']}, {threads['used']} threads"


def _rig(module: str) -> Step:
    def check(machine: Machine, _: Path) -> str:
        result = machine.run("-W", "error", "-m", module)
        if result.returncode or result.stdout != machine.board.lowering:
            raise ValueError(f"exit code {result.returncode}, lowering {result.stdout!r}")
        return f"lowering {result.stdout}"

    return check


def _tests(*paths: str) -> Step:
    def check(machine: Machine, _: Path) -> str:
        options = ["-m", "pytest", "-q", "--timeout", "3600", "-p", "no:cacheprovider", "-m", "not real_model"]
        result = machine.run(*options, *paths)
        sys.stderr.write(result.stdout)
        if result.returncode:
            raise ValueError(f"exit code {result.returncode}")
        return result.stdout.strip().splitlines()[-1].strip("= ")

    return check


def _answers(machine: Machine, model: Path) -> str:
    arguments = ["-m", "tools.check_aarch64.answers", str(model)]
    here = subprocess.run([sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    there = machine.run(*arguments)
    if here.returncode or there.returncode:
        raise ValueError(f"exit code {here.returncode} here, {there.returncode} there")
    return compare(json.loads(here.stdout), json.loads(there.stdout))


def compare(here: dict[str, Any], there: dict[str, Any]) -> str:
    """Raises ValueError unless both gave the same tokens, with log-probabilities within the tolerance."""
    if not (here["same"] and there["same"]):
        raise ValueError("threads, chunks or company changed the answers")
    difference, count = 0.0, 0
    for i, (a, b) in enumerate(zip(here["answers"], there["answers"], strict=True)):
        if a["ids"] != b["ids"]:
            raise ValueError(f"prompt {i}: tokens {b['ids']} instead of {a['ids']}")
        for ours, theirs in zip(a["places"], b["places"], strict=True):
            other = dict(map(tuple, theirs))
            shared = [abs(value - other.get(token, -math.inf)) for token, value in ours if value > _LIKELY]
            difference = max(difference, *shared)
        count += len(a["ids"])
    if difference > _TOLERANCE:
        raise ValueError(f"log-probabilities differ by up to {difference:.3f}")
    return f"{count} tokens equal, log-probabilities within {difference:.1e}; threads, chunks and company change no bit"


STEPS: dict[str, Step] = {
    "doctor": _doctor,
    "answers": _answers,
    "lowering": _rig("tests.kernels.lowering_rig"),
    "attention": _rig("tests.kernels.attention_rig"),
    "kernels": _tests(*(f"tests/kernels/test_{name}.py" for name in _KERNEL_TESTS)),
    "session": _tests("tests/model", "tests/cache"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cpu", choices=BOARDS, default="pi5")
    parser.add_argument("--model", type=Path, default=ModelStore().path(_MODEL), help="folder of an imported model")
    parser.add_argument("--step", choices=STEPS, action="append", help="run only these steps")
    parser.add_argument("--cache", type=Path, default=platformdirs.user_cache_path("edge-llm-aarch64", appauthor=False))
    options = parser.parse_args()
    names = options.step or [*STEPS]
    if "answers" in names and not options.model.is_dir():
        parser.error(f"{options.model} is no model: run `edge-llm pull {_MODEL}`, or give --model")
    try:
        machine = Machine(options.cpu, options.cache.resolve())
    except (MissingToolError, subprocess.CalledProcessError) as error:
        parser.error(str(error))
    failed = False
    for name in names:
        start = time.monotonic()
        try:
            outcome = STEPS[name](machine, options.model.resolve())
        except ValueError as error:
            failed, outcome = True, f"FAILED: {error}"
        print(f"{options.cpu}  {name:10} {time.monotonic() - start:5.0f} s  {outcome}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
