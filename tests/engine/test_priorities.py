"""Who goes first, who is sent away, and whose time is up."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from edge_llm.engine.client import ThreadClient
from edge_llm.engine.core import EngineCore
from edge_llm.engine.request import PRIORITIES, Request
from edge_llm.engine.sequence import Phase
from edge_llm.errors import QueueFullError
from edge_llm.messages import FinishReason, TextDelta
from edge_llm.sampling.params import SamplingParams
from tests.engine.fakes import START, byte_ids, make_core, says, text_of
from tests.engine.test_core import Asked, answer, ask, run


class Clock:
    """Seconds, moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def order_of_ends(core: EngineCore, asked: list[Asked]) -> list[int]:
    order: list[int] = []
    while core.has_work:
        core.step()
        order += [i for i, one in enumerate(asked) if one.ended and i not in order]
    return order


# --- priorities ------------------------------------------------------------------------------------------------------


def test_the_more_urgent_goes_first_and_then_who_came_first() -> None:
    core = make_core(slots=1, clock=Clock())
    ask(core, 3, max_tokens=5)
    core.step()
    asked = [ask(core, 4, max_tokens=2, priority=name) for name in (*reversed(PRIORITIES), *PRIORITIES)]
    assert order_of_ends(core, asked) == [2, 3, 1, 4, 0, 5]


@pytest.mark.parametrize("priority", ["interactive", "normal"])
def test_a_short_prompt_waits_for_one_piece_of_a_long_one_that_nobody_is_answered_beside(priority: str) -> None:
    core = make_core(context=4096, max_rows=64, prefix_cache="off")
    long = ask(core, 3000, max_tokens=2)
    for _ in range(5):
        core.step()
    short = ask(core, 20, max_tokens=1, priority=priority)
    core.step()  # the very next one
    assert short.ended
    assert not long.ended
    last = core.session.steps[-1]
    assert [segment.rows for segment in last.segments] == [20, 44], "the rest of the step is the long prompt's"


@pytest.mark.parametrize(
    ("priority", "patience"), [("interactive", 0.0), ("normal", 60.0), ("batch", 300.0)], ids=PRIORITIES
)
def test_who_has_waited_long_enough_goes_before_anybody_new(priority: str, patience: float) -> None:
    clock = Clock()
    core = make_core(slots=1, clock=clock)
    ask(core, 3, max_tokens=5)
    old = ask(core, 4, max_tokens=2, priority=priority)
    core.step()
    clock.now += patience - 1.0
    sooner = ask(core, 5, max_tokens=2, priority="interactive")
    clock.now += 2.0
    later = ask(core, 5, max_tokens=2, priority="interactive")
    assert order_of_ends(core, [old, sooner, later]) == ([1, 0, 2] if patience else [0, 1, 2])


def test_nobody_is_starved() -> None:
    """Chats come for ever, one as soon as the last is answered; a batch request still gets its turn."""
    clock = Clock()
    core = make_core(slots=1, clock=clock)
    ask(core, 3, max_tokens=3, priority="interactive")
    batch = ask(core, 4, max_tokens=3, priority="batch")
    for second in range(1000):
        clock.now += 1.0
        if second % 3 == 0:
            ask(core, 5, max_tokens=3, priority="interactive")
        core.step()
        if batch.ended:
            break
    assert 300 <= second < 310
    assert list(batch.finished.token_ids) == answer(4, max_tokens=3)


def test_a_flood_of_batch_requests_refuses_no_chat() -> None:
    core = make_core(slots=1, max_queued_requests=2)

    def flood(priority: str, prompt: int = 3) -> int:
        taken = 0
        while True:
            try:
                ask(core, prompt, max_tokens=2, priority=priority)
            except QueueFullError:
                return taken
            taken += 1

    assert flood("batch") == 3  # one has the slot
    assert flood("normal") == 3
    assert flood("interactive") == 3
    assert [flood(priority) for priority in PRIORITIES] == [0, 0, 0]
    run(core)
    assert core.statistics().request_success == {"length": 9}
    assert core.statistics().admission_rejections == 6


