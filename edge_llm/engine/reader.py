"""Readers: requests whose tokens are all given. Nothing is chosen; what the model makes of them is the answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from edge_llm.errors import GenerationError
from edge_llm.messages import Choice

MAX_CHOICE_TOKENS = 64
"""of one label"""


class Reader(Protocol):
    """Takes what a step has computed of one request; has state, used by one thread.

    Rows are read in order; where some are read again, they are the same and count once.
    """

    def logit_rows(self, start: int, stop: int) -> int:
        """Of how many of the rows [start, stop), the last ones, logits are wanted."""
        ...

    def feed(self, start: int, hidden: np.ndarray, logits: np.ndarray) -> None:
        """Rows from position `start` on: float32 [rows, hidden] after the final norm, and float32 [logit_rows, vocab].

        The arrays are only valid during the call. Raises `GenerationError` if they are not numbers.
        """
        ...

    def following(self) -> list[int] | None:
        """All tokens that are to be read next, once those so far are; None at the end.

        Raises `GenerationError` if the result is not one.
        """
        ...

    @property
    def text(self) -> str:
        """What stands for the answer, at the end."""
        ...

    def results(self) -> dict[str, Any]:
        """What goes into `Finished`; nothing before the end."""
        ...


class EmbeddingReader:
    """The mean of all rows, or the last one, scaled to the length 1."""

    def __init__(self, pooling: str, rows: int) -> None:
        """`pooling` is `mean` or `last`; `rows` how many there will be."""
        self._pooling = pooling
        self._rows = rows
        self._done = 0
        self._sum: np.ndarray | None = None
        self._vector: tuple[float, ...] = ()

    def logit_rows(self, start: int, stop: int) -> int:
        return 0

    def feed(self, start: int, hidden: np.ndarray, logits: np.ndarray) -> None:
        stop = start + len(hidden)
        if self._pooling == "last":
            if stop == self._rows:
                self._sum = hidden[-1].astype(np.float64)
        else:
            # one row after the other: however the rows are cut into chunks, the sum is the same, bit for bit
            for row in hidden[max(0, self._done - start) :]:
                self._sum = row.astype(np.float64) if self._sum is None else self._sum + row
        self._done = max(self._done, stop)

    def following(self) -> list[int] | None:
        assert self._sum is not None
        length = float(np.sqrt(np.square(self._sum).sum()))
        if not 0.0 < length < float("inf"):
            raise GenerationError("the model's hidden states are not numbers")
        self._vector = tuple((self._sum / length).astype(np.float32).tolist())
        return None

    @property
    def text(self) -> str:
        return ""

    def results(self) -> dict[str, Any]:
        return {"embedding": self._vector} if self._vector else {}


class ChoiceReader:
    """Labels that may follow a prompt, each scored token by token under the model's own logits.

    Labels with a common beginning share its rows. A label that is the beginning of another is scored together with an end of
    the answer after it, so that no answer counts for two.
    """

    def __init__(
        self, prompt_ids: Sequence[int], labels: Sequence[tuple[str, tuple[int, ...]]], end_ids: Iterable[int]
    ):
        """`labels` are texts with their tokens, one or more each; any of `end_ids` ends an answer."""
        self._prompt = list(prompt_ids)
        self._labels = tuple(labels)
        self._end_ids = list(end_ids)
        ids = [tokens for _, tokens in labels]
        self._closed = [any(other[: len(own)] == own for other in ids if other != own) for own in ids]
        self._order = sorted(range(len(ids)), key=ids.__getitem__)  # neighbours have most in common
        self._scored = [0] * len(ids)
        """tokens of each label that are scored, its end included"""
        self._logprobs = [0.0] * len(ids)
        self._path: tuple[int, ...] = ()
        """what is being read after the prompt"""
        self._choices: tuple[Choice, ...] = ()

    def logit_rows(self, start: int, stop: int) -> int:
        return min(stop - start, max(0, stop - (len(self._prompt) - 1)))

    def feed(self, start: int, hidden: np.ndarray, logits: np.ndarray) -> None:
        first = start + len(hidden) - len(logits) - (len(self._prompt) - 1)
        for depth, row in enumerate(logits, first):
            self._score(depth, row.astype(np.float64))

    def _score(self, depth: int, logits: np.ndarray) -> None:
        """What follows the first `depth` tokens of the path."""
        peak = float(logits.max())
        total = peak + float(np.log(np.exp(logits - peak).sum()))
        if not np.isfinite(total):
            raise GenerationError("the logits are not numbers")
        for i, (_, tokens) in enumerate(self._labels):
            if self._scored[i] != depth or tokens[:depth] != self._path[:depth]:
                continue
            if depth < len(tokens):
                self._logprobs[i] += float(logits[tokens[depth]]) - total
            elif self._closed[i]:
                self._logprobs[i] += float(np.log(np.exp(logits[self._end_ids] - total).sum()))
            else:
                continue
            self._scored[i] += 1

    def following(self) -> list[int] | None:
        for i in self._order:
            _, tokens = self._labels[i]
            needed = len(tokens) + self._closed[i]
            if self._scored[i] < needed:
                self._path = tokens[: needed - 1]
                return [*self._prompt, *self._path]
        self._choices = self._ranked()
        return None

    def _ranked(self) -> tuple[Choice, ...]:
        """The most probable first; of equals the one that was named first."""
        scores = np.array(self._logprobs)
        weights = np.exp(scores - scores.max())
        shares = weights / weights.sum()
        order = sorted(range(len(scores)), key=lambda i: -scores[i])
        return tuple(Choice(self._labels[i][0], self._logprobs[i], float(shares[i])) for i in order)

    @property
    def text(self) -> str:
        return self._choices[0].label

    def results(self) -> dict[str, Any]:
        return {"choices": self._choices}
