"""What the engine counts while it answers."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from edge_llm.engine.client import ThreadClient
from edge_llm.engine.request import Request
from edge_llm.errors import QueueFullError
from edge_llm.messages import FinishReason
from edge_llm.sampling.params import SamplingParams
from tests.engine.fakes import START, hashed_logits, make_core, says
from tests.engine.test_core import Speculative, answer, ask, poisoned, run

IDS = list(range(3, 203))


def test_durations_are_those_of_each_answer() -> None:
    ticks = count(step=1.0)
    core = make_core(says("abc"), clock=lambda: next(ticks))
    asked = ask(core, [5, START])
    run(core)
    told, timings = core.statistics(), asked.finished.timings
    assert told.time_to_first_token_seconds.sum == timings.ttft_s
    assert told.e2e_request_latency_seconds.sum == timings.total_s
    assert told.request_queue_time_seconds.sum == timings.queue_s == 1.0
    assert told.request_prefill_time_seconds.sum == 2.0
    assert told.request_decode_time_seconds.sum == told.inter_token_latency_seconds.sum == 9.0
    assert told.inter_token_latency_seconds.count == 3
    used = asked.finished.usage
    assert told.request_prompt_tokens.sum == used.prompt_tokens
    assert told.request_generation_tokens.sum == used.completion_tokens
    assert (told.prompt_tokens, told.generation_tokens, told.num_steps) == (2, 4, 4)
    assert told.request_success == {"stop": 1}


def test_gauges_follow_the_engine() -> None:
    core = make_core(slots=2)
    asked = [ask(core, 30, max_tokens=5) for _ in range(3)]
    core.step()
    told = core.statistics()
    assert (told.num_requests_running, told.num_requests_waiting) == (2, 1)
    assert told.kv_cache_bytes == core.cache.used_bytes > 0
    assert told.kv_cache_usage_perc == told.kv_cache_bytes / core.cache.nbytes
    assert told.rss_bytes is None or told.rss_bytes > 1 << 20
    for one in asked:
        one.sequence.cancel()
    run(core)
    core.close()
    told = core.statistics()
    assert (told.num_requests_running, told.num_requests_waiting, told.kv_cache_bytes) == (0, 0, 0)
    assert told.kv_cache_usage_perc == 0.0
    assert told.request_success == {"cancelled": 3}
    assert told.request_queue_time_seconds.count == 3


def test_hits_are_counted_where_they_are_made(tmp_path: Path) -> None:
    def serve(prompts: int) -> dict[str, int]:
        core = make_core(folder=tmp_path / "p", context=512)
        for _ in range(prompts):
            ask(core, IDS, max_tokens=2)
            run(core)
        core.close()
        told = core.statistics()
        assert told.prefix_cache_queries == prompts * len(IDS)
        return told.prefix_cache_hits

    assert serve(2) == {"memory": 199, "disk": 0}
    assert serve(1) == {"memory": 0, "disk": 199}


def test_what_is_taken_from_a_prompt_that_is_being_read_counts_too() -> None:
    core = make_core(slots=3, max_rows=64)
    asked = [ask(core, IDS, max_tokens=2) for _ in range(3)]
    run(core)
    cached = sum(one.finished.usage.cached_tokens for one in asked)
    assert core.statistics().prefix_cache_hits["memory"] == cached > 300


def test_ends_are_counted_by_their_reason() -> None:
    core = make_core(poisoned, slots=1, max_queued_requests=2)
    ask(core, [7, 8, 9], max_tokens=20)
    ask(core, 4, max_tokens=3)
    ask(core, 5).sequence.cancel()
    with pytest.raises(QueueFullError):
        ask(core, 5)
    run(core)
    told = core.statistics()
    assert told.request_success == {"length": 1, "cancelled": 1}
    assert told.request_errors == {"GenerationError": 1}
    assert told.admission_rejections == 1
    assert told.e2e_request_latency_seconds.count == 2


def test_drafts_are_counted() -> None:
    core = make_core()
    asked = ask(core, 20, max_tokens=30)
    asked.sequence.decoder = Speculative(answer(20, max_tokens=30), [3], [2])
    run(core)
    told, usage = core.statistics(), asked.finished.usage
    assert told.spec_decode_num_drafts == asked.sequence.decoder.step > 0
    assert told.spec_decode_num_draft_tokens == usage.draft_tokens > 0
    assert told.spec_decode_num_accepted_tokens == usage.accepted_draft_tokens > 0


def test_a_structure_that_was_cut_is_counted() -> None:
    core = make_core(hashed_logits)
    for structured in (True, False):
        asked = ask(core, 4, max_tokens=3)
        asked.sequence.structured = structured
        run(core)
        assert asked.finished.reason is FinishReason.LENGTH
    assert core.statistics().truncated_structures == 1


def test_a_client_tells_before_and_after_its_end() -> None:
    client = ThreadClient(make_core(says("abc")))
    client.submit(Request(token_ids=(5, START), params=SamplingParams(temperature=0.0))).text()
    assert client.statistics().num_requests_running in (0, 1)
    client.close()
    assert client.statistics().generation_tokens == 4
