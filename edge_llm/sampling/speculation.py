"""Speculative decoding from the text itself: what followed the last words before is tried as the next tokens.

One step checks several tokens at the cost of little more than one, for the rows share each load of the weights. A token is
accepted while it equals the sampler's own choice at its place, drawn with that place's own counter: the answer is the one
without speculation, token for token, at any temperature. (Prompt lookup: Saxena, 2023; speculative decoding: Leviathan,
Kalman, Matias, arXiv:2211.17192, whose rejection sampling equal draws make needless.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from edge_llm.sampling.decoders import Selection, never
from edge_llm.sampling.sampler import SequenceSampler

MATCHED = 4
"""tokens that must have occurred before in this order"""
MAX_DRAFT = 10
"""drafts of a step: with more rows than this a step is no longer bound by the weights' loads"""
_FIRST_DRAFT, _SHORTEST = 3, 1
"""drafts of the first step and after each pause, and the fewest"""
_WORTH = 0.25
"""accepted drafts of those tried, averaged, below which drafting pauses: a row costs a tenth of a step"""
_MEMORY = 0.8
"""weight of the past in that average"""
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 512
"""tokens"""


class PromptLookup:
    """Finds what followed the last tokens when they last occurred, in prompt or answer."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        for token_id in ids:
            self.observe(token_id)

    def observe(self, token_id: int) -> None:
        """The text goes on with `token_id`."""
        if len(self._ids) >= MATCHED:
            self._after[tuple(self._ids[-MATCHED:])] = len(self._ids)
        self._ids.append(token_id)

    def draft(self, length: int) -> tuple[int, ...]:
        """At most `length` tokens."""
        start = self._after.get(tuple(self._ids[-MATCHED:])) if length > 0 else None
        return () if start is None else tuple(self._ids[start : start + length])


class SpeculativeDecoder:
    """As `SampledDecoder`, with drafts. It drafts more where drafts are right, and pauses where they are not."""

    def __init__(self, sampler: SequenceSampler, prompt_ids: Sequence[int]) -> None:
        self._sampler = sampler
        self._lookup = PromptLookup(prompt_ids)
        self.index = 0
        self.ends_with: Callable[[int], bool] = never
        self._drafts: tuple[int, ...] = ()
        self._length = _FIRST_DRAFT
        self._rate = 1.0
        self._pause = _FIRST_PAUSE
        self._resume_at = 0

    @property
    def seed(self) -> int:
        return self._sampler.seed

    def follow(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._lookup.observe(token_id)
        self.index += len(token_ids)

    def propose(self, room: int) -> tuple[int, ...]:
        waits = self.index < self._resume_at
        self._drafts = () if waits else self._lookup.draft(min(room, self._length))
        return self._drafts

    def select(self, logits: np.ndarray) -> Selection:
        drafts = self._drafts[: len(logits) - 1]
        accepted = []
        for row, draft in zip(logits, (*drafts, None), strict=True):
            sampled = self._sampler.sample(row, self.index)
            self._sampler.observe(sampled.token_id)
            self._lookup.observe(sampled.token_id)
            self.index += 1
            accepted.append(sampled)
            if self.ends_with(sampled.token_id) or sampled.token_id != draft:
                break
        if drafts:
            self._learn(len(drafts), len(accepted) - 1)
        return Selection(tuple(accepted))

    def _learn(self, tried: int, right: int) -> None:
        self._length = min(MAX_DRAFT, max(_SHORTEST, 2 * right))
        self._rate = _MEMORY * self._rate + (1 - _MEMORY) * right / tried
        if self._rate < _WORTH:
            self._resume_at = self.index + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            self._length = min(self._length, _FIRST_DRAFT)
            self._rate = 1.2 * _WORTH  # one more failure, and it pauses again
        elif right == tried:
            self._pause = _FIRST_PAUSE
