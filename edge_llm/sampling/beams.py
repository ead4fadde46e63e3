"""Beam search: the most probable answers, looked for along several beginnings at a time.

The rules are those of `transformers`' `generate(num_beams=...)` (5.24), held equal by tests/model/test_against_transformers.py:

* Each step takes the `width` most probable of all continuations of all beams that do not end. Those of the `width` most probable
  that do end are hypotheses; the best `width` of them are kept.
* A hypothesis of n tokens, its end among them, scores log-probability / n ** length_penalty.
* The search ends at `max_tokens`, where whatever runs is a hypothesis too; else once there are `width` hypotheses and either
  `early_stopping` holds or the best beam, scored as if it ended here, is no better than the worst of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from edge_llm.errors import GenerationError
from edge_llm.messages import FinishReason
from edge_llm.sampling.decoders import Selection


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """Tokens of an answer, or of its beginning, and their log-probability under the raw logits."""

    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0
    tail: bytes = b""
    """the end of its text, as far as a stop may begin in it"""

    def score(self, length_penalty: float) -> float:
        """Log-probability a token, if the penalty is 1; larger ones favour long answers."""
        return self.logprob / math.pow(len(self.token_ids), length_penalty)


@dataclass(frozen=True, slots=True)
class Ends:
    """What ends an answer: `token_ids`, or one of the texts `stops`, if `is_stop` agrees that the tokens end with one.

    `token_bytes` are the bytes of a token's text.
    """

    token_ids: frozenset[int]
    stops: tuple[bytes, ...] = ()
    token_bytes: Callable[[int], bytes] = lambda _: b""
    is_stop: Callable[[Sequence[int]], bool] = lambda _: True

    def extended(self, beam: Hypothesis, token_id: int, logprob: float) -> tuple[Hypothesis, bool]:
        """A beam with one more token, and whether it ends with that."""
        ids = (*beam.token_ids, token_id)
        if token_id in self.token_ids or not self.stops:
            return Hypothesis(ids, logprob), token_id in self.token_ids
        text = beam.tail + self.token_bytes(token_id)
        ended = any(stop in text for stop in self.stops) and self.is_stop(ids)
        longest = max(map(len, self.stops))
        return Hypothesis(ids, logprob, text[max(0, len(text) - longest + 1) :]), ended


class BeamDecoder:
    """A decoder of up to `width` branches, which never become fewer. The first step has the row that follows the prompt;
    afterwards row j follows branch j."""

    def __init__(self, width: int, *, max_tokens: int, ends: Ends, length_penalty: float, early_stopping: bool) -> None:
        self.width = width
        self._max_tokens, self._ends = max_tokens, ends
        self._length_penalty, self._early_stopping = length_penalty, early_stopping
        self._running = [Hypothesis()]
        """most probable first"""
        self._ended: list[Hypothesis] = []
        """best first"""

    @property
    def seed(self) -> int:
        """Nothing is drawn."""
        return 0

    def propose(self, room: int) -> tuple[int, ...]:
        return ()

    def select(self, logits: np.ndarray) -> Selection:
        assert len(logits) == len(self._running), "a row follows each branch"
        running: list[Hypothesis] = []
        branches: list[tuple[int, int]] = []
        for rank, (logprob, branch, token_id) in enumerate(self._continuations(logits)):
            beam, ended = self._ends.extended(self._running[branch], token_id, logprob)
            if rank < self.width and (ended or len(beam.token_ids) >= self._max_tokens):
                self._ended.append(beam)
            if not ended:
                running.append(beam)
                branches.append((branch, token_id))
            if len(running) == self.width:
                break
        self._ended = sorted(self._ended, key=self.score, reverse=True)[: self.width]
        shrinks = len(running) < len(self._running)  # nearly all continuations end: branches are never given up
        self._running = running
        if not shrinks and self._goes_on():
            return Selection((), branches=tuple(branches))
        return Selection((), forced=self.ranked()[0].token_ids, finish=FinishReason.STOP)

    def ranked(self) -> list[Hypothesis]:
        """The hypotheses, the best first; as long as there are none, the beams. Empty before the first step."""
        if self._ended:
            return self._ended
        return sorted((beam for beam in self._running if beam.token_ids), key=self.score, reverse=True)

    def score(self, hypothesis: Hypothesis) -> float:
        """What hypotheses are compared by."""
        return hypothesis.score(self._length_penalty)

    def _goes_on(self) -> bool:
        if len(self._running[0].token_ids) >= self._max_tokens:
            return False
        if len(self._ended) < self.width:
            return True
        return not self._early_stopping and self.score(self._running[0]) > self.score(self._ended[-1])

    def _continuations(self, logits: np.ndarray) -> Iterator[tuple[float, int, int]]:
        """(log-probability, branch, token) of all continuations, the most probable first, of equals the lowest first."""
        totals = [_log_total(row) for row in logits]
        given, wanted = 0, 3 * self.width  # mostly enough: a model has one or two end tokens
        while given < logits.size:
            best = [
                (self._running[branch].logprob + (float(row[token]) - totals[branch]), branch, token)
                for branch, row in enumerate(logits)
                for token in _largest(row, wanted)
            ]
            best.sort(key=lambda one: (-one[0], one[1], one[2]))
            yield from best[given:wanted]
            given, wanted = wanted, 8 * wanted


def _log_total(row: np.ndarray) -> float:
    """Logarithm of the sum of exp(logit). Raises `GenerationError` for what is no number."""
    peak = float(row.max())
    if not math.isfinite(peak):
        raise GenerationError("the model gave logits that are not finite numbers, so no token can be chosen")
    return peak + math.log(np.exp(row - row.max()).sum(dtype=np.float64))


def _largest(row: np.ndarray, count: int) -> list[int]:
    """Indices of the `count` largest values, and of all that equal the least of them."""
    if count >= row.size:
        return list(range(row.size))
    least = np.partition(row, row.size - count)[row.size - count]
    chosen: list[int] = np.flatnonzero(row >= least).tolist()
    return chosen
