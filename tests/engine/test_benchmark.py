from __future__ import annotations

import pytest

from edge_llm.engine.benchmark import Benchmark
from edge_llm.errors import ParameterError
from tests.engine.fakes import make_core


def shapes(core) -> list[tuple[int, int, int]]:
    """(position, rows, logit rows) of each step so far, which are then forgotten."""
    found = [(s.segments[0].position, s.segments[0].rows, s.segments[0].logit_rows) for s in core.session.steps]
    core.session.steps.clear()
    return found


def test_a_prompt_is_read_in_chunks_and_wants_the_logits_of_its_last_token() -> None:
    core = make_core(max_rows=32)
    benchmark = Benchmark(core, list(range(200)))
    assert benchmark.prefill(0, 70) > 0
    assert shapes(core) == [(0, 32, 0), (32, 32, 0), (64, 6, 1)]
    benchmark.prefill(0, 70)  # from the beginning again
    assert shapes(core) == [(0, 32, 0), (32, 32, 0), (64, 6, 1)]


def test_what_stands_before_is_computed_once_and_not_measured() -> None:
    core = make_core(max_rows=32)
    benchmark = Benchmark(core, list(range(200)))
    benchmark.decode(40, 3)
    assert shapes(core) == [(0, 32, 0), (32, 8, 0), (40, 1, 1), (41, 1, 1), (42, 1, 1)]
    benchmark.decode(40, 2)
    assert shapes(core) == [(40, 1, 1), (41, 1, 1)]
    benchmark.prefill(45, 4)
    assert shapes(core) == [(42, 3, 0), (45, 4, 1)]


def test_the_tokens_are_those_that_were_given() -> None:
    core = make_core(max_rows=32)
    Benchmark(core, list(range(100, 200))).prefill(8, 3)
    assert [list(step.segments[0].token_ids) for step in core.session.steps] == [list(range(100, 108)), [108, 109, 110]]


def test_a_cache_that_cannot_go_back_is_filled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(max_rows=32)
    benchmark = Benchmark(core, list(range(200)))
    benchmark.decode(40, 1)
    shapes(core)
    truncate = core.cache.truncate
    monkeypatch.setattr(core.cache, "truncate", lambda slot, length: length == 0 and truncate(slot, length))
    benchmark.decode(20, 1)
    assert shapes(core) == [(0, 20, 0), (20, 1, 1)]


def test_more_than_the_context_is_refused() -> None:
    benchmark = Benchmark(make_core(context=64), list(range(64)))
    benchmark.decode(60, 4)
    with pytest.raises(ParameterError, match="5 tokens after 60 do not fit into the context of 64"):
        benchmark.decode(60, 5)
