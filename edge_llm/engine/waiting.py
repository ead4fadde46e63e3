"""WaitingQueue: the requests that wait for a slot, the most urgent of each owner first, within bounds."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

from edge_llm.engine.request import PRIORITIES
from edge_llm.engine.sequence import Sequence
from edge_llm.errors import QueueFullError

_SHORTEST_RETRY_S, _LONGEST_RETRY_S = 1.0, 60.0
_urgency = attrgetter("urgency")


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What may wait for a slot."""

    requests: int
    tokens: int


class WaitingQueue:
    """Ordered by `Sequence.urgency`, then by arrival, in a line for each owner. Whoever uses it holds a lock.

    Each priority is bounded as if nobody of a lower one were there: a flood of batch requests refuses no chat.
    """

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._lines: dict[str, list[Sequence]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[Sequence]:
        return chain.from_iterable(self._lines.values())

    @property
    def firsts(self) -> list[Sequence]:
        """The first of each owner, the most urgent first."""
        return sorted((line[0] for line in self._lines.values()), key=_urgency)

    def add(self, sequence: Sequence) -> None:
        insort(self._lines.setdefault(sequence.owner, []), sequence, key=_urgency)

    def remove(self, sequence: Sequence) -> None:
        line = self._lines[sequence.owner]
        line.remove(sequence)
        if not line:
            del self._lines[sequence.owner]

    def check_room(self, priority: str, owner: str, prompt_tokens: int, *, free: int, retry_s: float) -> None:
        """Raises `QueueFullError` if too many would go before a request, of whom the first `free` do not wait.

        `retry_s` is how long one of them keeps a new one waiting.
        """
        rank = PRIORITIES.index(priority)
        before = [other for other in self if other.rank <= rank]
        if free:  # who has nothing to give need not sort a long queue for each request that it refuses
            before.sort(key=_urgency)
        queued = [other for other in before[free:] if not other.preemptions]  # they were let in before
        if len(before) < free:
            return
        tokens = sum(other.prompt_tokens for other in queued)
        # a prompt longer than the whole limit may wait when its owner has no other there, or it never could
        crowded = any(other.owner == owner for other in queued) and tokens + prompt_tokens > self._limits.tokens
        if len(queued) >= self._limits.requests or crowded:
            retry_s *= len(queued) + 1
            raise QueueFullError(
                f"{len(queued)} requests with {tokens} prompt tokens are waiting already",
                retry_after_s=min(max(retry_s, _SHORTEST_RETRY_S), _LONGEST_RETRY_S),
                hint="try again later",
            )
