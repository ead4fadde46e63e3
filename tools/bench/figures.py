"""Figure: what several rounds gave, in one number and its spread; and how contestants compare, round by round."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from tools.bench.cells import Cell


@dataclass(frozen=True)
class Figure:
    """Median, least and greatest of the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self | None:
        """None if there are no values."""
        return cls(statistics.median(values), min(values), max(values)) if values else None


@dataclass
class CellResult:
    """What the contestants did in one cell: a value for each round, None where there is none; and what went wrong."""

    cell: Cell
    values: dict[str, list[float | None]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def figure(self, name: str) -> Figure | None:
        return Figure.of([value for value in self.values.get(name, []) if value is not None])

    def ratio(self, ours: str, theirs: str) -> Figure | None:
        """How many times as good `ours` was, in those rounds that both finished: machine and minute were the same."""
        pairs = zip(self.values.get(ours, []), self.values.get(theirs, []), strict=False)
        unit = self.cell.unit
        return Figure.of([unit.advantage(a, b) for a, b in pairs if a is not None and b is not None])


def as_object(result: CellResult, ours: str) -> dict[str, object]:
    """For the JSON line."""
    cell = result.cell
    arguments = {name: value for name, value in cell.arguments.items() if name not in ("text", "prompt")}
    return {
        "section": cell.section,
        "label": cell.label,
        "kind": cell.kind,
        **arguments,
        "unit": cell.unit.value,
        "results": {name: _fields(result.figure(name)) | {"rounds": values} for name, values in result.values.items()},
        "advantage": {
            name: _fields(ratio)
            for name in result.values
            if name != ours and (ratio := result.ratio(ours, name)) is not None
        },
        "failures": result.failures,
    }


def _fields(figure: Figure | None) -> dict[str, object]:
    return {} if figure is None else {"median": figure.median, "low": figure.low, "high": figure.high}
