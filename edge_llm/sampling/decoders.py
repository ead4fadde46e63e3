"""Decoders: how every strategy of choosing tokens enters a step. The loop knows this protocol and no strategy.

A step runs the tokens of a sequence that are not in the cache yet, then the drafts that its decoder proposed, and hands
the decoder the logits that follow the last token and each draft. What fits this shape:

    sampled (greedy at temperature 0)  proposes nothing, accepts one token
    speculative                        proposes drafts, accepts its own choices for as long as they equal the drafts
    triggered                          sampled, but for parts of the answer that a grammar rules
    grammar                            masks each row; what the grammar leaves no choice about comes back as `forced`
    beam                               accepts nothing until the end, but tells which branches the sequence goes on with
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
    branches: tuple[tuple[int, int], ...] = ()
    """the sequence goes on in as many ways: (the branch that each follows, its next token). Of the next logits row j follows
    branch j"""


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


class FreeDecoder(Decoder, Protocol):
    """A decoder that others may take turns with."""

    index: int
    """how many tokens the answer has"""
    ends_with: Callable[[int], bool]
    """called with each token in turn: whether it is the last that this decoder chooses, for now"""

    def follow(self, token_ids: Sequence[int]) -> None:
        """The answer went on with these, which somebody else chose and the sampler has observed."""
        ...


def never(_token_id: int) -> bool:
    return False


class SampledDecoder:
    """One token a step, drawn with the counter of its own index; temperature 0 makes it greedy."""

    def __init__(self, sampler: SequenceSampler, mask: np.ndarray | None = None) -> None:
        """`mask` has a bit for each token that may be chosen; None: any."""
        self._sampler, self._mask = sampler, mask
        self.index = 0
        self.ends_with: Callable[[int], bool] = never

    def follow(self, token_ids: Sequence[int]) -> None:
        self.index += len(token_ids)

    @property
    def seed(self) -> int:
        return self._sampler.seed

    def propose(self, room: int) -> tuple[int, ...]:
        return ()

    def select(self, logits: np.ndarray) -> Selection:
        sampled = self._sampler.sample(logits[0], self.index, self._mask)
        self._sampler.observe(sampled.token_id)
        self.index += 1
        self.ends_with(sampled.token_id)
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


def mask_without(token_ids: Iterable[int], vocab: int) -> np.ndarray:
    """int32 [(vocab + 31) / 32], a bit for each token but these."""
    bits = np.ones((vocab + 31) // 32 * 32, np.uint8)
    bits[vocab:] = 0
    bits[list(token_ids)] = 0
    return np.packbits(bits, bitorder="little").view(np.int32)


@dataclass(frozen=True, slots=True)
class Trigger:
    """Where a grammar begins in the middle of an answer: with the token `token_id`, or where that is None with the bytes
    `text`, which may end inside a token. They are the beginning of what is `in_grammar`, or stand before it.
    """

    text: bytes
    token_id: int | None = None
    in_grammar: bool = True


class TriggeredDecoder:
    """Lets `free` choose until a trigger comes, then chooses within a grammar until that ends, and so on.

    What comes outside of the grammar is what would come without it, token for token.
    """

    def __init__(
        self,
        sampler: SequenceSampler,
        free: FreeDecoder,
        matcher: Matcher,
        trigger: Trigger,
        *,
        token_bytes: Callable[[int], bytes],
        encode: Callable[[str], list[int]],
        once: bool = False,
    ) -> None:
        """`free` draws from `sampler` too; `matcher` is at the beginning of its grammar. With `once` the answer ends with
        the grammar."""
        self._sampler, self._free, self._start, self._trigger = sampler, free, matcher, trigger
        self._token_bytes, self._encode, self._once = token_bytes, encode, once
        self._matcher: Matcher | None = None
        self._tail = b""
        free.ends_with = self._begins_with

    @property
    def seed(self) -> int:
        return self._sampler.seed

    def propose(self, room: int) -> tuple[int, ...]:
        return self._free.propose(room) if self._matcher is None else ()

    def select(self, logits: np.ndarray) -> Selection:
        if self._matcher is None:
            accepted = self._free.select(logits).accepted
        else:
            accepted = (self._sampler.sample(logits[0], self._free.index, self._matcher.mask()),)
            self._matcher.accept(accepted[0].token_id)
            self._follow([accepted[0].token_id])
        if self._matcher is None:
            return Selection(accepted)
        forced = [] if self._matcher.finished else self._matcher.forced()
        self._follow(forced)
        if not self._matcher.finished:
            return Selection(accepted, tuple(forced))
        self._matcher = None
        return Selection(accepted, tuple(forced), FinishReason.STOP if self._once else None)

    def _follow(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._sampler.observe(token_id)
        self._free.follow(token_ids)

    def _begins_with(self, token_id: int) -> bool:
        """Whether the grammar begins with this token, or inside it; not if what follows there does not fit."""
        trigger = self._trigger
        if trigger.token_id is not None:
            if token_id != trigger.token_id:
                return False
            begun = [token_id] if trigger.in_grammar else []
        else:
            text = self._tail + self._token_bytes(token_id)
            place = text.find(trigger.text)
            if place < 0:
                self._tail = text[max(0, len(text) - len(trigger.text) + 1) :]
                return False
            self._tail = b""
            rest = text[place + (0 if trigger.in_grammar else len(trigger.text)) :]
            begun = self._encode(rest.decode("utf-8", "replace"))
        matcher = self._start.fresh()
        self._matcher = matcher if matcher.allows(begun) else None
        return self._matcher is not None
