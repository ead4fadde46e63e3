"""Decode and prefill beside llama.cpp on the same GGUF file: alternately, several rounds, medians and their ratio.

    python -m tools.bench.against_llama MODEL.gguf MODEL_FOLDER --llama-python PATH [--threads 2] [--rounds 7]

`--llama-python` is a Python that has llama-cpp-python. Both sides keep the model loaded and are asked in turn, so a machine
that slows down slows both. Sampling and tokenising are left out on both sides, as in llama-bench.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

CASES = (
    {"kind": "decode", "depth": 16, "tokens": 48},
    {"kind": "decode", "depth": 128, "tokens": 48},
    {"kind": "decode", "depth": 512, "tokens": 48},
    {"kind": "prefill", "depth": 0, "tokens": 512},
    {"kind": "decode", "depth": 2048, "tokens": 32},
    {"kind": "decode", "depth": 4096, "tokens": 32},
)


class Worker:
    """A loaded model in a process of its own."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def measure(self, case: dict[str, object]) -> float:
        """Tokens a second."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        return float(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--llama-python", required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    threads = str(options.threads)
    llama_worker = str(Path(__file__).with_name("llama_worker.py"))
    workers = {
        "edge_llm": Worker([sys.executable, "-m", "tools.bench.ring_worker", str(options.folder), threads]),
        "llama.cpp": Worker([options.llama_python, llama_worker, str(options.gguf), threads]),
    }
    results = []
    print(f"{'case':>16} {'edge_llm':>10} {'llama.cpp':>10} {'ratio':>7}   ratios of the rounds")
    for case in CASES:
        for worker in workers.values():
            worker.measure(case)  # warm
        rounds = [{name: worker.measure(case) for name, worker in workers.items()} for _ in range(options.rounds)]
        medians = {name: statistics.median(r[name] for r in rounds) for name in workers}
        ratios = sorted(r["edge_llm"] / r["llama.cpp"] for r in rounds)
        ratio = statistics.median(ratios)
        label = f"{case['kind']} {case['tokens'] if case['kind'] == 'prefill' else '@ ' + str(case['depth'])}"
        figures = f"{medians['edge_llm']:10.1f} {medians['llama.cpp']:10.1f} {ratio:7.2f}"
        print(f"{label:>16} {figures}   {ratios[0]:.2f} .. {ratios[-1]:.2f}", flush=True)
        results.append({**case, **medians, "ratio": ratio, "spread": [ratios[0], ratios[-1]]})
    for worker in workers.values():
        worker.close()
    print(json.dumps({"threads": options.threads, "rounds": options.rounds, "cases": results}))


if __name__ == "__main__":
    main()
