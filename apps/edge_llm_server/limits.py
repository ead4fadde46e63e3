"""Limits of each key: requests and tokens a minute, and requests at a time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from edge_llm_server.api_error import ApiError
from edge_llm_server.settings import ServerSettings

_MAX_RETRY_S = 60.0


class Bucket:
    """A token bucket: holds a minute's worth, fills evenly, and may go below zero for what is only known afterwards."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._size = self._level = float(per_minute)
        self._filled = now

    def _fill(self, now: float) -> None:
        self._level = min(self._size, self._level + (now - self._filled) * self._size / 60)
        self._filled = now

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until `amount` is there; 0 if it is."""
        self._fill(now)
        return max(0.0, (amount - self._level) * 60 / self._size)

    def take(self, amount: float, now: float) -> None:
        self._fill(now)
        self._level -= amount


class Limits:
    """What each key has used. For the event loop's thread only."""

    def __init__(self, settings: ServerSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._requests: dict[str, Bucket] = {}
        self._tokens: dict[str, Bucket] = {}
        self._running: dict[str, int] = {}

    @contextlib.contextmanager
    def request(self, name: str) -> Iterator[None]:
        """One request of the key `name`. Raises `ApiError` 429 with the time after which to come again."""
        now, settings = self._clock(), self._settings
        if settings.max_concurrent is not None and self._running.get(name, 0) >= settings.max_concurrent:
            raise _too_many(f"{settings.max_concurrent} requests of this key are running already", 1.0)
        if settings.tokens_per_minute is not None:
            tokens = self._tokens.setdefault(name, Bucket(settings.tokens_per_minute, now))
            if wait := tokens.wait_s(1, now):
                raise _too_many(f"this key has used its {settings.tokens_per_minute} tokens a minute", wait)
        if settings.requests_per_minute is not None:
            requests = self._requests.setdefault(name, Bucket(settings.requests_per_minute, now))
            if wait := requests.wait_s(1, now):
                raise _too_many(f"this key has made its {settings.requests_per_minute} requests a minute", wait)
            requests.take(1, now)
        self._running[name] = self._running.get(name, 0) + 1
        try:
            yield
        finally:
            self._running[name] -= 1

    def used(self, name: str, tokens: int) -> None:
        """Count tokens that a request of the key has cost."""
        bucket = self._tokens.get(name)
        if bucket is not None:
            bucket.take(tokens, self._clock())


def _too_many(message: str, wait_s: float) -> ApiError:
    return ApiError.too_many(message, min(wait_s, _MAX_RETRY_S))
