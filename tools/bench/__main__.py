"""The benchmark suite: edge_llm beside its peers and this machine's limits, in one run.

    python -m tools.bench [MODEL.gguf] [--peers llama.cpp,genai,openvino] [--threads N] [--rounds N] [--quick] [--json]

Everybody runs the same GGUF file (without one: the default model's, fetched once), each peer in an environment of its own
below --work, and is asked in turn, so a machine that slows down slows all of them. docs/performance.md says how to read it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from edge_llm import machine
from edge_llm.config import default_threads
from edge_llm.errors import EdgeLLMError
from edge_llm.install import catalog, pull
from edge_llm.install.importer import resolve
from edge_llm.install.store import ModelStore
from edge_llm.model.manifest import TOKENIZER_NAME, ModelManifest
from edge_llm.text.tokenizer import Tokenizer
from tools.bench import cells, plot, report, whole_process
from tools.bench.contest import Contest
from tools.bench.figures import CellResult, as_object
from tools.bench.model_cost import ModelCost
from tools.bench.peers import LIMIT, OURS, Contestant, MissingPeerError, machine_limit, ourselves, read_peers
from tools.bench.worker_process import ROOT

DEFAULT_MODEL = "smollm2-135m-instruct"
_TEXT = ROOT / "tools" / "eval" / "english.txt"
_SEQUENCES = 16
_CONTEXT = 8192
_BUSY = 0.5
"""load beside which figures mean little"""


def main() -> None:
    options = _options()
    try:
        _run(options)
    except EdgeLLMError as error:
        _note(f"error: {error}" + (f"\nhint: {error.hint}" if error.hint else ""))
        sys.exit(2)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("gguf", nargs="?", type=Path, help=f"the model; default: {DEFAULT_MODEL}")
    parser.add_argument(
        "--peers", default="llama.cpp", help="names of peers.toml, with commas between; default: llama.cpp"
    )
    parser.add_argument(
        "--python", action="append", default=[], metavar="PEER=PATH", help="the Python that runs a peer"
    )
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "bench", help="peers, their models, logs")
    parser.add_argument("--threads", type=int, default=default_threads(), help="default: one a physical core")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=600, metavar="SECONDS", help="of one measurement")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="write the plot of decode against context")
    parser.add_argument("--quick", action="store_true", help="one round of a few cells, to see that all of it works")
    parser.add_argument("--json", action="store_true", help="print only the line of JSON")
    return parser.parse_args()


def _run(options: argparse.Namespace) -> None:
    started = time.perf_counter()
    load = os.getloadavg()[0]
    if load > _BUSY:
        _note(f"this machine is busy (load {load:.1f}): the figures will mean little")
    work: Path = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    source = options.gguf.resolve() if options.gguf else _default_gguf(work)
    folder = resolve(str(source), _progress)
    manifest, tokenizer = ModelManifest.read(folder), Tokenizer.from_file(folder / TOKENIZER_NAME)
    contestants, skipped = _contestants(options, source, folder, work)

    prompts = {tokens: _prompt(tokenizer, tokens) for tokens in (32, 512)}
    if options.quick:
        groups = {options.threads: cells.quick(prompts)}
    else:
        groups = {options.threads: cells.all_threads(prompts, options.rounds)}
        if options.threads > 1:
            groups[1] = cells.one_thread(options.rounds)
    context = min(_CONTEXT, manifest.dimensions.context)
    results: dict[int, list[CellResult]] = {}
    info: dict[str, Any] = {}
    for threads, group in groups.items():
        results[threads] = []
        contest = Contest(
            contestants, threads=threads, context=context, sequences=_SEQUENCES, logs=work, timeout_s=options.timeout
        )
        with contest:
            for cell in group:
                if cell.room <= context:
                    results[threads].append(contest.measure(cell))
                    _note(_summary(results[threads][-1], threads))
            info |= contest.info
    results[options.threads] += _whole_processes(options, contestants, tokenizer, context, work)

    cost = ModelCost.of_folder(folder)
    limits = {threads: _limits(group, cost) for threads, group in results.items()}
    seconds = time.perf_counter() - started
    if not options.json:
        _print_report(results, limits, info, skipped)
        print(f"\nIt took {seconds / 60:.1f} minutes.\n")
    if options.plot:
        options.plot.write_text(_plot(results[options.threads], f"{manifest.name}, {options.threads} threads"), "utf-8")
    document = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": _machine(load),
        "model": {"name": manifest.name, "file": source.name, "sha256": manifest.source.sha256},
        "workers": info,
        "flags": {contestant.name: contestant.flags for contestant in contestants},
        "skipped": skipped,
        "limits": limits,
        "cells": [
            {"threads": threads, **as_object(result, OURS)} for threads, group in results.items() for result in group
        ],
        "seconds": seconds,
    }
    print(json.dumps(document))


def _default_gguf(work: Path) -> Path:
    """The default model's file, kept in `work`."""
    recipe = catalog.get(DEFAULT_MODEL)
    target = work / "models" / recipe.source.file
    if not target.exists():
        target.parent.mkdir(exist_ok=True)
        with ModelStore().lock(recipe.name):
            pull.fetch(recipe, _progress).replace(target)
    return target


