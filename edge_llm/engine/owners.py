"""Owners: whose turn it is by what each has had. Virtual token counters, as in Sheng et al., "Fairness in Serving Large Language
Models" (OSDI 2024), with the floor of start-time fair queueing (Goyal et al., 1996).

Requests of one owner keep the order that they have without others. Between owners the next is whoever has had the least,
but only in the place of a request that is no more urgent by its priority than its own: priorities and waiting count as before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

from edge_llm.engine.request import PRIORITIES
from edge_llm.engine.sequence import Phase, Sequence

_ANSWER_TOKEN = 2
"""what a token of an answer counts, in tokens of prompts that are read"""


class _Ledger:
    """Tokens that owners have had while somebody wanted more than it got.

    Nobody counts as having had less than the one with the least who keeps waiting: who wanted nothing has no credit from that.
    """

    def __init__(self) -> None:
        self._above: dict[str, int] = {}
        """of those who have had more than the floor"""
        self._floor = 0
        self._wanting: set[str] = set()

    def had(self, owner: str) -> int:
        return self._above.get(owner, self._floor)

    def add(self, owner: str, tokens: int) -> None:
        self._above[owner] = self.had(owner) + tokens

    def update(self, wanting: set[str]) -> None:
        """These have work that waits now. If nobody of them had before, everybody has had what it wanted: all are equal."""
        stayed = wanting & self._wanting
        self._wanting = wanting
        self._floor = min(map(self.had, stayed), default=0)
        self._above = {owner: had for owner, had in self._above.items() if stayed and had > self._floor}


class Owners:
    """For the thread that runs the steps."""

    def __init__(self) -> None:
        # one for each priority, of that and more urgent ones: what nobody waits for is held against nobody who waits
        self._ledgers = tuple(_Ledger() for _ in PRIORITIES)

    def update(self, wanting: Collection[Sequence]) -> None:
        """The first of each owner that waits for a slot, and those whose prompts are being read."""
        for rank, ledger in enumerate(self._ledgers):
            ledger.update({one.owner for one in wanting if one.rank <= rank})

    def served(self, sequence: Sequence, rows: int) -> None:
        """As `Scheduler.served`."""
        tokens = rows if sequence.phase is Phase.PREFILL else _ANSWER_TOKEN * rows
        for ledger in self._ledgers[sequence.rank :]:
            ledger.add(sequence.owner, tokens)

    def first(self, firsts: list[Sequence], held: Mapping[str, int]) -> Sequence | None:
        """Who gets the next slot, of the first of each owner in the order of their urgency; `held` are the owners' slots."""
        if len(firsts) < 2:
            return firsts[0] if firsts else None
        had = self._ledgers[firsts[0].rank].had
        return min(_rivals(firsts), key=lambda one: (had(one.owner), held[one.owner]))

    def in_turn(self, prompts: list[Sequence]) -> list[Sequence]:
        """Prompts in the order in which they are read, from that in which they would be if all had one owner: next is the one
        that leaves its owner with the least once it is read. So a short one passes, and one that was begun goes on."""
        if len({one.owner for one in prompts}) < 2:
            return prompts
        left, ordered, ahead = list(prompts), list[Sequence](), Counter[str]()
        while left:
            had = self._ledgers[left[0].rank].had
            firsts = {one.owner: one for one in reversed(left)}
            finish = {one: had(one.owner) + ahead[one.owner] + one.pending for one in firsts.values()}
            chosen = min(_rivals([one for one in left if one in finish]), key=finish.__getitem__)
            left.remove(chosen)
            ordered.append(chosen)
            ahead[chosen.owner] += chosen.pending
        return ordered


def slots_held(running: Iterable[Sequence]) -> Counter[str]:
    """Slots of each owner."""
    held = Counter[str]()
    for one in running:
        held[one.owner] += one.width
    return held


def _rivals(firsts: list[Sequence]) -> Iterator[Sequence]:
    """Those who may take the place of the first."""
    return (one for one in firsts if one.rank <= firsts[0].rank)
