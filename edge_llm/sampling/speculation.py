"""Speculative decoding: what a source of drafts expects is tried as the next tokens.

The text itself is such a source: what followed the last words before may follow again. A smaller model is another
(engine/draft_model.py). One step checks several tokens at the cost of little more than one, for the rows share each load of
the weights. A token is accepted while it equals the sampler's own choice at its place, drawn with that place's own counter:
the answer is the one without speculation, token for token, at any temperature. (Prompt lookup: Saxena, 2023; speculative
decoding: Leviathan, Kalman, Matias, arXiv:2211.17192, whose rejection sampling equal draws make needless.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from edge_llm.sampling.decoders import Selection, never
from edge_llm.sampling.sampler import SequenceSampler

MATCHED = 4
"""tokens that must have occurred before in this order"""
MAX_DRAFT = 10
"""drafts of a step: with more rows than this a step is no longer bound by the weights' loads"""
_FIRST_DRAFT, _SHORTEST = 3, 1
"""drafts of the first step and after each pause, and the fewest"""
ROW_COST = 0.1
"""steps that one more row of a step costs"""
_WORTH = 0.25
"""accepted drafts of those tried, averaged, below which drafting pauses, if they cost nothing but their rows"""
_MEMORY = 0.8
"""weight of the past in that average"""
_MARGIN = 0.05
"""by which the average begins above that after a pause: one more failure, and it pauses again"""
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 512
"""tokens"""


class DraftSource(Protocol):
    """Expects something of a text that grows."""

    cost: float
    """of one draft, in steps of the model that will check it"""

    def observe(self, token_id: int) -> None:
        """The text goes on with `token_id`."""
        ...

    def draft(self, length: int) -> tuple[int, ...]:
        """At most `length` tokens that may come next; none where it expects nothing."""
        ...


class PromptLookup:
    """Finds what followed the last tokens when they last occurred, in prompt or answer."""

    cost = 0.0

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        for token_id in ids:
            self.observe(token_id)

    def observe(self, token_id: int) -> None:
        if len(self._ids) >= MATCHED:
            self._after[tuple(self._ids[-MATCHED:])] = len(self._ids)
        self._ids.append(token_id)

    def draft(self, length: int) -> tuple[int, ...]:
        start = self._after.get(tuple(self._ids[-MATCHED:])) if length > 0 else None
        return () if start is None else tuple(self._ids[start : start + length])


class _Trials:
    """How much of a source is tried: more where it is right, nothing for a while where it is not."""

    def __init__(self, source: DraftSource) -> None:
        self.source = source
        self._worth = _WORTH + source.cost
        self._length = _FIRST_DRAFT
        self._rate = 1.0
        self._pause = _FIRST_PAUSE
        self._resume_at = 0

    def draft(self, room: int, index: int) -> tuple[int, ...]:
        """At most `room` drafts for the tokens from `index` of the answer on."""
        return () if index < self._resume_at else self.source.draft(min(room, self._length))

    def learn(self, tried: int, right: int, index: int) -> None:
        """`right` of the drafts were accepted; the answer has `index` tokens now."""
        # a draft that costs something is only worth it where the one before is likely to be right
        longer = right + 1 if self.source.cost else 2 * right
        self._length = min(MAX_DRAFT, max(_SHORTEST, longer))
        self._rate = _MEMORY * self._rate + (1 - _MEMORY) * right / tried
        if self._rate < self._worth:
            self._resume_at = index + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            self._length = min(self._length, _FIRST_DRAFT)
            self._rate = self._worth + _MARGIN
        elif right == tried:
            self._pause = _FIRST_PAUSE


class SpeculativeDecoder:
    """As `SampledDecoder`, with drafts."""

    def __init__(self, sampler: SequenceSampler, sources: Sequence[DraftSource]) -> None:
        """Each step tries drafts of the first of the `sources` that has some; they know the prompt already."""
        self._sampler = sampler
        self._sources = [_Trials(source) for source in sources]
        self.index = 0
        self.ends_with: Callable[[int], bool] = never
        self._drafts: tuple[int, ...] = ()
        self._tried: _Trials | None = None

    @property
    def seed(self) -> int:
        return self._sampler.seed

    def follow(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._observe(token_id)

    def propose(self, room: int) -> tuple[int, ...]:
        self._drafts = ()
        for trials in self._sources:
            if drafts := trials.draft(room, self.index):
                self._drafts, self._tried = drafts, trials
                break
        return self._drafts

    def select(self, logits: np.ndarray) -> Selection:
        drafts = self._drafts[: len(logits) - 1]
        accepted = []
        for row, draft in zip(logits, (*drafts, None), strict=True):
            sampled = self._sampler.sample(row, self.index)
            self._sampler.observe(sampled.token_id)
            self._observe(sampled.token_id)
            accepted.append(sampled)
            if self.ends_with(sampled.token_id) or sampled.token_id != draft:
                break
        if drafts:
            assert self._tried is not None
            self._tried.learn(len(drafts), len(accepted) - 1, self.index)
        return Selection(tuple(accepted))

    def _observe(self, token_id: int) -> None:
        for trials in self._sources:
            trials.source.observe(token_id)
        self.index += 1
