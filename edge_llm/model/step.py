"""What one step of a session computes: a flattened ragged batch of segments, one for each sequence that takes part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Segment:
    """`token_ids` go into cache slot `slot` from `position` on, where it ends; logits are wanted of the last `logit_rows` rows.

    A prompt chunk that is not the last wants 0, a decode row 1, a row with drafts all of them.
    """

    slot: int
    position: int
    token_ids: Sequence[int]
    logit_rows: int = 0

    @property
    def rows(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class Step:
    """Segments of different slots, in the order in which their logits come back."""

    segments: tuple[Segment, ...]

    @cached_property
    def rows(self) -> int:
        return sum(segment.rows for segment in self.segments)

    @cached_property
    def logit_rows(self) -> int:
        return sum(segment.logit_rows for segment in self.segments)
