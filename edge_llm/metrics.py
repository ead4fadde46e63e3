"""Metrics: what an engine counts, as plain values. No HTTP and no printing: whoever shows them reads a `Statistics`.

Names and shapes are vLLM's without its prefix. Its buckets start where a large model on a server does, so lower ones are added.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter as Tally
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
INTER_TOKEN_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    *(5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BUCKETS = (
    *(0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKEN_BUCKETS = (
    *(1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0),
    *(10_000.0, 20_000.0, 50_000.0, 100_000.0, 200_000.0),
)
_RECENT = 1024
"""values of which percentiles are told: exact ones of late, where buckets would only give a range since the start"""


class Counter:
    """A number that only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def add(self, amount: int = 1) -> None:
        self.value += amount


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """What a histogram has seen, in seconds or tokens.

    `counts[i]` values were at most `bounds[i]` and more than the bound before; the last count is of those above all
    bounds. The percentiles are those of the latest values (at most 1,024, nearest rank), None before the first.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float
    p50: float | None
    p95: float | None
    p99: float | None

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        return self.sum / self.count if self.count else None


class Histogram:
    """Values, counted by bucket."""

    __slots__ = ("_bounds", "_counts", "_recent", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """`bounds` are the upper ends of the buckets, ascending; one without an end comes after them."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._recent: deque[float] = deque(maxlen=_RECENT)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value
        self._recent.append(value)

    def snapshot(self) -> HistogramSnapshot:
        """Any thread: at worst a value that is just being added is counted in one place and not in another."""
        recent = sorted(self._recent.copy())  # a copy first: nobody may add to a deque that is read
        p50, p95, p99 = (_percentile(recent, share) for share in (50, 95, 99))
        return HistogramSnapshot(self._bounds, tuple(self._counts), self._sum, p50, p95, p99)


def _percentile(ascending: list[float], percent: int) -> float | None:
    """The smallest value that at least `percent` of 100 values do not exceed; None of nothing."""
    return ascending[math.ceil(len(ascending) * percent / 100) - 1] if ascending else None


class Metrics:
    """What one engine counts; the rest of a `Statistics` is asked for when one is made.

    One thread changes it, any may read it.
    """

    def __init__(self) -> None:
        self.prompt_tokens = Counter()
        self.generation_tokens = Counter()
        self.prefix_cache_queries = Counter()
        self.prefix_cache_hits: Tally[str] = Tally()
        self.num_preemptions = Counter()
        self.num_steps = Counter()
        self.request_success: Tally[str] = Tally()
        self.request_errors: Tally[str] = Tally()
        self.truncated_structures = Counter()
        self.invalid_tool_calls = Counter()
        self.spec_decode_num_drafts = Counter()
        self.spec_decode_num_draft_tokens = Counter()
        self.spec_decode_num_accepted_tokens = Counter()
        self.time_to_first_token_seconds = Histogram(TTFT_BUCKETS)
        self.inter_token_latency_seconds = Histogram(INTER_TOKEN_BUCKETS)
        self.e2e_request_latency_seconds = Histogram(REQUEST_BUCKETS)
        self.request_queue_time_seconds = Histogram(REQUEST_BUCKETS)
        self.request_prefill_time_seconds = Histogram(REQUEST_BUCKETS)
        self.request_decode_time_seconds = Histogram(REQUEST_BUCKETS)
        self.request_prompt_tokens = Histogram(TOKEN_BUCKETS)
        self.request_generation_tokens = Histogram(TOKEN_BUCKETS)


@dataclass(frozen=True, slots=True)
class Statistics:
    """How an engine is doing and what it has done since it was loaded; plain values."""

    num_requests_running: int
    num_requests_waiting: int
    kv_cache_bytes: int
    """bytes of keys and values that are held, those of conversations that have ended among them"""
    kv_cache_usage_perc: float
    """these bytes as a share of what they may be, 0 to 1"""
    rss_bytes: int | None
    """memory of the process that holds the engine; None where the system does not tell"""
    energy_joules: float | None
    """what all steps took, where a meter or the config's `watts` tells"""
    prompt_tokens: int
    generation_tokens: int
    prefix_cache_queries: int
    """prompt tokens that were looked up"""
    prefix_cache_hits: dict[str, int]
    """of these, tokens that did not have to be computed, by where they were found: `memory`, `disk`"""
    num_preemptions: int
    num_steps: int
    admission_rejections: int
    """requests that a full queue refused"""
    request_success: dict[str, int]
    """requests that ended with an answer or part of one, by `FinishReason`"""
    request_errors: dict[str, int]
    """requests that ended with an error, by its class"""
    truncated_structures: int
    """answers within a grammar that ended before it allowed an end"""
    invalid_tool_calls: int
    """calls that the model wrote and nobody could read"""
    spec_decode_num_drafts: int
    """steps of a request that had drafts"""
    spec_decode_num_draft_tokens: int
    spec_decode_num_accepted_tokens: int
    time_to_first_token_seconds: HistogramSnapshot
    """from submit on"""
    inter_token_latency_seconds: HistogramSnapshot
    """from one step that gave a request tokens to the next that did"""
    e2e_request_latency_seconds: HistogramSnapshot
    request_queue_time_seconds: HistogramSnapshot
    """from submit to the first slot"""
    request_prefill_time_seconds: HistogramSnapshot
    """from the first slot to the first token"""
    request_decode_time_seconds: HistogramSnapshot
    """from the first token to the last"""
    request_prompt_tokens: HistogramSnapshot
    """of each request that has ended with an answer or part of one"""
    request_generation_tokens: HistogramSnapshot

    @classmethod
    def of(cls, metrics: Metrics, **others: Any) -> Statistics:
        """A snapshot; `others` are the fields that `metrics` does not have."""
        return cls(**others, **{name: _value(part) for name, part in vars(metrics).items()})

    @property
    def joules_per_token(self) -> float | None:
        """Energy over tokens chosen, the reading of their prompts included; None where either is unknown."""
        if self.energy_joules is None or not self.generation_tokens:
            return None
        return self.energy_joules / self.generation_tokens

    def as_dict(self) -> dict[str, Any]:
        """Values that JSON knows."""
        return asdict(self)


def _value(part: Counter | Histogram | Tally[str]) -> Any:
    if isinstance(part, Histogram):
        return part.snapshot()
    return part.value if isinstance(part, Counter) else dict(part)
