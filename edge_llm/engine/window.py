"""ContextWindow: what of a conversation its end still attends to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edge_llm.errors import ParameterError
from edge_llm.kernels.layout import MAX_POSITION, TILE


@dataclass(frozen=True, slots=True)
class ContextWindow:
    """The row at position p attends to the first `sinks` tokens and to the `context - sinks` tokens that end with p.

    So a conversation of at most `context` tokens forgets nothing. The rule is that of the attention op and its cache
    (StreamingLLM, arXiv:2309.17453).
    """

    context: int
    sinks: int = TILE

    def limit(self, policy: str) -> int:
        """Tokens that a conversation may have. Raises `ParameterError` for `slide` in a context that sinks fill."""
        if policy != "slide":
            return self.context
        if self.context <= self.sinks:
            raise ParameterError(
                f"a context of {self.context} tokens is too small to slide: the first {self.sinks} always stay",
                hint=f"ask for a context of more than {self.sinks} tokens, or for the context policy error",
            )
        return MAX_POSITION

    def forgotten(self, rows: int) -> range:
        """Positions that the last of `rows` rows does not attend to."""
        return range(self.sinks, max(self.sinks, rows - (self.context - self.sinks)))

    def forgotten_places(self, places: Sequence[range], rows: int) -> tuple[int, ...]:
        """Indices of those of which the last of `rows` rows attends to no token."""
        gone = self.forgotten(rows)
        if not gone:
            return ()
        return tuple(i for i, place in enumerate(places) if gone.start <= place.start and place.stop <= gone.stop)
