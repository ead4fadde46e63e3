"""Parked requests: the urgent get their slots, and they go on later with the tokens they would have had alone."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from edge_llm.config import EngineConfig
from edge_llm.engine.assembly import open_engine
from edge_llm.engine.core import EngineCore
from edge_llm.engine.request import Request
from edge_llm.engine.sequence import Phase
from edge_llm.errors import ParameterError
from edge_llm.kernels.warmup import KernelLibrary
from edge_llm.messages import Finished, FinishReason, PromptProgress, TextDelta
from edge_llm.sampling.grammar import Grammar
from edge_llm.sampling.params import SamplingParams
from tests.engine.fakes import make_core
from tests.engine.test_core import SLIDING, Speculative, answer, ask, run

BATCH = {"priority": "batch"}
CHAT = {"priority": "interactive"}


def steps(core: EngineCore, number: int) -> None:
    for _ in range(number):
        core.step()
        core.check_integrity()


# --- who is parked -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spare", [0, 2])
@pytest.mark.parametrize("progress", [1, 3, 9])
def test_a_chat_takes_the_slot_of_a_batch_request(spare: int, progress: int) -> None:
    """In the middle of its prompt, and of its answer."""
    core = make_core(slots=1, spare=spare, max_rows=16)
    slow = ask(core, 40, max_tokens=20, temperature=1.0, seed=5, **BATCH)
    steps(core, progress)
    quick = ask(core, 7, max_tokens=5, **CHAT)
    steps(core, 1)
    assert slow.sequence.phase is Phase.QUEUED
    assert quick.sequence.phase is Phase.DECODE
    run(core)
    assert list(quick.finished.token_ids) == answer(7, max_tokens=5)
    assert list(slow.finished.token_ids) == answer(40, max_tokens=20, temperature=1.0, seed=5)
    assert core.statistics().num_preemptions == slow.sequence.preemptions == 1
    told = [event.done for event in slow.events if isinstance(event, PromptProgress)]
    assert told == sorted(set(told))
    assert told[-1] == 40
    kinds = [type(event) for event in slow.events]
    assert PromptProgress not in kinds[kinds.index(TextDelta) :]
    assert slow.finished.usage.cached_tokens == 0


@pytest.mark.parametrize(("spare", "rows"), [(1, 1), (0, 50)])
def test_what_is_parked_is_kept_where_there_is_room(spare: int, rows: int) -> None:
    """With a slot to spare nothing of it is computed again but the last token; else all of it."""
    core = make_core(slots=1, spare=spare)
    slow = ask(core, 40, max_tokens=20, **BATCH)
    steps(core, 10)
    ask(core, 7, max_tokens=1, **CHAT)
    steps(core, 1)
    core.session.steps.clear()
    steps(core, 1)
    assert core.session.steps[0].rows == rows
    run(core)
    assert list(slow.finished.token_ids) == answer(40, max_tokens=20)


def test_the_least_urgent_is_parked_and_comes_back_first() -> None:
    core = make_core(slots=3, spare=2)
    batches = [ask(core, n, max_tokens=9, **BATCH) for n in (3, 4)]
    normal = ask(core, 5, max_tokens=9)
    waiting = ask(core, 6, max_tokens=9, **BATCH)
    steps(core, 2)
    chats = [ask(core, n, max_tokens=9, **CHAT) for n in (8, 9)]
    steps(core, 1)
    assert [one.sequence.preemptions for one in (*batches, normal)] == [1, 1, 0]
    chats.append(ask(core, 10, max_tokens=9, **CHAT))
    chats.append(ask(core, 11, max_tokens=9, **CHAT))
    steps(core, 1)
    assert normal.sequence.preemptions == 1
    assert chats[-1].sequence.phase is Phase.QUEUED  # nobody is left to make room for it
    order = []
    everybody = [*batches, normal, waiting, *chats]
    while core.has_work:
        core.step()
        order += [i for i, one in enumerate(everybody) if one.ended and i not in order]
    assert order[:3] == [4, 5, 6]
    assert [i for i in order if i < 4] == [2, 0, 1, 3]
    for one, prompt in zip(everybody, (3, 4, 5, 6, 8, 9, 10, 11), strict=True):
        assert list(one.finished.token_ids) == answer(prompt, max_tokens=9)


def test_equals_and_those_who_have_waited_are_left_alone() -> None:
    now = [0.0]
    core = make_core(slots=1, clock=lambda: now[0])
    old = ask(core, 5, max_tokens=50, **BATCH)
    now[0] += 301.0
    steps(core, 3)
    ask(core, 6, max_tokens=2, **BATCH).sequence.cancel()
    late = ask(core, 7, max_tokens=2, **CHAT)
    steps(core, 3)
    assert old.sequence.preemptions == 0
    assert late.sequence.phase is Phase.QUEUED
    run(core)
    assert list(old.finished.token_ids) == answer(5, max_tokens=50)


def test_being_parked_again_and_again_has_an_end() -> None:
    """Chats that come in a row park a batch request nine times, a normal one once, and then wait."""
    for priority, times in (("batch", 9), ("normal", 1)):
        core = make_core(slots=1, max_rows=16)
        slow = ask(core, 40, max_tokens=20, priority=priority)
        for _ in range(12):
            steps(core, 3)
            ask(core, 7, max_tokens=1, **CHAT)
        run(core)
        assert slow.sequence.preemptions == times
        assert list(slow.finished.token_ids) == answer(40, max_tokens=20)


# --- turns: answers that never end, and others of the same priority who wait -------------------------------------------------


@pytest.mark.parametrize("priority", ["interactive", "normal", "batch"])
@pytest.mark.parametrize("spare", [0, 3])
def test_long_answers_take_turns_with_those_who_wait(priority: str, spare: int) -> None:
    """A second a step: each is answered for ten, nobody for longer while others wait, and all have their own tokens."""
    ticks = count(step=0.25)
    core = make_core(slots=2, spare=spare, clock=lambda: next(ticks))
    long = [ask(core, n, max_tokens=60, priority=priority, temperature=1.0, seed=n) for n in (3, 4, 5)]
    steps(core, 20)
    late = [ask(core, n, max_tokens=2, priority=priority) for n in (8, 9)]
    began = core.statistics().num_steps
    while not all(one.ended for one in late):
        steps(core, 1)
    assert core.statistics().num_steps - began < 60
    assert not any(one.ended for one in long)
    run(core)
    assert all(one.sequence.preemptions for one in long)
    for one, prompt in zip((*long, *late), (3, 4, 5, 8, 9), strict=True):
        params = {"max_tokens": 60, "temperature": 1.0, "seed": prompt} if one in long else {"max_tokens": 2}
        assert list(one.finished.token_ids) == answer(prompt, **params)


def test_turns_go_round() -> None:
    """Nobody keeps a slot while the others share one."""
    ticks = count(step=0.25)
    core = make_core(slots=2, spare=2, context=1024, clock=lambda: next(ticks))
    asked = [ask(core, n, max_tokens=300) for n in (3, 4, 5)]
    parked = []
    for _ in range(300):
        before = [one.sequence.preemptions for one in asked]
        steps(core, 1)
        parked += [i for i, one in enumerate(asked) if one.sequence.preemptions > before[i]]
    assert len(parked) >= 6
    assert all(parked[i : i + 3] in ([0, 1, 2], [1, 2, 0], [2, 0, 1]) for i in range(len(parked) - 2))


def test_a_turn_is_not_over_before_it_was_worth_its_prompt() -> None:
    now = [0.0]
    core = make_core(slots=1, clock=lambda: now[0])
    slow = ask(core, 5, max_tokens=50)
    other = ask(core, 6, max_tokens=2)
    core._slots.admit(now[0])
    now[0] = 20.0  # so long until its first token
    steps(core, 1)
    now[0] = 79.0
    steps(core, 1)
    assert slow.sequence.preemptions == 0
    now[0] = 80.0
    steps(core, 1)
    assert slow.sequence.preemptions == 1
    assert other.sequence.phase is Phase.DECODE


def test_lower_priorities_have_a_turn_once_they_have_waited_long_enough() -> None:
    now = [0.0]
    core = make_core(slots=1, clock=lambda: now[0])
    chat = ask(core, 5, max_tokens=50, **CHAT)
    batch = ask(core, 6, max_tokens=50, **BATCH)
    steps(core, 2)
    for moment, running in ((299.0, chat), (300.1, batch), (310.0, batch), (310.2, chat), (600.0, chat)):
        now[0] = moment
        steps(core, 1)
        assert running.sequence.phase is Phase.DECODE
    run(core)


def test_labels_have_room_of_their_own_in_the_budget() -> None:
    tile = make_core(context=256).cache.bytes_of(1)
    core = make_core(slots=2, context=256, kv_budget=3 * tile)
    params = SamplingParams(temperature=0.0, max_tokens=1)
    asked = [
        core.prepare(Request(token_ids=(i, *range(3, 66)), choices=("y" * 60, "n"), params=params), lambda event: None)
        for i in (3, 4)
    ]
    for one in asked:
        core.enqueue(one)
    steps(core, 1)
    assert [one.phase for one in asked] == [Phase.PREFILL, Phase.QUEUED]
    while core.has_work:
        core.step()
        assert core.statistics().kv_cache_usage_perc <= 1


def test_somebody_parked_can_end_there() -> None:
    """Cancelled, out of time, or with the engine; and its conversation can still be gone on with."""
    now = [0.0]
    core = make_core(slots=2, spare=2, clock=lambda: now[0])
    asked = [ask(core, 40, max_tokens=30, **BATCH), ask(core, 41, max_tokens=30, timeout_s=5, **BATCH)]
    steps(core, 4)
    chats = [ask(core, n, max_tokens=40, **CHAT) for n in (7, 8)]
    steps(core, 2)
    assert [one.sequence.phase for one in asked] == [Phase.QUEUED] * 2
    asked[0].sequence.cancel()
    now[0] += 5.0
    steps(core, 1)
    assert [one.finished.reason for one in asked] == [FinishReason.CANCELLED, FinishReason.TIMEOUT]
    assert list(asked[0].finished.token_ids) == answer(40, max_tokens=30)[:4]
    third = ask(core, 42, max_tokens=30, **BATCH)
    core.close()
    assert third.finished.reason is FinishReason.CANCELLED
    assert all(chat.finished.reason is FinishReason.CANCELLED for chat in chats)


def test_parked_requests_refuse_nobody() -> None:
    core = make_core(slots=2, max_queued_requests=2)
    for n in (3, 4):
        ask(core, n, max_tokens=9, **BATCH)
    steps(core, 1)
    for n in (5, 6):
        ask(core, n, max_tokens=9, **CHAT)
    steps(core, 1)
    assert [ask(core, n, max_tokens=2, **BATCH).ended for n in (7, 8)] == [False, False]
    run(core)
    assert core.statistics().request_success == {"length": 6}


def test_a_parked_request_that_has_slid_goes_on() -> None:
    """From its slot where that is kept; from the first token on where it is not."""
    for spare in (0, 1):
        core = make_core(**SLIDING, slots=1, spare=spare, max_rows=32)
        alone = make_core(**SLIDING, slots=1, max_rows=32)
        slow, expected = (ask(one, 150, max_tokens=90, **BATCH) for one in (core, alone))
        run(alone)
        steps(core, 20)
        ask(core, 7, max_tokens=3, **CHAT)
        run(core)
        assert slow.sequence.preemptions == 1
        assert slow.finished.token_ids == expected.finished.token_ids
        assert slow.finished.forgotten_tokens == expected.finished.forgotten_tokens > 100


def test_what_a_parked_request_has_forgotten_is_told() -> None:
    core = make_core(**SLIDING, slots=1, spare=1, max_rows=32)
    slow = ask(core, 150, max_tokens=90, **BATCH)
    steps(core, 20)
    rows = slow.sequence.committed
    ask(core, 7, max_tokens=30, **CHAT)
    steps(core, 2)
    slow.sequence.cancel()
    run(core)
    assert slow.finished.forgotten_tokens == rows - 100


def test_drafts_go_on_too() -> None:
    core = make_core(slots=1, spare=1, max_rows=16)
    slow = ask(core, 20, max_tokens=30, **BATCH)
    slow.sequence.decoder = Speculative(answer(20, max_tokens=30), [3], [2, 0])
    for _ in range(3):
        steps(core, 3)
        ask(core, 7, max_tokens=2, **CHAT)
        steps(core, 1)
    run(core)
    assert slow.sequence.preemptions == 3
    assert list(slow.finished.token_ids) == answer(20, max_tokens=30)


def test_a_request_that_shares_nothing_is_read_again() -> None:
    core = make_core(slots=1, spare=1)
    events: list[object] = []
    private = core.prepare(
        Request(token_ids=(5, 6, 7), params=_greedy(9), cache=False, priority="batch"), events.append
    )
    core.enqueue(private)
    steps(core, 4)
    ask(core, 7, max_tokens=2, **CHAT)
    run(core)
    assert private.preemptions == 1
    assert core.session.steps[6].rows == 3 + 4
    alone = make_core()
    expected = ask(alone, [5, 6, 7], max_tokens=9)
    run(alone)
    assert events[-1].token_ids == expected.finished.token_ids


def _greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens)


# --- the same prompt at once -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [30, 150])
def test_a_prompt_asked_several_times_is_read_once(prompt: int) -> None:
    core = make_core(slots=4, max_rows=64)
    asked = [ask(core, prompt, max_tokens=6, temperature=1.0, seed=seed) for seed in range(4)]
    run(core)
    for seed, one in enumerate(asked):
        assert list(one.finished.token_ids) == answer(prompt, max_tokens=6, temperature=1.0, seed=seed)
    assert sum(step.rows for step in core.session.steps) == prompt + 3 + 4 * 5
    assert [one.finished.usage.cached_tokens for one in asked] == [0] + [prompt - 1] * 3


def test_who_waits_for_rows_goes_on_when_they_do_not_come() -> None:
    core = make_core(slots=2, max_rows=32, context=512)
    first, second = (ask(core, 200, max_tokens=3) for _ in range(2))
    steps(core, 3)
    assert (first.sequence.committed, second.sequence.committed) == (96, 0)
    first.sequence.cancel()
    run(core)
    assert list(second.finished.token_ids) == answer(200, max_tokens=3)
    assert second.finished.usage.cached_tokens == 96


def test_the_urgent_do_not_wait_for_others() -> None:
    core = make_core(slots=2, max_rows=32, context=512)
    batch = ask(core, 200, max_tokens=3, **BATCH)
    steps(core, 2)
    chat = ask(core, 200, max_tokens=3, **CHAT)
    steps(core, 1)
    assert (batch.sequence.committed, chat.sequence.committed) == (64, 96)
    run(core)
    assert batch.finished.token_ids == chat.finished.token_ids


# --- memory --------------------------------------------------------------------------------------------------------------


def test_requests_wait_until_their_longest_answer_fits() -> None:
    """The cache never holds more than its budget, idle conversations and parked ones included."""
    core = make_core(slots=4, spare=3, context=512)
    tile = core.cache.bytes_of(1)
    core = make_core(slots=4, spare=3, context=512, kv_budget=6 * tile)
    asked = [ask(core, n, max_tokens=60, **({} if n % 3 else BATCH)) for n in (100, 30, 150, 3, 99, 100, 200)]
    steps(core, 5)
    asked.append(ask(core, 5, max_tokens=320, **CHAT))  # alone it takes all there is
    most = 0
    while core.has_work:
        core.step()
        core.check_integrity()
        most = max(most, core.cache.used_bytes)
    assert 4 * tile <= most <= 6 * tile
    assert core.statistics().num_preemptions >= 1
    for one, prompt in zip(asked, (100, 30, 150, 3, 99, 100, 200, 5), strict=True):
        assert list(one.finished.token_ids) == answer(prompt, max_tokens=len(one.finished.token_ids))
        assert one.finished.reason is FinishReason.LENGTH


def test_nobody_is_parked_in_vain() -> None:
    core = make_core(slots=3, context=512)
    tile = core.cache.bytes_of(1)
    core = make_core(slots=3, context=512, kv_budget=6 * tile)
    ask(core, 5, max_tokens=250, **CHAT)  # 4 tiles
    small = ask(core, 4, max_tokens=50, **BATCH)
    steps(core, 2)
    large = ask(core, 6, max_tokens=150, **CHAT)
    steps(core, 2)
    assert small.sequence.preemptions == 0
    assert large.sequence.phase is Phase.QUEUED


def test_a_budget_below_one_conversation_is_refused(tiny_folder: Path, kernels: KernelLibrary) -> None:
    with pytest.raises(ParameterError, match="context of 256 tokens takes"):
        open_engine(tiny_folder, EngineConfig(context=256, kv_budget_bytes=1000))


# --- over real kernels ---------------------------------------------------------------------------------------------------


def _words(seed: int, **more: object) -> Callable[[], Request]:
    params = SamplingParams(temperature=0.9, seed=seed, max_tokens=40, ignore_eos=True, repetition_penalty=1.1)
    return lambda: Request.completion("one two three one two " * 6, params.with_options(**more), priority="batch")


def _sliding() -> Request:
    return Request(
        token_ids=tuple(3 + i * i % 300 for i in range(200)),
        params=SamplingParams(temperature=1.0, seed=4, max_tokens=60, ignore_eos=True, top_logprobs=2),
        context_policy="slide",
        priority="batch",
    )


def _structured() -> Request:
    schema = Grammar.json_schema(
        {
            "type": "object",
            "properties": {"long_name_of_a_field": {"enum": ["one", "two"]}, "n": {"type": "integer"}},
            "required": ["long_name_of_a_field", "n"],
        }
    )
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=80)
    return Request.completion("A row:", params, response_format=schema, priority="batch")


@pytest.mark.parametrize(("layout", "speculation"), [("ring", "off"), ("ring", "lookup"), ("static", "lookup")])
def test_real_answers_are_the_same_however_often_they_are_parked(
    tiny_folder: Path, kernels: KernelLibrary, layout: str, speculation: str
) -> None:
    """B15: every stage of the sampler that remembers, drafts, grammars, and conversations past their context."""
    makers = [_words(1), _words(2, dry_multiplier=0.8, dry_allowed_length=1), _words(3, mirostat_tau=3.0)]
    makers += [_structured, _sliding]
    config = EngineConfig(context=128, slots=1, max_chunk=32, speculation=speculation, layout=layout)

    def answers(disturb: bool) -> list[object]:
        core = open_engine(tiny_folder, config)
        told: list[object] = []
        for number, make in enumerate(makers):
            events: list[object] = []
            slow = core.prepare(make(), events.append)
            core.enqueue(slow)
            stops = [slow.prompt_tokens + tokens for tokens in (9, 3, 0)] if disturb else []
            while not slow.ended:
                core.step()
                if stops and len(slow.ids) >= stops[-1] and slow.committed > 40:
                    stops.pop()
                    # the second time so many that no slot is left for the rows of the one that is parked
                    for i in range(6 if len(stops) == 1 else 1):
                        ids = tuple(3 + (number + i * j) % 300 for j in range(9))
                        quick = Request(token_ids=ids, params=_greedy(2), priority="interactive")
                        core.enqueue(core.prepare(quick, lambda event: None))
            last = events[-1]
            assert isinstance(last, Finished)
            assert slow.preemptions == (3 if disturb else 0)
            deltas = [event for event in events if isinstance(event, TextDelta)]
            told.append((last.token_ids, last.reason, [token for delta in deltas for token in delta.tokens]))
        core.close()
        return told

    assert answers(disturb=True) == answers(disturb=False)


@pytest.mark.parametrize("spare", [0, 2])
@pytest.mark.parametrize("often", [1, 2, 3])
def test_labels_and_vectors_are_the_same_however_often_they_are_parked(spare: int, often: int) -> None:
    """Between the tokens of a label too, where others have just left the rows of all labels."""
    ids = tuple(range(3, 43))
    asked = [
        Request(token_ids=ids, choices=("yes", "no", "none", "nobody at all"), priority="batch"),
        Request(token_ids=ids, embedding="mean", priority="batch"),
    ]

    def answers(disturb: bool) -> list[object]:
        told: list[object] = []
        for request in asked:
            core = make_core(slots=1, spare=spare, max_rows=16)
            events: list[object] = []
            slow = core.prepare(request, events.append)
            core.enqueue(slow)
            for step in range(200):
                core.step()
                core.check_integrity()
                if disturb and step % often == 0 and slow.slot is not None and slow.preemptions < 9:
                    other = Request(token_ids=ids, choices=("yes", "none", "nobody"), priority="interactive")
                    core.enqueue(core.prepare(other, lambda event: None))
            last = events[-1]
            assert isinstance(last, Finished)
            assert slow.preemptions >= (1 if disturb else 0)
            told.append((last.choices, last.embedding))
        return told

    assert answers(disturb=True) == answers(disturb=False)