def _contestants(
    options: argparse.Namespace, source: Path, folder: Path, work: Path
) -> tuple[list[Contestant], dict[str, str]]:
    """All that can take part, and for each peer that cannot what would change that."""
    pythons = dict(word.split("=", 1) for word in options.python)
    contestants, skipped = [ourselves(folder), machine_limit(folder)], {}
    for peer in read_peers([name for name in options.peers.split(",") if name]):
        python = Path(pythons[peer.name]) if peer.name in pythons else None
        try:
            contestants += peer.contestants(source, work, python)
        except MissingPeerError as error:
            skipped[peer.name] = str(error)
            _note(f"{peer.name} is skipped: {error}")
    return contestants, skipped


def _whole_processes(
    options: argparse.Namespace, contestants: Sequence[Contestant], tokenizer: Tokenizer, context: int, work: Path
) -> list[CellResult]:
    everybody = [contestant for contestant in contestants if contestant.name != LIMIT]
    context = min(context, 4096)
    lengths = [(16, 1, options.rounds)] if options.quick else [(16, 1, options.rounds), (context - 16, 8, 1)]
    results = []
    for prompt_tokens, max_tokens, rounds in lengths:
        question = whole_process.Question(
            _prompt(tokenizer, prompt_tokens), prompt_tokens, max_tokens, context, options.threads
        )
        for result in whole_process.measure(
            everybody, question, rounds=1 if options.quick else rounds, logs=work, timeout_s=options.timeout
        ):
            results.append(result)
            _note(_summary(result, options.threads))
    return results


def _prompt(tokenizer: Tokenizer, tokens: int) -> str:
    """English prose of about that many tokens."""
    ids = tokenizer.encode_raw(_TEXT.read_text("utf-8"))
    return tokenizer.decode((ids * (tokens // len(ids) + 1))[:tokens])


def _limits(results: Sequence[CellResult], cost: ModelCost) -> dict[str, float]:
    """What the limit's own figures say about this machine: bytes and operations a second."""
    found: dict[str, float] = {}
    for result in results:
        figure, arguments = result.figure(LIMIT), result.cell.arguments
        if figure is None:
            continue
        if result.cell.kind == "decode":
            nbytes = cost.step_bytes(arguments["depth"] + arguments["tokens"] // 2)
            found.setdefault("read_gb_per_s", figure.median * nbytes / 1e9)
        elif result.cell.kind == "prefill":
            operations = cost.operations(0, arguments["tokens"])
            found["dot_gop_per_s"] = figure.median * operations / arguments["tokens"] / 1e9
    return found


def _print_report(
    results: Mapping[int, Sequence[CellResult]],
    limits: Mapping[int, Mapping[str, float]],
    info: Mapping[str, Mapping[str, Any]],
    skipped: Mapping[str, str],
) -> None:
    for name, facts in info.items():
        print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in facts.items()))
    for name, hint in skipped.items():
        print(f"{name} is skipped: {hint}")
    for threads, group in results.items():
        facts = limits[threads]
        if facts:
            print(
                f"\nThis machine with {threads} threads: reads {facts.get('read_gb_per_s', 0):.1f} GB/s, "
                f"{facts.get('dot_gop_per_s', 0):.0f} G dot-product operations/s"
            )
        print("\n" + report.tables(group, threads))
    for group in results.values():
        for line in report.failures(group):
            print(f"failed: {line}")


def _plot(results: Sequence[CellResult], title: str) -> str:
    decodes = [result for result in results if result.cell.kind == "decode"]
    names = dict.fromkeys(name for result in decodes for name in result.values)
    lines = {
        name: [
            (int(result.cell.arguments["depth"]), figure.median)
            for result in decodes
            if (figure := result.figure(name)) is not None
        ]
        for name in names
    }
    return plot.decode_plot({name: points for name, points in lines.items() if points}, title)


def _summary(result: CellResult, threads: int) -> str:
    """A line about a cell while the suite runs."""
    figures = [f"{name} {figure.median:.4g}" for name in result.values if (figure := result.figure(name)) is not None]
    failed = [f"{name} failed" for name in result.failures]
    return f"{result.cell.section} {result.cell.label}, {threads} threads: " + ", ".join([*figures, *failed])


def _machine(load: float) -> dict[str, Any]:
    cpus = machine.usable_cpus()
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text("ascii", "replace").splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "cpu": model,
        "cpus": len(cpus),
        "cores": machine.physical_cores(cpus),
        "load": load,
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def _progress(stage: str, done: int, total: int) -> None:
    if done == 0:
        _note(f"{stage} ...")


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
