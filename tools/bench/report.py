"""What the suite found, as text with tables in Markdown that also read well on a terminal, and as one object for JSON."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from edge_llm_cli.doctor import cpu_model

from edge_llm import machine
from tools.bench.figures import CellResult, Figure, as_object
from tools.bench.peers import LIMIT, OURS
from tools.bench.suite import Outcome


def text(outcome: Outcome) -> str:
    """Who took part, the tables, what failed, and how long it took."""
    parts = [
        f"{name}: " + ", ".join(f"{key} {value}" for key, value in facts.items())
        for name, facts in outcome.info.items()
    ]
    parts += [f"{name} is skipped: {hint}" for name, hint in outcome.skipped.items()]
    for threads, results in outcome.results.items():
        parts.append("")
        limits = outcome.limits[threads]
        if len(limits) == 2:
            parts += [
                f"With {_counted(threads)} this machine reads {limits['read_gb_per_s']:.1f} GB/s and does "
                f"{limits['dot_gop_per_s']:.0f} G operations of dot products a second.",
                "",
            ]
        parts.append(tables(results, threads))
    failed = [line for results in outcome.results.values() for line in failures(results)]
    parts += ["", *(f"failed: {line}" for line in failed), f"It took {outcome.seconds / 60:.1f} minutes."]
    return "\n".join(parts)


def document(outcome: Outcome) -> dict[str, Any]:
    """Everything, every round included."""
    cpus = machine.usable_cpus()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": cpu_model(),
            "cpus": len(cpus),
            "cores": machine.physical_cores(cpus),
            "load": outcome.load,
            "python": platform.python_version(),
            "system": platform.platform(),
        },
        "model": {
            "name": outcome.manifest.name,
            "file": outcome.source.name,
            "sha256": outcome.manifest.source.sha256,
        },
        "workers": outcome.info,
        "flags": {contestant.name: contestant.flags for contestant in outcome.contestants},
        "skipped": outcome.skipped,
        "limits": outcome.limits,
        "cells": [
            {"threads": threads, **as_object(result, OURS)}
            for threads, results in outcome.results.items()
            for result in results
        ],
        "seconds": outcome.seconds,
    }


def decode_lines(results: Sequence[CellResult]) -> dict[str, list[tuple[int, float]]]:
    """What the plot shows: each contestant's speed at each context."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for result in results:
        for name in result.values if result.cell.kind == "decode" else ():
            figure = result.figure(name)
            if figure is not None:
                lines.setdefault(name, []).append((int(result.cell.arguments["depth"]), figure.median))
    return lines


def tables(results: Sequence[CellResult], threads: int) -> str:
    """A table a section: for each contestant the median, for each peer how many times as good we are and the rounds' spread.

    The machine's limit stands as the share of it that we reach.
    """
    parts = []
    for section in dict.fromkeys(result.cell.section for result in results):
        cells = [result for result in results if result.cell.section == section]
        parts.append(f"**{section}, {_counted(threads)}**\n\n" + _table(cells))
    return "\n\n".join(parts)


def failures(results: Sequence[CellResult]) -> list[str]:
    """A line for each measurement that failed."""
    return [
        f"{result.cell.section} {result.cell.label}: {name}: {why}"
        for result in results
        for name, why in result.failures.items()
    ]


def _table(results: Sequence[CellResult]) -> str:
    names = [name for name in dict.fromkeys(name for result in results for name in result.values) if name != OURS]
    names = [name for name in names if any(result.figure(name) or name in result.failures for result in results)]
    header = [f"{results[0].cell.section}", OURS]
    for name in names:
        header += [f"share of {name}"] if name == LIMIT else [name, "ratio"]
    rows = [header]
    for result in results:
        row = [f"{result.cell.label}, {result.cell.unit.value}", _shown(result, OURS)]
        for name in names:
            ratio = result.ratio(OURS, name)
            if name == LIMIT:
                row.append("" if ratio is None else f"{100 * ratio.median:.0f} %")
            else:
                row += [_shown(result, name), _spread(ratio)]
        rows.append(row)
    return markdown(rows)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table whose first row is its header; columns are aligned."""
    widths = [max(3, *map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| "
        + " | ".join(
            text.ljust(width) if i == 0 else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        + " |"
        for row in rows
    ]
    rule = (
        "|" + "|".join("-" * (width + 2) if i == 0 else "-" * (width + 1) + ":" for i, width in enumerate(widths)) + "|"
    )
    return "\n".join([lines[0], rule, *lines[1:]])


def _shown(result: CellResult, name: str) -> str:
    figure = result.figure(name)
    if figure is None:
        return "failed" if name in result.failures else "-"
    return f"{figure.median:.{0 if figure.median >= 10 else 2}f}"


def _spread(ratio: Figure | None) -> str:
    return "" if ratio is None else f"{ratio.median:.2f} ({ratio.low:.2f} .. {ratio.high:.2f})"


def _counted(threads: int) -> str:
    return "1 thread" if threads == 1 else f"{threads} threads"
