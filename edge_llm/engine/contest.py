"""A contest: is any other value of a setting faster than the usual one, beyond what chance does?

All values are measured in turn, round after round, each round beginning with another one: a machine that slows down slows all
of them. A value wins that beats the usual one by the margin in all rounds but one; whoever has lost two is out, so that a
contest without a difference is short. Of two values that are equally fast, or nearer than the margin, one beats the other so
in at most half of the rounds: it wins at most 10 of 512 contests.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

ROUNDS = 9
_MOST_LOST = 1


@dataclass(frozen=True)
class Verdict:
    """The value to take, and how much faster than the usual one it was (0.1: 10 %; median of the rounds)."""

    chosen: int
    gain: float
    rounds: int


def contest(
    usual: int,
    others: Sequence[int],
    measure: Callable[[int], float],
    *,
    margin: float,
    progress: Callable[[int], None] = lambda _rounds: None,
) -> Verdict:
    """Find the fastest by `measure(value)`, seconds above 0. `progress` is told the rounds that are done.

    `margin` is how much faster a value must be in a round (0.03: 3 %). Each is measured once before, which does not count.
    """
    faster: dict[int, list[float]] = {value: [] for value in others}
    if others:
        for value in (usual, *others):
            measure(value)
    rounds = 0
    while faster and rounds < ROUNDS:
        progress(rounds)
        seconds = {value: measure(value) for value in _turned([usual, *faster], rounds)}
        rounds += 1
        for value in list(faster):
            faster[value].append(seconds[usual] / seconds[value] - 1)
            if sum(gain < margin for gain in faster[value]) > _MOST_LOST:
                del faster[value]
    gains = {value: statistics.median(found) for value, found in faster.items()}
    if not gains:
        return Verdict(usual, 0.0, rounds)
    best = max(gains, key=lambda value: gains[value])
    return Verdict(best, gains[best], rounds)


def _turned(values: list[int], by: int) -> list[int]:
    first = by % len(values)
    return values[first:] + values[:first]
