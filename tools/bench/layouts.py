"""The static layout beside the ring on this machine: speed as ratios, in one process by turns; load times and memory.

    python -m tools.bench.layouts [MODEL] [--providers cpu,openvino] [--rounds 40] [--threads N]

docs/providers.md shows what it prints, as Markdown; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from edge_llm import machine
from edge_llm.config import EngineConfig, default_threads
from edge_llm.engine.assembly import open_engine
from edge_llm.engine.benchmark import Benchmark
from edge_llm.engine.core import EngineCore
from edge_llm.install.importer import resolve

DEPTHS = (200, 980)
"""that a run attends to 256 and to 1,024 rows in the static layout"""
_PROMPT = 32
_TOKENS = 8
RING = "ring"


def main() -> None:
    options = _options()
    folder = resolve(options.model)
    if options.load:
        print(json.dumps(_loaded(folder, options.load, options.threads)))
        return
    names = [RING, *options.providers.split(",")]
    loads = {name: [_in_a_process(options, name) for _ in range(2)][-1] for name in names}
    best = _measured(folder, names, options.rounds, options.threads)
    for depth in DEPTHS:
        for what in ("one token", f"{_PROMPT} prompt tokens"):
            ratios = " | ".join(f"{best[what, depth, RING] / best[what, depth, name]:.2f}" for name in names[1:])
            print(f"| {what} after {depth} | {ratios} |")
    print("| seconds to load | " + " | ".join(f"{name} {load['seconds']:.1f}" for name, load in loads.items()) + " |")
    print("| memory, MB | " + " | ".join(f"{name} {load['memory_mb']}" for name, load in loads.items()) + " |")
    times = [{"what": what, "depth": depth, "name": name, "s": s} for (what, depth, name), s in best.items()]
    print(json.dumps({"threads": options.threads, "loads": loads, "best": times}))


def _measured(folder: Path, names: list[str], rounds: int, threads: int) -> dict[tuple[str, int, str], float]:
    """The fewest seconds of each measurement of each of `names`, taken by turns."""
    cores = {name: _engine(folder, name, threads) for name in names}
    vocab = next(iter(cores.values())).intake.manifest.dimensions.vocab
    ids = np.random.default_rng(0).integers(0, vocab, DEPTHS[-1] + 2 * _PROMPT).tolist()
    benchmarks = {name: Benchmark(core, ids) for name, core in cores.items()}
    best: dict[tuple[str, int, str], float] = {}
    for depth in DEPTHS:
        for _ in range(rounds):
            for name, benchmark in benchmarks.items():
                for what, seconds in (
                    ("one token", benchmark.decode(depth, _TOKENS) / _TOKENS),
                    (f"{_PROMPT} prompt tokens", benchmark.prefill(depth, _PROMPT)),
                ):
                    key = what, depth, name
                    best[key] = min(seconds, best.get(key, seconds))
    for core in cores.values():
        core.close()
    return best


def _engine(folder: Path, name: str, threads: int) -> EngineCore:
    """The engine of the ring, or of the static layout on a provider."""
    config = EngineConfig(
        context=DEPTHS[-1] + 2 * _PROMPT,
        slots=1,
        threads=threads,
        prefix_cache="off",
        max_chunk=_PROMPT,
        mixed_chunk=_PROMPT,
        layout="static" if name == "cpu" else "auto",
        provider="auto" if name == RING else name,
    )
    core = open_engine(folder, config)
    if core.info.notice:
        raise SystemExit(core.info.notice)
    return core


def _loaded(folder: Path, name: str, threads: int) -> dict[str, float | int | None]:
    """Seconds until the engine is open, and the process's memory after some tokens."""
    started = time.perf_counter()
    core = _engine(folder, name, threads)
    seconds = time.perf_counter() - started
    Benchmark(core, [5] * 100).prefill(0, 50)
    memory = machine.resident_memory()
    core.close()
    return {"seconds": seconds, "memory_mb": None if memory is None else memory // 10**6}


def _in_a_process(options: argparse.Namespace, name: str) -> dict[str, float]:
    """`_loaded`, in a process of its own."""
    command = [sys.executable, "-m", "tools.bench.layouts", options.model, "--load", name]
    done = subprocess.run([*command, "--threads", str(options.threads)], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.layouts", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("model", nargs="?", default="smollm2-135m-instruct", help="a name or a folder; default: %(default)s")
    add("--providers", default="cpu,openvino", help="of the static layout, with commas; default: %(default)s")
    add("--rounds", type=int, default=40, help="of which the fastest counts; default: %(default)s")
    add("--threads", type=int, default=default_threads(), help="default: one a physical core")
    add("--load", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
