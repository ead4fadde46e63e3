"""BatchRun: each line is answered once and as the server would, in any company; what ends all of them writes nothing wrong."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import urllib.error
import urllib.request
from typing import Any

import pytest
from edge_llm_batch import endpoints
from edge_llm_batch.endpoints import Defaults
from edge_llm_batch.pool import TaskPool
from edge_llm_batch.run import BatchRun

from edge_llm.engine.handle import Handle, Mailbox
from edge_llm.engine.request import Request
from edge_llm.engine.sequence import Sequence
from edge_llm.errors import EngineStoppedError, GenerationError, QueueFullError
from edge_llm.messages import Finished, FinishReason, TextDelta, Timings, Usage
from edge_llm.model.step import Step
from tests.batch.rig import (
    COMPLETION,
    Kept,
    chat,
    completion,
    embeddings,
    engine_of,
    response,
    results_of,
    run_batch,
    tasks_of,
)
from tests.engine.fakes import make_core, says
from tests.server.harness import running

BODIES = [
    chat("a"),
    chat("b", "Tell me more", n=2, seed=5, temperature=1.5),
    chat("c", logprobs=True, top_logprobs=2),
    chat("d", stop=["a"], service_tier="flex"),
    chat("e", messages=[]),
    chat("f", temperature="hot"),
    chat("g", "x" * 2000),
    chat("h", tools=[{"type": "function", "function": {"name": "f g"}}]),
    chat("i", best_of=4),
    completion("j"),
    completion("k", ["one", "two"], n=2, seed=7, temperature=1),
    completion("l", [104, 105], echo=True),
    completion("m", [10**6]),
    completion("n", logprobs=2),
    completion("o", echo=True, logprobs=1),
    completion("p", "word " * 500),
    completion("q", "word " * 500, truncation="auto"),
    chat("r", regex="yes|no"),
    chat("s", choices=["yes", "no"]),
    embeddings("t"),
    embeddings("u", ["one", "two"], encoding_format="base64"),
    embeddings("v", [[104, 105], [106]], pooling="last"),
    embeddings("w", ""),
    embeddings("y", "word " * 500),
    response("za", instructions="Be brief."),
    response("zb", [{"role": "user", "content": "Hello"}], metadata={"a": "b"}, truncation="auto"),
    response("zc", "word " * 500),
    response("zd", previous_response_id="resp_1"),
    response("ze", text={"format": {"type": "json_schema", "name": "a", "schema": {"type": "boolean"}}}),
]
VOLATILE = ("id", "created", "created_at", "timings", "seed", "prompt_tokens_details", "input_tokens_details")


def settled(value: Any) -> Any:
    """A reply without what differs from time to time."""
    if isinstance(value, dict):
        return {name: settled(part) for name, part in value.items() if name not in VOLATILE}
    return [settled(part) for part in value] if isinstance(value, list) else value


def posted(url: str, line: dict[str, Any]) -> tuple[int, Any]:
    request = urllib.request.Request(
        url + line["url"], json.dumps(line["body"]).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_a_body_means_what_it_means_to_the_server() -> None:
    results = results_of(make_core(slots=3), BODIES, max_tokens=None)
    assert [result["custom_id"] for result in results] == [line["custom_id"] for line in BODIES]
    with running(lambda: make_core(slots=3)) as server:
        for line, result in zip(BODIES, results, strict=True):
            status, body = posted(server.url, line)
            assert result["error"] is None
            assert result["response"]["status_code"] == status
            assert settled(result["response"]["body"]) == settled(body)
    statuses = [result["response"]["status_code"] for result in results]
    assert {200, 400} == set(statuses)


def test_a_prompt_that_is_too_long_says_both_numbers() -> None:
    (result,) = results_of(make_core(), [chat("a", "x" * 2000)])
    error = result["response"]["body"]["error"]
    assert (error["type"], error["n_ctx"]) == ("exceed_context_size_error", 256)
    assert error["n_prompt_tokens"] > 2000


def test_vectors_of_another_size_are_refused() -> None:
    small, right = results_of(make_core(), [embeddings("a", dimensions=3), embeddings("b", dimensions=32)])
    assert small["response"]["body"]["error"]["param"] == "dimensions"
    vector = right["response"]["body"]["data"][0]["embedding"]
    assert sum(x * x for x in vector) == pytest.approx(1)


def test_faults_of_lines_are_lines() -> None:
    results = results_of(make_core(), ["{", chat("a"), {**chat("b"), "url": "/v1/x"}, chat("a")])
    assert [(result["custom_id"], result["error"] and result["error"]["code"]) for result in results] == [
        (None, "invalid_json_line"),
        ("a", None),
        ("b", "invalid_url"),
        (None, "duplicate_custom_id"),
    ]
    assert [result["error"]["line"] for result in results if result["error"]] == [1, 3, 4]
    assert all((result["response"] is None) == (result["error"] is not None) for result in results)


def test_models_by_other_names() -> None:
    lines = [chat("a", model="fake"), chat("b", model="gpt-4o-mini"), chat("c", model="given")]
    strict = results_of(make_core(), lines, model="given")
    assert [result["response"]["status_code"] for result in strict] == [200, 404, 200]
    assert strict[1]["response"]["body"]["error"]["code"] == "model_not_found"
    assert "--any-model" in strict[1]["response"]["body"]["error"]["message"]
    lenient = results_of(make_core(), lines, model=None)
    assert [result["response"]["body"]["model"] for result in lenient] == ["fake"] * 3


def test_max_tokens_of_those_that_name_no_limit() -> None:
    lines = [chat("a"), chat("b", max_tokens=3), completion("c", n_predict=-1), chat("d", max_completion_tokens=2)]
    for line in (lines[0], lines[2]):
        del line["body"]["max_tokens"]
    results = results_of(make_core(), lines, max_tokens=5)
    assert [result["response"]["body"]["usage"]["completion_tokens"] for result in results] == [5, 3, 5, 2]


def test_a_stream_is_answered_whole() -> None:
    (result,) = results_of(make_core(says("Paris")), [chat("a", stream=True, stream_options={"include_usage": True})])
    assert result["response"]["body"]["choices"][0]["message"]["content"] == "Paris"


def test_every_slot_is_kept_busy_and_nothing_is_refused() -> None:
    core = make_core(slots=4, max_queued_requests=4)
    lines = [completion(f"r{i}", f"Number {i}", max_tokens=4 + i % 7) for i in range(60)]
    prepare, prepared = core.prepare, list[Sequence]()

    def noted(*arguments: Any) -> Sequence:
        prepared.append(prepare(*arguments))
        return prepared[-1]

    def wait_for_requests(_step: Step) -> None:
        """A step of a model takes longer than it takes to ask for the next answer, on the busiest of machines."""
        for _ in range(2000):
            if len(core._scheduler) >= 4 or len(prepared) == len(lines):
                return
            time.sleep(0.01)

    core.prepare = noted
    core.session.before_step = wait_for_requests
    with engine_of(core) as engine:
        run = run_batch(engine, lines, kept := Kept())
        statistics = engine.statistics()
    assert len(kept.lines) == 60
    assert statistics.admission_rejections == 0
    rows = [len(step.segments) for step in core.session.steps]
    assert max(rows) == 4
    assert sum(rows) / len(rows) > 3
    usage = [result["response"]["body"]["usage"] for result in kept.lines]
    tally = run.tally
    assert (tally.answered, tally.errors) == (60, 0)
    assert tally.completion_tokens == sum(one["completion_tokens"] for one in usage)
    assert tally.prompt_tokens == sum(one["prompt_tokens"] for one in usage)


def test_requests_are_of_the_lowest_priority() -> None:
    with engine_of(make_core()) as engine:
        watched = Watched(engine)
        run_batch(watched, [chat("a"), completion("b", ["x", "y"], n=2)])
    assert [request.priority for request in watched.requests] == ["batch"] * 5


def test_prompts_that_begin_alike_are_read_once() -> None:
    """B: the lines alternate between four instructions, more than there are slots."""
    systems = [f"{name} " + "does one thing after the other. " * 5 for name in "ABCD"]
    lines = [
        chat(
            f"r{i}",
            messages=[{"role": "system", "content": systems[i % 4]}, {"role": "user", "content": f"{i}"}],
            max_tokens=2,
        )
        for i in range(60)
    ]
    with engine_of(make_core(slots=2)) as engine:
        tally = run_batch(engine, lines).tally
        lengths = [len(engine.tokenize(Request(text=system))) for system in systems]
    computed = tally.prompt_tokens - tally.cached_tokens
    assert tally.prompt_tokens > 60 * min(lengths)
    assert computed < sum(lengths) * 1.5 + 60 * 40, "each instruction once or little more, and what differs"


def test_one_that_fails_leaves_the_others_alone() -> None:
    with engine_of(make_core()) as engine:
        failing = Scripted(engine, lambda request: request.text == "bad")
        results = Kept()
        run_batch(failing, [completion("a"), completion("b", "bad"), completion("c", ["fine", "bad"])], results)
    answered, failed, half = results.in_order()
    assert answered["response"]["status_code"] == 200
    assert failed["response"]["status_code"] == half["response"]["status_code"] == 500
    assert failed["response"]["body"]["error"]["type"] == "server_error"


def test_a_fault_of_ours_is_one_line_without_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(raw: Any, engine: Any) -> Any:
        raise KeyError("secret")

    monkeypatch.setattr(endpoints, "ENDPOINTS", {**endpoints.ENDPOINTS, COMPLETION: faulty})
    failed, answered = results_of(make_core(), [completion("a"), chat("b")])
    assert failed["response"]["body"]["error"]["message"] == "the request failed: KeyError"
    assert answered["response"]["status_code"] == 200


def test_a_full_queue_is_asked_again_when_it_said() -> None:
    with engine_of(make_core()) as engine:
        full = Watched(engine, refusals=3)
        run_batch(full, [chat("a")], kept := Kept())
    (result,) = kept.lines
    assert result["response"]["status_code"] == 200
    assert full.refused == 3


@pytest.mark.parametrize("how", ["error", "cancelled"])
def test_an_engine_that_stops_ends_the_batch_without_wrong_lines(how: str) -> None:
    def stops(request: Request) -> bool:
        return request.text == "stop"

    with engine_of(make_core()) as engine:
        ending = Scripted(engine, stops, EngineStoppedError("it died") if how == "error" else None)
        kept = Kept()
        lines = [completion(f"{i:03}", f"{i:03}", max_tokens=1) for i in range(30)]
        with pytest.raises(EngineStoppedError):
            run_batch(
                ending, [*lines, completion("stop", "stop"), *[completion(f"x{i}", "x") for i in range(50)]], kept
            )
    assert len(kept.lines) < 81
    assert all(result["response"]["status_code"] == 200 for result in kept.lines)


def test_a_result_that_cannot_be_written_ends_the_batch() -> None:
    class Full(Kept):
        def write(self, result: dict[str, Any]) -> None:
            raise OSError(28, "No space left on device")

    with engine_of(make_core()) as engine, pytest.raises(OSError, match="No space"):
        run_batch(engine, [chat("a"), chat("b")], Full())


def test_cancelling_ends_what_runs_and_writes_nothing_of_it() -> None:
    core = make_core(context=4096, eos=())
    kept = Kept()

    async def work(engine: Any) -> None:
        pool = TaskPool()
        pool.fill(tasks_of([completion("a", max_tokens=1), completion("b", "forever", max_tokens=3000)]))
        told = asyncio.Event()
        run = BatchRun(engine, kept, Defaults("fake", 8), lambda tally: told.set())
        running = asyncio.create_task(run.run(pool))
        await asyncio.wait_for(told.wait(), 20)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    with engine_of(core) as engine:
        asyncio.run(work(engine))
        engine.close(drain=True)
    assert [result["custom_id"] for result in kept.lines] == ["a"]
    assert len(core.session.steps) < 3000


def test_company_changes_no_answer() -> None:
    """F20 for batches: alone, and among 40 others in any order."""
    lines = [chat(f"r{i}", f"Say {i}", seed=i, temperature=1, max_tokens=9) for i in range(40)]
    together = results_of(make_core(slots=5), lines)
    backwards = results_of(make_core(slots=3), lines[::-1])[::-1]
    for i, one, other in zip(range(40), together, backwards, strict=True):
        assert settled(one["response"]["body"]) == settled(other["response"]["body"])
        if i % 8 == 0:
            (alone,) = results_of(make_core(), [lines[i]])
            assert settled(one["response"]["body"]) == settled(alone["response"]["body"])


def test_urls_of_all_kinds_may_mix() -> None:
    lines = [chat("a"), completion("b"), embeddings("c"), response("d"), chat("e")]
    with engine_of(make_core(says("Paris"))) as engine:
        kept = Kept()
        tally = run_batch(engine, lines, kept).tally
    bodies = [result["response"]["body"] for result in kept.in_order()]
    kinds = ["chat.completion", "text_completion", "list", "response", "chat.completion"]
    assert [body["object"] for body in bodies] == kinds
    used = [body["usage"] for body in bodies]
    prompts = sum(one.get("prompt_tokens", 0) + one.get("input_tokens", 0) for one in used)
    completions = sum(one.get("completion_tokens", 0) + one.get("output_tokens", 0) for one in used)
    assert (tally.answered, tally.prompt_tokens, tally.completion_tokens) == (5, prompts, completions)


class Watched:
    """An engine whose requests are kept, and that refuses the first ones."""

    def __init__(self, engine: Any, refusals: int = 0) -> None:
        self.info, self.detokenize, self._engine, self._refusals = engine.info, engine.detokenize, engine, refusals
        self.requests: list[Request] = []
        self.refused = 0

    def submit(self, request: Request) -> Handle:
        if self.refused < self._refusals:
            self.refused += 1
            raise QueueFullError("too much", retry_after_s=0.001)
        self.requests.append(request)
        return self._engine.submit(request)


class Scripted(Watched):
    """An engine on which some requests end with an error, or with None are cancelled by nobody here."""

    def __init__(self, engine: Any, ends: Any, error: Exception | None = GenerationError("it went wrong")) -> None:  # noqa: B008
        super().__init__(engine)
        self._ends, self._error = ends, error

    def submit(self, request: Request) -> Handle:
        if not self._ends(request):
            return super().submit(request)
        mailbox = Mailbox()

        def end() -> None:
            mailbox.put(TextDelta("half"))
            timings = Timings(queue_s=0.0, ttft_s=None, total_s=0.0)
            mailbox.put(self._error or Finished(FinishReason.CANCELLED, Usage(1, 1, 0), timings, 0))

        threading.Thread(target=end).start()
        return Handle(mailbox, lambda: None)
