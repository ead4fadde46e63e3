"""Parking: who of those who run waits again, so that somebody else can run."""

from __future__ import annotations

from collections.abc import Callable, Collection

from edge_llm.engine.owners import slots_held
from edge_llm.engine.request import PRIORITIES
from edge_llm.engine.sequence import Sequence

_TURNS = PRIORITIES.index("normal")
"""the lowest priority that takes turns: batch requests among themselves would only take longer, all of them"""


def victims(
    first: Sequence, running: Collection[Sequence], fits: Callable[[Collection[Sequence]], bool], now: float
) -> list[Sequence]:
    """Who is to be parked so that `first` can run; nobody if it can run without, or could not even so.

    Those of lower priorities, the least urgent first; then of owners who have more slots without one than the owner of `first`
    has with it, the last; then those who have had a turn, of owners who have more or are the same. But for the second, only
    such whose next turn is later. `fits` tells whether `first` can run without those that it is given.
    """
    chosen: list[Sequence] = []
    if fits(chosen):
        return chosen
    held = slots_held(running)

    def later(one: Sequence) -> bool:
        return one.urgency_if_parked(now) > first.urgency

    def more(one: Sequence) -> int:
        """Slots that its owner has more than that of `first`."""
        return held[one.owner] - held[first.owner]

    lower = sorted((one for one in running if one.rank > first.rank), key=lambda one: -one.urgency)
    equal = sorted((one for one in running if one.rank >= first.rank), key=lambda one: (-held[one.owner], -one.urgency))
    least = min(first.rank, _TURNS)
    turns = sorted((one for one in running if one.rank <= least and one.had_turn(now)), key=lambda one: one.since)
    for candidates, gives_way in (
        (lower, later),
        (equal, lambda one: more(one) > first.width),
        (turns, lambda one: later(one) and (more(one) > 0 or one.owner == first.owner)),
    ):
        for one in candidates:
            if one.beams is None and one not in chosen and gives_way(one):
                chosen.append(one)
                held[one.owner] -= 1
                if fits(chosen):
                    return chosen
    return []
