"""Seats: who is let in to a model, so that nobody keeps it from all others."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from edge_llm_server.api_error import ApiError


class Seats:
    """For requests whose answers wait and run at a time. Those that answer when nothing else waits have seats of their own:
    they are in nobody's way. For the event loop's thread only."""

    def __init__(self, most: int, *, shared: bool) -> None:
        """`most` are let in. If they are `shared` by several keys, one of them has all but a quarter at most."""
        self._most = most
        self._most_of_one = max(1, most - max(1, most // 4)) if shared else None
        self._inside: Counter[bool] = Counter()
        self._answers: Counter[tuple[bool, str]] = Counter()

    @contextlib.contextmanager
    def taken(self, owner: str, *, answers: int = 1, in_background: bool = False) -> Iterator[None]:
        """A request of the key `owner`, for as many `answers` at a time. Raises `ApiError` 429 if there is no seat for it."""
        of_one = (in_background, owner)
        if self._inside[in_background] >= self._most:
            raise _full(f"{self._most} requests are here already")
        if self._most_of_one is not None:
            answers = min(answers, self._most_of_one)  # the engine says what it thinks of more
            if self._answers[of_one] + answers > self._most_of_one:
                raise _full(
                    f"{self._answers[of_one]} answers of this key are here already: the others are for other keys"
                )
        self._inside[in_background] += 1
        self._answers[of_one] += answers
        try:
            yield
        finally:
            self._inside[in_background] -= 1
            self._answers[of_one] -= answers
            if not self._answers[of_one]:
                del self._answers[of_one]

    @property
    def empty(self) -> bool:
        return not any(self._inside.values())


def _full(message: str) -> ApiError:
    return ApiError(429, message, code="queue_full", retry_after_s=1.0)