def test_tokens_of_lower_priorities_do_not_count_either() -> None:
    core = make_core(slots=1, max_queued_tokens=100)
    ask(core, 60, priority="interactive", max_tokens=1)
    ask(core, 60, priority="batch", max_tokens=1)
    ask(core, 60, priority="interactive", max_tokens=1)
    for priority in PRIORITIES:
        with pytest.raises(QueueFullError, match=f"with {120 if priority == 'batch' else 60} prompt tokens"):
            ask(core, 60, priority=priority, max_tokens=1)


# --- overload --------------------------------------------------------------------------------------------------------


def test_who_is_refused_costs_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """B50: the engine says no before it renders and encodes a prompt."""
    core = make_core(slots=1, max_queued_requests=0)
    ask(core, 3)
    monkeypatch.setattr(core.intake, "sequence", None)
    with pytest.raises(QueueFullError):
        core.prepare(Request.completion("x" * 100_000), print)


def test_fifty_times_too_much_loses_nothing_that_was_taken() -> None:
    client = ThreadClient(make_core(slots=2, max_queued_requests=4))
    prompts = {n: (*byte_ids("x") * n, START) for n in range(1, 9)}
    params = SamplingParams(temperature=0.0, max_tokens=6)
    alone = {}
    for n, ids in prompts.items():
        handle = client.submit(Request(token_ids=ids, params=params))
        handle.text()
        alone[n] = handle.finished.token_ids

    def press(number: int) -> bool:
        n = 1 + number % 8
        try:
            handle = client.submit(
                Request(token_ids=prompts[n], params=params, priority=PRIORITIES[number % 3], cache=bool(number % 2))
            )
        except QueueFullError:
            return False
        handle.text()
        assert handle.finished.token_ids == alone[n]
        return True

    with ThreadPoolExecutor(50) as pool:
        answered = sum(pool.map(press, range(300)))
    told = client.statistics()
    client.close()
    assert told.request_success == {"length": answered + 8}
    assert told.admission_rejections == 300 - answered
    assert told.request_errors == {}


# --- deadlines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [Phase.QUEUED, Phase.PREFILL, Phase.DECODE])
def test_time_is_up_in_every_phase(phase: Phase) -> None:
    clock = Clock()
    core = make_core(says("abcdefghijkl"), slots=1, max_rows=16, clock=clock)
    if phase is Phase.QUEUED:
        ask(core, [START])
    prompt = [*byte_ids("x") * (40 if phase is Phase.PREFILL else 4), START]
    asked = ask(core, prompt, timeout_s=5.0)
    core.step()
    clock.now += 4.99
    core.step()
    assert asked.sequence.phase is phase
    clock.now += 0.01
    core.step()
    assert asked.finished.reason is FinishReason.TIMEOUT
    assert text_of(asked.events) == ("ab" if phase is Phase.DECODE else "")
    assert asked.finished.timings.total_s == pytest.approx(5.0)
    run(core)
    assert core.free_slots == 1
    assert core.statistics().request_success["timeout"] == 1


def test_a_time_that_is_enough_changes_nothing() -> None:
    clock = Clock()
    core = make_core(clock=clock)
    asked = ask(core, 5, max_tokens=4, timeout_s=3)
    while core.has_work:
        clock.now += 0.5
        core.step()
    assert asked.finished.reason is FinishReason.LENGTH
    assert list(asked.finished.token_ids) == answer(5, max_tokens=4)


def test_what_was_held_back_is_told_when_time_is_up() -> None:
    clock = Clock()
    core = make_core(says("abcdef"), clock=clock)
    asked = ask(core, [START], stop=("bcdefX",), timeout_s=1.0)
    for _ in range(4):
        core.step()
    clock.now += 1.0
    core.step()
    assert text_of(asked.events) == "abcd"
    assert sum(isinstance(event, TextDelta) for event in asked.events) == 2
