"""What the engine does with rows that are there already: fewer rows to compute, the same answers, true counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edge_llm.engine.core import EngineCore
from edge_llm.engine.request import Request
from edge_llm.errors import ParameterError, SessionError
from edge_llm.messages import Message, Role
from edge_llm.sampling.params import SamplingParams
from tests.engine.fakes import PARIS, make_core, says, tokenizer
from tests.engine.test_core import Asked, ask, run

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def request(core: EngineCore, asked: Request) -> Asked:
    events: list[object] = []
    sequence = core.prepare(asked, events.append)
    core.enqueue(sequence)
    return Asked(sequence, events)


def answered(core: EngineCore, asked: Request) -> Asked:
    result = request(core, asked)
    run(core)
    return result


def rows(core: EngineCore) -> int:
    """Rows computed since this was last asked."""
    computed = sum(step.rows for step in core.session.steps)
    core.session.steps.clear()
    return computed


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 128, 129])
def test_a_prompt_is_read_once(length: int) -> None:
    """B23 at and beside whole blocks: the same answer, from one row."""
    core = make_core()
    first = ask(core, length, max_tokens=5)
    run(core)
    assert (first.finished.usage.cached_tokens, rows(core)) == (0, length + 4)
    again = ask(core, length, max_tokens=5)
    run(core)
    assert again.finished.token_ids == first.finished.token_ids
    assert (again.finished.usage.cached_tokens, rows(core)) == (length - 1, 5)


@pytest.mark.parametrize("shared", [0, 1, 63, 64, 65, 100])
def test_a_common_prefix_with_different_ends(shared: int) -> None:
    """B23: whatever is left in the slots, an answer is the one of an engine that has seen nothing."""
    ids = [3 + i * i % 200 for i in range(shared)]
    core = make_core(slots=2)
    for end in (5, 6, 7, 5):
        prompt = Request(token_ids=(*ids, end, *range(20, 30)), params=GREEDY)
        found = answered(core, prompt)
        assert found.finished.token_ids == answered(make_core(), prompt).finished.token_ids
        if end != 5:
            assert found.finished.usage.cached_tokens == shared
    assert found.finished.usage.cached_tokens >= shared


def test_a_chat_goes_on_with_its_own_tokens() -> None:
    """The answer is replayed as it was sampled: nothing but the new turn is read."""
    core = make_core(says(PARIS), context=512)
    first = answered(core, Request.chat([Message.user("hello world")], SamplingParams(temperature=0.0)))
    rows(core)
    text = "".join(getattr(event, "text", "") for event in first.events)
    reply = Message(Role.ASSISTANT, text, token_ids=first.finished.token_ids, tokenizer_digest=tokenizer().digest)
    turn = "and then?"
    second = answered(
        core, Request.chat([Message.user("hello world"), reply, Message.user(turn)], SamplingParams(temperature=0.0))
    )
    usage = second.finished.usage
    said = first.finished.usage.prompt_tokens + len(first.finished.token_ids)
    assert usage.cached_tokens >= said - 1
    assert rows(core) == usage.prompt_tokens - usage.cached_tokens + usage.completion_tokens - 1


def test_a_prompt_that_others_are_reading_is_not_read_twice() -> None:
    core = make_core(slots=4, max_rows=64)
    prompt = Request(token_ids=tuple(3 + i * i % 200 for i in range(200)), params=replace(GREEDY, max_tokens=1))
    alone = answered(make_core(), prompt).finished.token_ids
    asked = [request(core, prompt) for _ in range(4)]
    run(core)
    assert [one.finished.token_ids for one in asked] == [alone] * 4
    assert rows(core) < 200 + 3 * 64
    assert sum(200 - one.finished.usage.cached_tokens for one in asked) < 200 + 3 * 64


def test_a_request_may_want_none_of_it() -> None:
    core = make_core(slots=3)
    ids = tuple(range(3, 80))
    answered(core, Request(token_ids=ids, params=GREEDY, cache=False))
    assert answered(core, Request(token_ids=ids, params=GREEDY)).finished.usage.cached_tokens == 0
    for other in ({"cache": False}, {"namespace": "other"}):
        assert answered(core, Request(token_ids=ids, params=GREEDY, **other)).finished.usage.cached_tokens == 0
    assert answered(core, Request(token_ids=ids, params=GREEDY)).finished.usage.cached_tokens == 76
    for bad in ({"cache": 1}, {"namespace": None}):
        with pytest.raises(ParameterError):
            Request(token_ids=ids, **bad)


def test_an_engine_without_keeps_nothing() -> None:
    core = make_core(prefix_cache="off")
    for _ in range(2):
        assert ask(core, 70, max_tokens=2).sequence
        run(core)
        assert core.cache.used_bytes == 0
    assert rows(core) == 142


def test_after_a_failed_step_nothing_of_it_is_found() -> None:
    core = make_core()

    def fail(step: object) -> None:
        raise SessionError("broken")

    core.session.before_step = fail
    asked = ask(core, 70, max_tokens=5)
    run(core)
    assert isinstance(asked.last, SessionError)
    core.session.before_step = lambda step: None
    again = ask(core, 70, max_tokens=5)
    run(core)
    assert again.finished.usage.cached_tokens == 0


def test_what_a_cancelled_answer_has_read_is_found() -> None:
    core = make_core(max_rows=16)
    asked = ask(core, 60, max_tokens=5)
    core.step()
    core.step()
    asked.sequence.cancel()
    run(core)
    again = ask(core, 60, max_tokens=5)
    run(core)
    assert again.finished.usage.cached_tokens == 32


def test_a_conversation_that_slides_goes_on() -> None:
    core = make_core(context=128, max_rows=16, slots=2, context_policy="slide")
    ids = tuple(3 + i * i % 200 for i in range(300))
    first = answered(core, Request(token_ids=ids, params=GREEDY)).finished
    longer = Request(token_ids=(*ids, *first.token_ids, 9, 9), params=GREEDY)
    second = answered(core, longer).finished
    assert second.usage.cached_tokens == 311
    cold = answered(make_core(context=128, max_rows=16, context_policy="slide"), longer).finished
    assert (second.token_ids, second.forgotten_tokens) == (cold.token_ids, cold.forgotten_tokens)
