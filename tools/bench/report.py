"""The suite's tables, in Markdown that also reads well on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from tools.bench.figures import CellResult, Figure
from tools.bench.peers import LIMIT, OURS


def tables(results: Sequence[CellResult], threads: int) -> str:
    """A table a section: for each contestant the median, for each peer how many times as good we are and the rounds' spread.

    The machine's limit stands as the share of it that we reach.
    """
    parts = []
    for section in dict.fromkeys(result.cell.section for result in results):
        cells = [result for result in results if result.cell.section == section]
        parts.append(f"**{section}, {threads} {'thread' if threads == 1 else 'threads'}**\n\n" + _table(cells))
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
