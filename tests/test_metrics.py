"""Metrics: what is counted, and what a snapshot of it says."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_llm import metrics
from edge_llm.metrics import Histogram, HistogramSnapshot, Metrics, Statistics

BUCKETS = (metrics.TTFT_BUCKETS, metrics.INTER_TOKEN_BUCKETS, metrics.REQUEST_BUCKETS)


@pytest.mark.parametrize("bounds", BUCKETS)
def test_buckets_ascend(bounds: tuple[float, ...]) -> None:
    assert list(bounds) == sorted(set(bounds))


def test_a_value_on_a_bound_belongs_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5, 100.0):
        histogram.observe(value)
    assert histogram.snapshot() == HistogramSnapshot((1.0, 2.0), (2, 2, 2), 107.5, 1.5, 100.0, 100.0)


def test_nothing_has_no_percentiles() -> None:
    snapshot = Histogram((1.0,)).snapshot()
    assert (snapshot.count, snapshot.sum, snapshot.mean) == (0, 0.0, None)
    assert (snapshot.p50, snapshot.p95, snapshot.p99) == (None, None, None)


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=1024))
def test_percentiles_are_nearest_ranks(values: list[float]) -> None:
    histogram = Histogram(metrics.TTFT_BUCKETS)
    for value in values:
        histogram.observe(value)
    snapshot = histogram.snapshot()
    for told, percent in ((snapshot.p50, 50), (snapshot.p95, 95), (snapshot.p99, 99)):
        assert told in values
        assert sum(value <= told for value in values) >= len(values) * percent / 100
        assert sum(value < told for value in values) < len(values) * percent / 100
    assert snapshot.count == len(values)
    assert snapshot.mean == pytest.approx(math.fsum(values) / len(values))


def test_percentiles_are_of_late_and_counts_of_all() -> None:
    histogram = Histogram((1.0,))
    for _ in range(2000):
        histogram.observe(0.5)
    for _ in range(1024):
        histogram.observe(3.0)
    snapshot = histogram.snapshot()
    assert snapshot.counts == (2000, 1024)
    assert snapshot.p50 == 3.0


def test_a_snapshot_is_json_and_stays_as_it_is() -> None:
    made = Metrics()
    made.prompt_tokens.add(7)
    made.prefix_cache_hits["disk"] += 3
    made.time_to_first_token_seconds.observe(0.03)
    gauges = {
        "num_requests_running": 1,
        "num_requests_waiting": 2,
        "admission_rejections": 0,
        "kv_cache_bytes": 3,
        "kv_cache_usage_perc": 0.5,
        "rss_bytes": None,
        "energy_joules": None,
    }
    snapshot = Statistics.of(made, **gauges)
    made.prompt_tokens.add()
    made.prefix_cache_hits["disk"] += 1
    made.time_to_first_token_seconds.observe(0.03)
    told = json.loads(json.dumps(snapshot.as_dict()))
    assert (told["prompt_tokens"], told["prefix_cache_hits"], told["rss_bytes"]) == (7, {"disk": 3}, None)
    ttft = told["time_to_first_token_seconds"]
    assert (ttft["p50"], sum(ttft["counts"]), len(ttft["counts"])) == (0.03, 1, len(ttft["bounds"]) + 1)
