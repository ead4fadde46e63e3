"""Pace: how many prompt rows a step takes while others are being answered, from what steps have cost.

A step that also reads a prompt is slower, and everybody who is being answered waits for it. Few rows make the prompt late, for
each step reads all weights, and all rows before, anew for them; many make the answers stutter. So there are

    pauses           once in `_PAUSE_EVERY` steps, as much prompt as a time allows that a reader hardly sees: full steps in which
                     nobody is answered, and a last one in which all are
    ordinary steps   as many rows as make a step RATIO times as long as without them, where pauses alone would make prompts late;
                     none where so few rows are dear

Pauses read cheaply, and so rarely that the 95th percentile of the gaps between tokens does not see them. Costs are medians of
the latest measurements: other programs on the machine make single ones worthless. No result depends on any of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

RATIO = 2.0
"""what an ordinary step may cost, in steps without prompt rows"""
_PAUSE_EVERY = 36
"""steps from one pause to the next, at least: less than three in a hundred, for others may be late for other reasons"""
_PAUSE_STEPS = 110
"""what a pause may cost, in steps without prompt rows"""
_ENOUGH_STEPS = 2 * _PAUSE_EVERY
"""a pause of so many reads a prompt at two thirds of its speed alone, so that ordinary steps need not help"""
_FEW_STEPS = 8
"""ordinary steps in which a short prompt may be read nevertheless, if it is there sooner than with the next pause"""
_PAUSE_FROM = 3
"""steps without prompt rows that a step takes if it was a pause"""
_DEAR = 1.7
"""how much more rows of ordinary steps may cost than those of pauses"""
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
    """Most prompt rows of a step: `alone`, or `mixed` while others are being answered. A pause takes at most `pause_s`
    seconds; there are none if that is 0."""

    alone: int
    mixed: int
    pause_s: float


@dataclass(frozen=True, slots=True)
class Portion:
    """What a step may take of prompts: `rows`. Those who are answered stand still meanwhile if it `holds` them."""

    rows: int
    holds: bool = False


def _median_low(values: Iterable[float]) -> float:
    """As of `statistics`, which would load decimals and fractions at every start."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


class _Cost:
    """Median of the latest five measurements, in seconds; None without any."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=5)
        self.median: float | None = None

    @property
    def least(self) -> float:
        """Of these: what else goes on only makes steps slower. 0 without any."""
        return min(self._values, default=0.0)

    def add(self, seconds: float) -> None:
        self._values.append(seconds)
        self.median = _median_low(self._values)

    def forget_one(self) -> None:
        """Where nothing is measured any more, what is known goes after a while, and is tried again."""
        if self._values:
            self._values.popleft()
        self.median = _median_low(self._values) if self._values else None


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
    """Learns by `observe`, tells by `portion`. One thread."""

    def __init__(self, chunks: ChunkPolicy) -> None:
        self._chunks = chunks
        self._plain: dict[int, _Plain] = {}
        self._row, self._pause_row = _RowCosts(), _RowCosts()
        self._since_pause = _PAUSE_EVERY
        self._spent_s = 0.0
        """seconds of steps of the pause that goes on, in which nobody was answered"""
        self._most = 2 * _FIRST_ROWS

    def portion(self, answered: int, depth: int, pending: int, behind: int = 0) -> Portion:
        """What the next step may take of a prompt of which `depth` rows are there and `pending` are not, and of others with
        `behind` rows to read, while `answered` requests are answered. Nothing, at times; then it is asked again before the
        next step."""
        if not answered:
            return Portion(self._chunks.alone)
        plain = self._plain.get(answered)
        if plain is None or plain.cost.median is None or plain.wanted > 0:
            return Portion(0)
        plain_s, row_s, pause_row_s = plain.cost.median, self._row.known(depth), self._pause_row.known(depth)
        rows = _affordable((RATIO - 1) * plain_s, row_s, min(self._chunks.mixed, self._most))
        if not self._chunks.pause_s:
            return Portion(max(rows, 1))
        pause_s = min(self._chunks.pause_s, _PAUSE_STEPS * plain_s)
        if pause_row_s is None:
            pause_row_s = row_s
        if self._spent_s or self._since_pause >= _PAUSE_EVERY:
            alone = self._chunks.alone
            fits = _affordable(pause_s - self._spent_s - plain_s, pause_row_s, alone + 1)
            return Portion(max(rows, min(fits, alone), 1), holds=fits > alone and pending + behind > alone)
        if row_s is None or pause_row_s is None:
            return Portion(rows)
        waits_s = (_PAUSE_EVERY - self._since_pause) * plain_s + pending * pause_row_s
        soon = pending <= _FEW_STEPS * rows and pending * RATIO * plain_s < waits_s * rows
        enough = pause_s >= _ENOUGH_STEPS * plain.cost.least and not soon
        return Portion(0 if enough or row_s > _DEAR * pause_row_s else rows)

    def observe(self, answered: int, prompt_rows: int, depth: int, seconds: float, *, held: int = 0) -> None:
        """A step has taken so long; its first prompt had `depth` rows before it, and `held` who would be answered stood still."""
        if not answered:
            if prompt_rows > self._chunks.mixed:
                self._pause_row.at(depth).add(seconds / prompt_rows)
            self._spent_s = self._spent_s + seconds if held else 0.0
            return
        plain = self._plain.setdefault(answered, _Plain())
        self._since_pause += 1
        paused, self._spent_s = self._spent_s > 0, 0.0
        if paused:
            self._since_pause = 0
        if not prompt_rows:
            plain.cost.add(seconds)
            plain.wanted, plain.age = plain.wanted - 1, 0
            return
        plain.age += 1
        if plain.age >= _STALE:
            plain.wanted = 1
        if plain.cost.median is None:
            return
        guessed = self._row.known(depth) is None and self._pause_row.known(depth) is None
        row_s = max(0.0, seconds - plain.cost.median) / prompt_rows
        if prompt_rows > self._chunks.mixed:
            self._pause_row.at(depth).add(row_s)
            self._row.at(depth).forget_one()
        else:
            self._row.at(depth).add(row_s)
        if self._since_pause > _PAUSE_EVERY and seconds > _PAUSE_FROM * plain.cost.median and not guessed:
            self._since_pause = 0
        elif not paused:
            self._most = 2 * max(prompt_rows, _FIRST_ROWS)  # one lucky measurement must not make the next step huge


def _affordable(seconds: float, row_s: float | None, most: int) -> int:
    """Rows that can be had in so much time, at most `most`."""
    if seconds <= 0:
        return 0
    if row_s is None:
        return min(most, _FIRST_ROWS)
    return int(seconds / row_s) if seconds < most * row_s else most
