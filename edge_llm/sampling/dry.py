"""What DRY looks at: the last tokens in order, where each stood before, and how far back a sequence breaker lies."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Self

import numpy as np

TokenBytes = Callable[[int], bytes]
"""the bytes that a token stands for"""


class DryWindow:
    """The last `size` tokens of prompt and answer as `sample_row` reads them; a further one costs O(1).

    A sequence breaker is found in the text, however that is cut into tokens. A token that holds a whole one is kept as -1:
    nothing repeats it, and it is never penalised.
    """

    def __init__(
        self, size: int, breakers: Iterable[bytes], token_bytes: TokenBytes, token_ids: Sequence[int] = ()
    ) -> None:
        self.limit = 0
        """how many tokens came after the one in which the last breaker ended"""
        self._size = size
        self._breakers = tuple(breakers)
        self._token_bytes = token_bytes
        self._overlap = max((len(breaker) for breaker in self._breakers), default=1) - 1
        self._tail = b""  # the text before the next token, as far as a breaker may begin in it
        self._holding: dict[int, bool] = {}  # whether a token holds a breaker
        self._last: dict[int, int] = {}  # which of all tokens a token was last
        self._count = 0  # of all tokens
        entries = [self._entry(token_id) for token_id in token_ids[-size:]]
        self._hold(np.array(entries, np.int32).reshape(-1, 2).T)

    def observe(self, token_id: int) -> None:
        """Add the next token."""
        if self._used == self._rows.shape[1]:
            self._hold(self.rows[:2])  # what lies before the window is forgotten
        self._rows[0, self._used], self._rows[1, self._used] = self._entry(token_id)
        self._used += 1

    def _entry(self, token_id: int) -> tuple[int, int]:
        """The token, or -1, and how far back it stood last, or 0."""
        position = self._count
        self._count += 1
        holds = self._holding.get(token_id)
        if holds is None:
            data = self._token_bytes(token_id) if self._breakers else b""
            holds = self._holding[token_id] = any(breaker in data for breaker in self._breakers)
        self.limit = 0 if self._ends_breaker(token_id) or holds else self.limit + 1
        if holds:
            return -1, 0
        distance = position - self._last.get(token_id, position)
        self._last[token_id] = position
        return token_id, distance if distance < self._size else 0

    def _ends_breaker(self, token_id: int) -> bool:
        """Whether a breaker that began in earlier tokens ends in this one."""
        if self._overlap == 0:
            return False
        before, text = len(self._tail), self._tail + self._token_bytes(token_id)
        self._tail = text[-self._overlap :]
        return any(breaker in text[max(0, before - len(breaker) + 1) :] for breaker in self._breakers)

    def _hold(self, shown: np.ndarray) -> None:
        """Begin anew with these tokens and distances, and room for as many more."""
        self._used = int(shown.shape[1])
        self._rows = np.zeros((3, 2 * self._used + 64), np.int32)
        self._rows[:2, : self._used] = shown
        self._address = self._rows.ctypes.data

    @property
    def rows(self) -> np.ndarray:
        """int32 [3, window], valid until the next token: tokens, distances and lengths as SampleCall means them."""
        return self._rows[:, max(0, self._used - self._size) : self._used]

    @property
    def addresses(self) -> tuple[int, int, int]:
        """Of the three rows."""
        first, row_bytes = self._address + 4 * max(0, self._used - self._size), 4 * self._rows.shape[1]
        return first, first + row_bytes, first + 2 * row_bytes

    @property
    def window(self) -> int:
        """How many tokens the rows hold."""
        return self._used if self._used < self._size else self._size

    def copy(self) -> Self:
        """An independent one."""
        twin = copy.copy(self)
        twin._last = dict(self._last)
        twin._hold(self.rows[:2])
        return twin
