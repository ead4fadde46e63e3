"""The distinct tokens of prompt and answer, as the penalties read them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class SeenTokens:
    """A row for each distinct token, as `sample_row` reads it: its id, and how often it was generated."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        # not np.unique: that loads numpy.ma, which takes more memory than the tokens of any prompt
        self._ids = np.array(sorted(set(prompt_ids)), np.int32)
        self._counts = np.zeros_like(self._ids)
        self._rows = {token_id: row for row, token_id in enumerate(self._ids.tolist())}
        self.addresses = self._ids.ctypes.data, self._counts.ctypes.data
        """of int32 ids and counts; valid until the next token is observed"""

    @property
    def size(self) -> int:
        return len(self._rows)

    def observe(self, token_id: int) -> None:
        """Count a token of the answer."""
        row = self._rows.setdefault(token_id, self.size)
        if row == self._ids.size:
            more = np.zeros(max(64, row), np.int32)
            self._hold(np.concatenate([self._ids, more]), np.concatenate([self._counts, more]))
        self._ids[row] = token_id
        self._counts[row] += 1

    def _hold(self, ids: np.ndarray, counts: np.ndarray) -> None:
        self._ids, self._counts = ids, counts
        self.addresses = ids.ctypes.data, counts.ctypes.data

    def copy(self) -> SeenTokens:
        """An independent one."""
        twin = SeenTokens(())
        twin._rows = dict(self._rows)
        twin._hold(self._ids.copy(), self._counts.copy())
        return twin
