"""Exchange: what is known of one request and its reply, for the limits and the access log; never a word of either."""

from __future__ import annotations

import re
import secrets
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, TextIO

from edge_llm_server.keys import Scope

STATE = "edge_llm.exchange"
"""the scope's key under which the application finds it"""
RETRIES = b"x-stainless-retry-count"
"""header in which the clients of OpenAI and Anthropic say how often they have sent a request before"""
_GIVEN_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")


@dataclass(slots=True)
class Exchange:
    """Filled by the guard, and with counts by whoever answers."""

    id: str
    method: str
    path: str
    key: str = ""
    """name of the caller's key; empty where none is needed"""
    scope: Scope = Scope.ALL
    route: str | None = None
    """the path as the application declares it"""
    status: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    retry: bool = False
    """whether the client says that it has asked this before"""
    model: str | None = None
    counts: dict[str, int] = field(default_factory=dict)
    """prompt_tokens, cached_tokens and completion_tokens of all its answers"""
    fault: str | None = None
    """what went wrong, by kind and place"""

    @property
    def cost(self) -> int:
        """Tokens that were computed for it."""
        counts = self.counts
        return counts.get("prompt_tokens", 0) - counts.get("cached_tokens", 0) + counts.get("completion_tokens", 0)

    def count(self, **tokens: int) -> None:
        for name, number in tokens.items():
            self.counts[name] = self.counts.get(name, 0) + number

    def log_entry(self, seconds: float) -> dict[str, Any]:
        """The line of the access log."""
        entry = {
            "id": self.id,
            "key": self.key or None,
            "method": self.method[:16],
            "path": self.path[:128],
            "status": self.status,
            "ms": round(seconds * 1000, 1),
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "model": self.model,
            **self.counts,
            "fault": self.fault,
        }
        return {name: value for name, value in entry.items() if value is not None}


class RequestCounts:
    """How many requests each path has answered with each status (`answered`), how many of its streams have failed after a
    200 (`failed_streams`), and how many requests were sent again (`retries`). For the event loop's thread."""

    def __init__(self) -> None:
        self.answered: Counter[tuple[str, int]] = Counter()
        self.failed_streams: Counter[str] = Counter()
        self.retries = 0

    def add(self, exchange: Exchange) -> None:
        """A path that is none of ours counts as `other`: anybody may think of more."""
        path = exchange.route or "other"
        self.answered[path, exchange.status] += 1
        self.retries += exchange.retry
        if exchange.status == 200 and exchange.fault is not None:
            self.failed_streams[path] += 1


def request_id(given: list[bytes]) -> str:
    """The caller's own id if it is a plain word, else a new one."""
    if len(given) == 1 and _GIVEN_ID.fullmatch(given[0]):
        return given[0].decode("ascii")
    return f"req-{secrets.token_hex(12)}"


def place_of(error: BaseException) -> str:
    """Kind and place of an error, without its message, which may hold what somebody wrote."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f" at {trace.tb_frame.f_code.co_qualname}:{trace.tb_lineno}" if trace is not None else ""
    return f"{type(error).__name__}{where}"


class Log:
    """One JSON object a line; pure ASCII, so that no terminal can be made to do anything."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream

    def __call__(self, event: str, **values: Any) -> None:
        import contextlib
        import json
        import time

        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())
        with contextlib.suppress(OSError, ValueError):  # nobody reads it
            print(
                json.dumps({"time": f"{stamp}Z", "event": event, **values}), file=self._stream or sys.stderr, flush=True
            )
