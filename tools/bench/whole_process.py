"""Figures of whole processes: from their start to the first token of an answer, and the most memory they hold meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.bench.cells import Cell, Unit
from tools.bench.figures import CellResult
from tools.bench.peers import OURS, Contestant
from tools.bench.worker_process import WorkerError, run_once

_SECTION = "whole process"


@dataclass(frozen=True)
class Question:
    """What each process answers, greedily: `prompt`, of `prompt_tokens` tokens, in at most `max_tokens` tokens."""

    prompt: str
    prompt_tokens: int
    max_tokens: int
    context: int
    threads: int


def measure(
    contestants: Sequence[Contestant], question: Question, *, rounds: int, logs: Path, timeout_s: float
) -> tuple[CellResult, CellResult]:
    """Time to the answer, and peak memory; processes run one after another, in turn. Several rounds begin with one more that
    does not count."""
    label = f"prompt of {question.prompt_tokens}, context {question.context}"
    arguments = {"context": question.context, "prompt_tokens": question.prompt_tokens, "tokens": question.max_tokens}
    until = "first token" if question.max_tokens == 1 else f"{question.max_tokens} tokens"
    times = CellResult(Cell(_SECTION, f"start to {until}, {label}", "answer", arguments, 1, rounds, Unit.MILLISECONDS))
    memory = CellResult(Cell(_SECTION, f"peak memory, {label}", "answer", arguments, 1, rounds, Unit.MEGABYTES))
    for turn in range(-1 if rounds > 1 else 0, rounds):
        for contestant in contestants:
            seconds, megabytes = _run(contestant, question, times, logs, timeout_s)
            if turn >= 0:
                times.values.setdefault(contestant.name, []).append(None if seconds is None else 1e3 * seconds)
                memory.values.setdefault(contestant.name, []).append(megabytes)
    return times, memory


def _run(
    contestant: Contestant, question: Question, result: CellResult, logs: Path, timeout_s: float
) -> tuple[float | None, float | None]:
    """Seconds and megabytes of one process; one that has failed is not run again."""
    name = contestant.name
    if name in result.failures:
        return None, None
    log = logs / f"{name}-process.log"
    try:
        if name == OURS:
            seconds, reply = run_once(_program(contestant, question), log, timeout_s, stdin=question.prompt)
            return seconds, reply["timings"]["peak_rss_mb"]
        options = {
            "worker": contestant.options(question.threads, question.context),
            "prompt": question.prompt,
            "max_tokens": question.max_tokens,
        }
        seconds, reply = run_once(contestant.command("answer", options), log, timeout_s)
        return seconds, None if reply["peak_rss"] is None else reply["peak_rss"] / 1e6
    except WorkerError as error:
        result.failures[name] = str(error)
        return None, None


def _program(contestant: Contestant, question: Question) -> list[str]:
    """The command line that a user of ours would give."""
    options: dict[str, Any] = {
        "--model": contestant.model,
        "--context": question.context,
        "--threads": question.threads,
        "--max-tokens": question.max_tokens,
        "--temperature": 0,
    }
    flags = [str(word) for option in options.items() for word in option]
    return [contestant.python, "-c", "from edge_llm_cli.entry import run; run()", "run", "--raw", "--json", *flags]
