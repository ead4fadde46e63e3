"""Prometheus's text form of what engines count. Names are vLLM's with the prefix `edge_llm:`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import Field, fields
from typing import Any

from edge_llm.metrics import HistogramSnapshot, Statistics
from edge_llm_server.exchange import RequestCounts

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "edge_llm:"
_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_bytes", "kv_cache_usage_perc", "rss_bytes")
_LABELS = {"prefix_cache_hits": "tier", "request_success": "finished_reason", "request_errors": "error"}
"""fields that count by kind, and what the kind is called"""


def exposition(statistics: Mapping[str, Statistics], requests: RequestCounts, quality: Mapping[str, float]) -> str:
    """The counts of each loaded model, by its name, the server's requests, and what the quality watch has found of each
    model."""
    family = f"{PREFIX}http_requests_total"
    lines = [f"# TYPE {family} counter"]
    for (path, status), count in sorted(requests.answered.items()):
        lines.append(f"{family}{_written({'path': path, 'status': str(status)})} {count}")
    lines += [f"# TYPE {PREFIX}client_retries_total counter", f"{PREFIX}client_retries_total {requests.retries}"]
    if requests.failed_streams:
        family = f"{PREFIX}failed_streams_total"
        lines.append(f"# TYPE {family} counter")
        for path, count in sorted(requests.failed_streams.items()):
            lines.append(f"{family}{_written({'path': path})} {count}")
    if quality:
        lines.append(f"# TYPE {PREFIX}quality_kl gauge")
        for name, kl in sorted(quality.items()):
            lines.append(f"{PREFIX}quality_kl{_written({'model_name': name})} {'+Inf' if math.isinf(kl) else kl}")
    for field in fields(Statistics):
        kind = _kind(field)
        family = f"{PREFIX}{field.name}_total" if kind == "counter" else PREFIX + field.name
        samples = [
            sample
            for model, values in sorted(statistics.items())
            for sample in _samples(family, field.name, getattr(values, field.name), {"model_name": model})
        ]
        if samples:
            lines += [f"# TYPE {family} {kind}", *samples]
    return "\n".join(lines) + "\n"


def _kind(field: Field[Any]) -> str:
    if field.type == HistogramSnapshot.__name__:  # annotations are texts there
        return "histogram"
    return "gauge" if field.name in _GAUGES else "counter"


def _samples(family: str, name: str, value: object, labels: Mapping[str, str]) -> Iterator[str]:
    match value:
        case None:
            return
        case HistogramSnapshot():
            total = 0
            for bound, count in zip((*value.bounds, "+Inf"), value.counts, strict=True):
                total += count
                yield f"{family}_bucket{_written({**labels, 'le': str(bound)})} {total}"
            yield f"{family}_sum{_written(labels)} {value.sum!r}"
            yield f"{family}_count{_written(labels)} {total}"
        case dict():
            for kind, count in sorted(value.items()):
                yield f"{family}{_written({**labels, _LABELS[name]: str(kind)})} {count}"
        case _:
            yield f"{family}{_written(labels)} {value}"


def _written(labels: Mapping[str, str]) -> str:
    texts = []
    for name, value in labels.items():
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        texts.append(f'{name}="{escaped}"')
    return "{" + ",".join(texts) + "}"
