"""Where an answer ends: stop strings, found in text that comes in chunks.

The answer ends as soon as any stop string is complete, before its first character; if two are complete at the same
character, before the longer one. So what is said does not depend on how the text was cut into chunks, and only text
that may still become a stop string is held back. One pass of Aho and Corasick's automaton (1975): the time is linear in
the text, whatever the stops are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopResult:
    """`text` may be shown. `matched` is the stop string that ended the answer, or None."""

    text: str
    matched: str | None = None


class _State:
    """A place in the tree of stops: `depth` characters of one are read; `match` is the longest stop that ends here."""

    __slots__ = ("depth", "fallback", "match", "next")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.next: dict[str, _State] = {}
        self.fallback: _State = self
        self.match: str | None = None


class StopMatcher:
    """Feed it the text of one answer. After a match, everything that follows is dropped."""

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise ValueError("an empty stop would end every answer")
        self._root = self._state = _tree(stops)
        self._held = ""
        self._ended = False

    def feed(self, chunk: str) -> StopResult:
        if self._ended:
            return StopResult("")
        text = self._held + chunk
        state = self._state
        for read, character in enumerate(chunk, len(self._held) + 1):
            while character not in state.next and state is not self._root:
                state = state.fallback
            state = state.next.get(character, self._root)
            if state.match is not None:
                self._ended = True
                self._held = ""
                return StopResult(text[: read - len(state.match)], state.match)
        self._state = state
        shown = len(text) - state.depth
        self._held = text[shown:]
        return StopResult(text[:shown])

    def flush(self) -> str:
        """What was held back, once the answer has ended by itself."""
        held, self._held, self._state = self._held, "", self._root
        return held


def _tree(stops: Sequence[str]) -> _State:
    root = _State(0)
    for stop in stops:
        state = root
        for character in stop:
            state = state.next.setdefault(character, _State(state.depth + 1))
        state.match = stop
    pending = deque(root.next.values())
    for state in pending:
        state.fallback = root
    while pending:
        parent = pending.popleft()
        parent.match = parent.match or parent.fallback.match
        for character, state in parent.next.items():
            place = parent.fallback
            while character not in place.next and place is not root:
                place = place.fallback
            state.fallback = place.next.get(character, root)
            pending.append(state)
    return root
