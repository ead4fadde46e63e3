"""Decoders: how every strategy of choosing tokens enters a step. The loop knows this protocol and no strategy.

A step runs the tokens of a sequence that are not in the cache yet, then the drafts that its decoder proposed, and hands
the decoder the logits that follow the last token and each draft. What fits this shape:

    sampled (greedy at temperature 0)  proposes nothing, accepts one token
    speculative                        proposes drafts, accepts its own choices for as long as they equal the drafts
    grammar                            masks each row; what the grammar leaves no choice about comes back as `forced`
    beam                               one decoder over several branches of a sequence: row j follows branch j
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from edge_llm.messages import FinishReason
from edge_llm.sampling.sampler import Sampled, SequenceSampler

if TYPE_CHECKING:
    from edge_llm.sampling.grammar_compiler import Matcher


@dataclass(frozen=True, slots=True)
class Selection:
    """What a decoder chose in one step."""

    accepted: tuple[Sampled, ...]
    """the next tokens, in order; all but the last equal the drafts, whose rows thereby count"""
    forced: tuple[int, ...] = ()
    """tokens that must follow and need no choice: the next step runs them before it asks for logits"""
    finish: FinishReason | None = None
    """the decoder has nothing to add after these tokens"""


class Decoder(Protocol):
    """Chooses the tokens of one request; has state, used by one thread."""

    @property
    def seed(self) -> int:
        """What makes the answer repeatable."""
        ...

    def propose(self, room: int) -> tuple[int, ...]:
        """At most `room` draft tokens to try after the last token. A guess: it changes no choice and never raises."""
        ...

    def select(self, logits: np.ndarray) -> Selection:
        """Choose from float32 [1 + drafts, vocab]: row 0 follows the last token, row j the draft j - 1.

        The array is only valid during the call. Raises `GenerationError` if nothing can be chosen.
        """
        ...


class SampledDecoder:
    """One token a step, drawn with the counter of its own index; temperature 0 makes it greedy."""

    def __init__(self, sampler: SequenceSampler) -> None:
        self._sampler = sampler
        self._index = 0

    @property
    def seed(self) -> int:
        return self._sampler.seed

    def propose(self, room: int) -> tuple[int, ...]:
        return ()

    def select(self, logits: np.ndarray) -> Selection:
        sampled = self._sampler.sample(logits[0], self._index)
        self._sampler.observe(sampled.token_id)
        self._index += 1
        return Selection((sampled,))


class GrammarDecoder:
    """As `SampledDecoder` within a grammar. What the grammar leaves no choice about follows without being sampled."""

    def __init__(self, sampler: SequenceSampler, matcher: Matcher) -> None:
        self._sampler = sampler
        self._matcher = matcher
        self._index = 0

    @property
    def seed(self) -> int:
        return self._sampler.seed

    def propose(self, room: int) -> tuple[int, ...]:
        return ()

    def select(self, logits: np.ndarray) -> Selection:
        sampled = self._sampler.sample(logits[0], self._index, self._matcher.mask())
        self._matcher.accept(sampled.token_id)
        forced = () if self._matcher.finished else tuple(self._matcher.forced())
        for token_id in (sampled.token_id, *forced):
            self._sampler.observe(token_id)
        self._index += 1 + len(forced)
        return Selection((sampled,), forced, FinishReason.STOP if self._matcher.finished else None)
