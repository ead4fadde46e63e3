from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from edge_llm import Engine, EngineConfig
from tools.bench.memory_growth import TEXT, measure, slope


def test_a_leak_is_seen_through_noise_and_noise_is_no_leak() -> None:
    random = Random(1)
    noise = [round(random.gauss(0, 1e6)) for _ in range(1000)]
    flat = slope([10**8 + step for step in noise])
    assert flat.low < 0 < flat.high
    leak = slope([10**8 + step + 5000 * i for i, step in enumerate(noise)])
    assert 0 < leak.low < 5000 < leak.high
    assert leak.bytes_a_request == pytest.approx(5000, rel=0.1)


def test_the_beginning_does_not_count_and_an_exact_line_has_no_interval() -> None:
    samples = [10**9] * 200 + [10**6 + 3 * i for i in range(800)]
    found = slope(samples)
    assert (found.bytes_a_request, found.low, found.high) == (3.0, 3.0, 3.0)
    assert str(found) == "+3 bytes a request (95 %: +3 .. +3)"
    with pytest.raises(ValueError, match="too few"):
        slope(samples[:100])


def test_an_engine_is_measured_after_each_request(tiny_folder: Path, kernels: object) -> None:
    with Engine.load(tiny_folder, EngineConfig(context=512, threads=1)) as engine:
        resident, rest = measure(engine, TEXT.read_text(encoding="utf-8"), requests=12, seed=1, longest=32)
        assert engine.statistics().num_requests_running == 0
    assert len(resident) == len(rest) == 12
    assert all(0 < without <= whole for whole, without in zip(resident, rest, strict=True))
