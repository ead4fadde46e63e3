"""Pace: how many prompt rows a step takes while others are being answered, from what steps have cost.

A step that also reads a prompt is slower, and everybody who is being answered waits for it. Few rows make the prompt late, for
each step reads all weights, and all rows before, anew for them; many make the answers stutter. So there are two kinds:

    ordinary   as many rows as make a step RATIO times as long as without them; none where so few rows are dear
    long       once in `_LONG_EVERY` steps, as many as a pause allows that a reader hardly sees

A long step reads cheaply, and so rarely that the 95th percentile of the gaps between tokens does not see it. Costs are medians of
the latest measurements: other programs on the machine make single ones worthless. No result depends on any of it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median_low

RATIO = 2.0
"""what an ordinary step may cost, in steps without prompt rows"""
_LONG_EVERY = 24
"""steps from one long one to the next, at least"""
_LONG_STEPS = 60
"""what a long step may cost, in steps without prompt rows: enough to read a prompt at two thirds of its speed alone"""
_LONG_FROM = 3
"""steps without prompt rows that a step takes if it was a long one"""
_DEAR = 1.7
"""how much more rows of ordinary steps may cost than those of long ones"""
_FIRST_ROWS = 16
"""while nothing is known"""
_ENOUGH = 3
"""measurements before steps without prompt rows count as known"""
_STALE = 256
"""mixed steps after which another one is made"""
_STEEPEST = 1.5
"""most that a row is expected to cost at a new depth, as a multiple of the last one"""
_DEPTHS = 512
"""rows before a prompt's next one, within which one costs about the same"""


@dataclass(frozen=True, slots=True)
class ChunkPolicy:
    """Most prompt rows of a step: `alone`, or `mixed` while others are being answered. A long step takes at most `pause_s`
    seconds and `alone` rows; there are none if that is 0."""

    alone: int
    mixed: int
    pause_s: float


class _Cost:
    """Median of the latest five measurements, in seconds; None without any."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=5)
        self.median: float | None = None

    def add(self, seconds: float) -> None:
        self._values.append(seconds)
        self.median = median_low(self._values)

    def forget_one(self) -> None:
        """Where nothing is measured any more, what is known goes after a while, and is tried again."""
        if self._values:
            self._values.popleft()
        self.median = median_low(self._values) if self._values else None


class _RowCosts:
    """What a prompt row costs after so many others (its depth), for it attends to them."""

    def __init__(self) -> None:
        self._costs: dict[int, _Cost] = {}

    def at(self, depth: int) -> _Cost:
        return self._costs.setdefault(depth // _DEPTHS, _Cost())

    def known(self, depth: int) -> float | None:
        """At this depth, or what those that are known let expect, lower ones first; None before the first measurement."""
        place = depth // _DEPTHS
        known = {place: cost.median for place, cost in self._costs.items() if cost.median is not None}
        lower = sorted((one for one in known if one <= place), reverse=True)
        if not lower:
            return known[min(known)] if known else None
        nearest, cost_s = lower[0], known[lower[0]]
        if nearest == place or len(lower) == 1:
            return cost_s
        growth_s = (cost_s - known[lower[1]]) / (nearest - lower[1])
        return min(max(cost_s, cost_s + growth_s * (place - nearest)), _STEEPEST * cost_s)


@dataclass(slots=True)
class _Plain:
    """Steps without prompt rows, for so many who are answered."""

    cost: _Cost = field(default_factory=_Cost)
    wanted: int = _ENOUGH
    """measurements to be made before the next mixed step"""
    age: int = 0
    """mixed steps since the last one"""


class Pace:
    """Learns by `observe`, tells by `prompt_rows`. One thread."""

    def __init__(self, chunks: ChunkPolicy) -> None:
        self._chunks = chunks
        self._plain: dict[int, _Plain] = {}
        self._row, self._long_row = _RowCosts(), _RowCosts()
        self._since_long = _LONG_EVERY
        self._most = 2 * _FIRST_ROWS

    def prompt_rows(self, answered: int, depth: int) -> int:
        """Rows that the next step may take of a prompt of which `depth` are there, while `answered` requests are answered;
        0: none this time."""
        if not answered:
            return self._chunks.alone
        plain = self._plain.get(answered)
        if plain is None or plain.cost.median is None or plain.wanted > 0:
            return 0
        plain_s, row_s, long_row_s = plain.cost.median, self._row.known(depth), self._long_row.known(depth)
        rows = _affordable((RATIO - 1) * plain_s, row_s, min(self._chunks.mixed, self._most))
        if not self._chunks.pause_s:
            return max(rows, 1)
        if self._since_long >= _LONG_EVERY:
            seconds = min(self._chunks.pause_s, _LONG_STEPS * plain_s) - plain_s
            return max(rows, 1, _affordable(seconds, row_s if long_row_s is None else long_row_s, self._chunks.alone))
        dear = row_s is not None and long_row_s is not None and row_s > _DEAR * long_row_s
        return 0 if dear else rows

    def observe(self, answered: int, prompt_rows: int, depth: int, seconds: float) -> None:
        """A step has taken so long; its first prompt had `depth` rows before it."""
        if not answered:
            return
        plain = self._plain.setdefault(answered, _Plain())
        self._since_long += 1
        if not prompt_rows:
            plain.cost.add(seconds)
            plain.wanted, plain.age = plain.wanted - 1, 0
            return
        plain.age += 1
        if plain.age >= _STALE:
            plain.wanted = 1
        if plain.cost.median is None:
            return
        row_s = max(0.0, seconds - plain.cost.median) / prompt_rows
        if prompt_rows > self._chunks.mixed:
            self._long_row.at(depth).add(row_s)
            self._row.at(depth).forget_one()
        else:
            self._row.at(depth).add(row_s)
        if self._since_long > _LONG_EVERY and seconds > _LONG_FROM * plain.cost.median:
            self._since_long = 0
        else:
            self._most = 2 * max(prompt_rows, _FIRST_ROWS)  # one lucky measurement must not make the next step huge


def _affordable(seconds: float, row_s: float | None, most: int) -> int:
    """Rows that can be had in so much time, at most `most`."""
    if row_s is None:
        return min(most, _FIRST_ROWS)
    return max(0, int(seconds / row_s)) if seconds < most * row_s else most
