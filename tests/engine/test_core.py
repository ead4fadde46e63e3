"""EngineCore step by step: answers, ends, failures, and that nothing is left behind."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from itertools import count
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edge_llm.engine.core import EngineCore
from edge_llm.engine.request import PRIORITIES, Request
from edge_llm.engine.sequence import Phase, Sequence
from edge_llm.errors import (
    ContextLengthError,
    EdgeLLMError,
    EngineStoppedError,
    GenerationError,
    ParameterError,
    QueueFullError,
    SessionError,
)
from edge_llm.messages import Finished, FinishReason, Message, PromptProgress, Role, TextDelta
from edge_llm.sampling.decoders import Selection
from edge_llm.sampling.params import SamplingParams
from edge_llm.sampling.sampler import Sampled
from tests.engine.fakes import END, PARIS, START, VOCAB, NextToken, byte_ids, hashed_logits, make_core, says, text_of

GREEDY = SamplingParams(temperature=0.0)
TILE_BYTES = make_core().cache.bytes_of(1)


@dataclass
class Asked:
    """A request in the engine, and what it was told."""

    sequence: Sequence
    events: list[object] = field(default_factory=list)

    @property
    def last(self) -> object:
        return self.events[-1] if self.events else None

    @property
    def ended(self) -> bool:
        return isinstance(self.last, Finished | EdgeLLMError)

    @property
    def finished(self) -> Finished:
        assert isinstance(self.last, Finished)
        return self.last


def ask(
    core: EngineCore,
    prompt: list[int] | int,
    *,
    priority: str = "normal",
    timeout_s: float | None = None,
    beams: int = 1,
    owner: str = "",
    **params: object,
) -> Asked:
    """Enqueue a prompt: ids, or a number of ids that are like no other number's."""
    ids = [3 + (7 * prompt + i * i) % (VOCAB - 3) for i in range(prompt)] if isinstance(prompt, int) else prompt
    events: list[object] = []
    request = Request(
        token_ids=tuple(ids),
        params=SamplingParams(**{"temperature": 0.0, **params}),
        priority=priority,
        timeout_s=timeout_s,
        beams=beams,
        owner=owner,
    )
    asked = Asked(core.prepare(request, events.append), events)
    core.enqueue(asked.sequence)
    return asked


def run(core: EngineCore, limit: int = 2000) -> None:
    for _ in range(limit):
        if not core.has_work:
            core.check_integrity()
            return
        core.step()
        core.check_integrity()
    raise AssertionError("the engine does not come to an end")


def answer(prompt: int, **params: object) -> list[int]:
    """The ids that a prompt is answered with when nobody else is there."""
    core = make_core(context=512, slots=3)
    asked = ask(core, prompt, **params)
    run(core)
    return list(asked.finished.token_ids)


# --- answers ---------------------------------------------------------------------------------------------------------


def test_a_chat_is_answered_in_deltas() -> None:
    core = make_core(says(PARIS))
    events: list[object] = []
    core.enqueue(core.prepare(Request.chat([Message.user("hello world")], GREEDY), events.append))
    run(core)
    assert text_of(events) == PARIS
    assert isinstance(events[0], PromptProgress)
    assert sum(isinstance(event, TextDelta) for event in events) == len(PARIS)
    last = events[-1]
    assert isinstance(last, Finished)
    assert last.reason is FinishReason.STOP
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (events[0].total, len(PARIS.encode()) + 1)
    assert list(last.token_ids) == byte_ids(PARIS)


def test_a_long_prompt_is_read_in_chunks_with_one_row_of_logits() -> None:
    core = make_core(max_rows=16)
    asked = ask(core, 40, max_tokens=3)
    run(core)
    assert [(step.rows, step.logit_rows) for step in core.session.steps] == [(16, 0), (16, 0), (8, 1), (1, 1), (1, 1)]
    progress = [event.done for event in asked.events if isinstance(event, PromptProgress)]
    assert progress == [16, 32, 40]
    assert asked.finished.reason is FinishReason.LENGTH
    assert len(asked.finished.token_ids) == 3


def test_times_are_what_they_are_defined_as() -> None:
    ticks = count(step=1.0)
    core = make_core(says("abc"), clock=lambda: next(ticks))
    asked = ask(core, [5, START])  # at 0
    run(core)  # step k reads the clock thrice: plan at 3k + 1, begin, commit at 3k + 3; the end at 13
    timings = asked.finished.timings
    assert (timings.queue_s, timings.ttft_s, timings.total_s) == (1.0, 3.0, 13.0)
    assert timings.prefill_tokens_per_s == 1.0
    assert timings.decode_tokens_per_s == 3 / (12.0 - 3.0)
    assert timings.tpot_s == 3.0


def test_the_seed_in_use_is_told_and_repeats_the_answer() -> None:
    core = make_core()
    first = ask(core, 9, temperature=1.0, max_tokens=20)
    run(core)
    seed = first.finished.seed
    again, other = ask(core, 9, temperature=1.0, max_tokens=20, seed=seed), ask(core, 9, temperature=1.0, max_tokens=20)
    run(core)
    assert again.finished.token_ids == first.finished.token_ids
    assert other.finished.token_ids != first.finished.token_ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("mixed", [1, 5, 64])
def test_an_answer_is_the_same_alone_and_among_others(temperature: float, mixed: int) -> None:
    """B15: the same seed gives the same tokens whatever else runs, in whatever chunks the prompt is read."""
    prompts = [3, 70, 12, 130, 1, 33, 64, 65]
    params = {"temperature": temperature, "max_tokens": 15}
    alone = [answer(prompt, seed=prompt, **params) for prompt in prompts]
    core = make_core(slots=5, mixed_chunk=mixed)
    together = []
    for prompt in prompts:
        together.append(ask(core, prompt, seed=prompt, **params))
        core.step()  # so that they join at different places
    run(core)
    assert [list(asked.finished.token_ids) for asked in together] == alone


def test_nobody_who_is_answered_waits_for_a_long_prompt() -> None:
    core = make_core(slots=3, mixed_chunk=8)
    short = [ask(core, 2, max_tokens=20), ask(core, 3, max_tokens=20)]
    core.step()
    long = ask(core, 160, max_tokens=5)
    for _ in range(15):
        before = [len(asked.sequence.ids) for asked in short]
        core.step()
        assert [len(asked.sequence.ids) for asked in short] == [n + 1 for n in before]
    assert long.sequence.committed == 96  # three steps were measured without it
    run(core)
    assert list(long.finished.token_ids) == answer(160, max_tokens=5)


def test_answers_that_stand_still_for_a_long_prompt_go_on_with_the_same_tokens() -> None:
    core = make_core(slots=3, mixed_pause_ms=300)
    short = [ask(core, 2, max_tokens=20, temperature=1.0, seed=1), ask(core, 3, max_tokens=20)]
    core.step()
    long = ask(core, 210, max_tokens=5)
    stood_still = 0
    while core.has_work:
        before = [len(asked.sequence.ids) for asked in short]
        core.step()
        core.check_integrity()
        stood_still += before == [len(asked.sequence.ids) for asked in short] and not short[0].ended
    assert stood_still == 3  # 64 rows each, after a first guess; and all take part in the last one
    assert list(long.finished.token_ids) == answer(210, max_tokens=5)
    assert list(short[0].finished.token_ids) == answer(2, max_tokens=20, temperature=1.0, seed=1)
    assert list(short[1].finished.token_ids) == answer(3, max_tokens=20)


def test_who_stands_still_is_cancelled_at_once() -> None:
    core = make_core(slots=3, mixed_pause_ms=300)
    short = ask(core, 2, max_tokens=20)
    core.step()
    ask(core, 210, max_tokens=5)
    while core.session.steps[-1].rows < 64:
        core.step()
    assert len(core.session.steps[-1].segments) == 1
    assert not short.ended
    short.sequence.cancel()
    core.step()
    assert short.finished.reason is FinishReason.CANCELLED
    run(core)


def test_more_requests_than_slots_are_answered_in_order() -> None:
    core = make_core(slots=2)
    asked = [ask(core, n, max_tokens=4) for n in range(1, 8)]
    order = []
    while core.has_work:
        core.step()
        order += [i for i, one in enumerate(asked) if one.ended and i not in order]
    assert order == list(range(7))


# --- the context -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [64, 65, 100])
def test_prompts_around_the_context(context: int) -> None:
    """B16: one under, equal, one over and ten times the context."""
    core = make_core(context=context)
    asked = ask(core, context - 1)
    run(core)
    assert asked.finished.reason is FinishReason.LENGTH
    assert len(asked.finished.token_ids) == 1
    for length in (context, context + 1, 10 * context):
        with pytest.raises(ContextLengthError, match=f"{length} tokens.* {context} tokens") as caught:
            ask(core, length)
        assert (caught.value.prompt_tokens, caught.value.context) == (length, context)
    assert not core.has_work


def test_the_context_ends_an_answer_at_the_same_place_whatever_the_prompt() -> None:
    """B18 for the linear ring: by prompt or by generation, the same capacity."""
    core = make_core(context=80)
    for prompt in (1, 40, 79):
        asked = ask(core, prompt)
        run(core)
        assert asked.finished.reason is FinishReason.LENGTH
        assert prompt + len(asked.finished.token_ids) == 80


def test_max_tokens_beyond_the_context_is_cut() -> None:
    core = make_core(context=80)
    asked = ask(core, 70, max_tokens=1000)
    run(core)
    assert len(asked.finished.token_ids) == 10


SLIDING = {"context": 100, "context_policy": "slide"}


@pytest.mark.parametrize("prompt", [1, 63, 64, 65, 99, 100, 101, 250, 1000])
def test_a_sliding_conversation_goes_on(prompt: int) -> None:
    """B16, B18: any prompt is read whole, and what falls out of the context is counted."""
    core = make_core(**SLIDING, max_rows=32)
    asked = ask(core, prompt, max_tokens=150)
    run(core)
    finished = asked.finished
    assert finished.reason is FinishReason.LENGTH
    assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (prompt, 150)
    assert [event for event in asked.events if isinstance(event, PromptProgress)][-1] == PromptProgress(prompt, prompt)
    assert sum(step.rows for step in core.session.steps) == prompt + 149
    assert finished.forgotten_tokens == max(0, prompt + 149 - 100)
    assert finished.forgotten == ()


def test_an_answer_that_slides_ends_by_itself_after_a_whole_context() -> None:
    core = make_core(**SLIDING)
    asked = ask(core, 80)
    run(core)
    assert (asked.finished.reason, len(asked.finished.token_ids)) == (FinishReason.LENGTH, 100)


def test_a_conversation_of_exactly_the_context_has_forgotten_nothing() -> None:
    core = make_core(**SLIDING)
    for answer_tokens, gone in ((20, 0), (21, 0), (22, 1)):  # the last token chosen is not read
        asked = ask(core, 80, max_tokens=answer_tokens)
        run(core)
        assert asked.finished.forgotten_tokens == gone


def test_sliding_and_other_requests_share_an_engine() -> None:
    """B15: each says what it says alone, whatever the policies, and `error` still ends at the context."""
    core = make_core(context=100, slots=4, mixed_chunk=5)

    def submit(prompt: int, policy: str, target: EngineCore) -> Asked:
        events: list[object] = []
        ids = tuple(3 + (7 * prompt + i * i) % (VOCAB - 3) for i in range(prompt))
        params = SamplingParams(temperature=1.0, seed=prompt, max_tokens=120)
        asked = Asked(
            target.prepare(Request(token_ids=ids, params=params, context_policy=policy), events.append), events
        )
        target.enqueue(asked.sequence)
        return asked

    jobs = [(3, "slide"), (90, "error"), (300, "slide"), (12, "error"), (101, "slide"), (99, "error")]
    together = [submit(*job, core) for job in jobs]
    run(core)
    for job, asked in zip(jobs, together, strict=True):
        alone = make_core(context=100, slots=1)
        one = submit(*job, alone)
        run(alone)
        assert asked.finished.token_ids == one.finished.token_ids
        assert len(one.finished.token_ids) == (120 if job[1] == "slide" else 100 - job[0])


def test_messages_that_fell_out_are_named() -> None:
    """Those of which no token is attended to; the first tokens of a conversation always stay."""
    core = make_core(says("x" * 100), context=128, context_policy="slide")
    messages = [Message.system("s" * 20), Message.user("u" * 60)]  # which lie at 7..27 and 38..98 of the prompt
    messages += [
        Message(Role.ASSISTANT, "a" * 40),
        Message.user("v" * 60),
        Message(Role.ASSISTANT, ""),
        Message.user("w"),
    ]
    _, places = core.intake.prompt(Request.chat(messages))
    assert places[1].start < 64 < places[1].stop
    finished = None
    for length in range(1, 100):
        events: list[object] = []
        params = SamplingParams(temperature=0, max_tokens=length)
        core.enqueue(core.prepare(Request.chat(messages, params), events.append))
        run(core)
        finished = events[-1]
        rows = finished.usage.prompt_tokens + length - 1
        attended = {*range(64), *range(rows - 64, rows)}
        assert finished.forgotten_tokens == rows - len(attended)
        expected = [i for i, place in enumerate(places) if attended.isdisjoint(place)]
        assert list(finished.forgotten) == [i for i in expected if i != 4 or 3 in expected]
    assert finished.forgotten == (2, 3, 4, 5)


# --- cancelling ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [Phase.QUEUED, Phase.PREFILL, Phase.DECODE])
def test_cancel_is_seen_within_a_step(phase: Phase) -> None:
    core = make_core(slots=1, max_rows=16)
    if phase is Phase.QUEUED:
        ask(core, 5, max_tokens=30)
    asked = ask(core, 40 if phase is Phase.PREFILL else 5, max_tokens=30)
    core.step()
    core.step()
    assert asked.sequence.phase is phase
    said = [event for event in asked.events if isinstance(event, TextDelta)]
    asked.sequence.cancel()
    core.step()
    assert asked.finished.reason is FinishReason.CANCELLED
    assert asked.finished.usage.completion_tokens == (2 if phase is Phase.DECODE else 0)
    assert [event for event in asked.events if isinstance(event, TextDelta)][: len(said)] == said
    run(core)
    assert sum(isinstance(event, Finished) for event in asked.events) == 1
    assert core.free_slots == 1


def test_a_cancelled_answer_keeps_what_was_held_back() -> None:
    core = make_core(says("abcdef"))
    asked = ask(core, [START], stop=("bcdefX",))
    for _ in range(4):
        core.step()
    asked.sequence.cancel()
    core.step()
    assert text_of(asked.events) == "abcd"


# --- failures --------------------------------------------------------------------------------------------------------


def poisoned(ids: list[int]) -> np.ndarray:
    """As the model, but a prompt that starts with 7 gets rows of NaN once it has 12 tokens."""
    row = hashed_logits(ids)
    if ids[0] == 7 and len(ids) >= 12:
        row[:] = np.nan
    return row


def test_a_row_that_is_no_number_ends_one_request_alone() -> None:
    """B14, B54."""
    core = make_core(poisoned, slots=4)
    others = [ask(core, n, max_tokens=20) for n in (4, 6)]
    bad = ask(core, [7, 8, 9], max_tokens=20)
    run(core)
    assert isinstance(bad.last, GenerationError)
    assert len([event for event in bad.events if isinstance(event, TextDelta)]) > 0
    for asked, prompt in zip(others, (4, 6), strict=True):
        assert list(asked.finished.token_ids) == answer(prompt, max_tokens=20)


class BadDecoder:
    seed = 0

    def __init__(self, selection: Selection | Exception) -> None:
        self.selection = selection

    def propose(self, room: int) -> tuple[int, ...]:
        return ()

    def select(self, logits: np.ndarray) -> Selection:
        if isinstance(self.selection, Exception):
            raise self.selection
        return self.selection


@pytest.mark.parametrize(
    "selection",
    [ZeroDivisionError("oops"), Selection(()), Selection((Sampled(5), Sampled(6)))],
    ids=["raises", "chooses nothing", "chooses more than it was given"],
)
def test_a_faulty_decoder_ends_one_request_alone(selection: Selection | Exception) -> None:
    core = make_core()
    bad, good = ask(core, 3), ask(core, 4, max_tokens=5)
    bad.sequence.decoder = BadDecoder(selection)
    run(core)
    assert isinstance(bad.last, GenerationError)
    assert bad.last.__cause__ is not None
    assert list(good.finished.token_ids) == answer(4, max_tokens=5)


def test_a_guess_that_fails_is_no_guess() -> None:
    core = make_core()
    asked, other = ask(core, 3, max_tokens=5), ask(core, 4, max_tokens=5)

    class BadGuesser(type(asked.sequence.decoder)):
        def propose(self, room: int) -> tuple[int, ...]:
            raise IndexError("no such word")

    asked.sequence.decoder.__class__ = BadGuesser
    run(core)
    assert list(asked.finished.token_ids) == answer(3, max_tokens=5)
    assert list(other.finished.token_ids) == answer(4, max_tokens=5)


@pytest.mark.parametrize("method", ["feed", "flush"])
def test_a_faulty_stream_ends_one_request_alone(method: str) -> None:
    core = make_core()
    bad, good = ask(core, 3, max_tokens=5), ask(core, 4, max_tokens=5)

    def fail(*_: object) -> None:
        raise ValueError("broken text")

    class BadStream(type(bad.sequence.stream)):
        feed = fail if method == "feed" else type(bad.sequence.stream).feed
        flush = fail if method == "flush" else type(bad.sequence.stream).flush

    bad.sequence.stream.__class__ = BadStream
    run(core)
    assert isinstance(bad.last, GenerationError)
    assert list(good.finished.token_ids) == answer(4, max_tokens=5)


def test_a_failed_step_ends_its_requests_and_the_engine_goes_on() -> None:
    core = make_core(slots=2)
    first, second, waiting = ask(core, 3), ask(core, 4), ask(core, 5, max_tokens=4)
    core.step()

    def fail(step: object) -> None:
        core.session.before_step = lambda step: None
        raise SessionError("the step failed", hint="look at it")

    core.session.before_step = fail
    core.step()
    assert [type(asked.last) for asked in (first, second)] == [SessionError, SessionError]
    assert first.last is not second.last
    assert (str(first.last), first.last.hint) == ("the step failed", "look at it")
    run(core)
    assert list(waiting.finished.token_ids) == answer(5, max_tokens=4)


def test_closing_ends_everybody_once() -> None:
    core = make_core(slots=1)
    asked = [ask(core, 3), ask(core, 4)]
    core.step()
    core.close()
    assert [one.finished.reason for one in asked] == [FinishReason.CANCELLED] * 2
    assert core.session.closed
    assert not core.has_work


def test_a_stopped_engine_tells_everybody_why() -> None:
    core = make_core(slots=1)
    asked = [ask(core, 3), ask(core, 4)]
    core.step()
    core.close(MemoryError("no room"))
    for one in asked:
        assert isinstance(one.last, EngineStoppedError)
        assert "no room" in str(one.last)
        assert isinstance(one.last.__cause__, MemoryError)


def test_a_full_queue_refuses_and_keeps_what_it_took() -> None:
    core = make_core(slots=1, max_queued_requests=1)
    taken = [ask(core, 3, max_tokens=2), ask(core, 4, max_tokens=2)]
    for _ in range(4):
        with pytest.raises(QueueFullError):
            ask(core, 5)
    run(core)
    assert all(asked.finished.reason is FinishReason.LENGTH for asked in taken)


# --- other strategies fit the loop -----------------------------------------------------------------------------------


class Speculative:
    """Greedy, with drafts of which a known number is right: what a speculative decoder will be to the loop."""

    seed = 0

    def __init__(self, right: list[int], lengths: list[int], good: list[int]) -> None:
        self.right, self.lengths, self.good = right, lengths, good
        self.said = 0
        self.step = 0
        self.drafts: tuple[int, ...] = ()

    def propose(self, room: int) -> tuple[int, ...]:
        length = min(room, self.lengths[self.step % len(self.lengths)])
        good = self.good[self.step % len(self.good)]
        drafts = [*self.right[self.said : self.said + good], *[6] * length]
        self.drafts = tuple(drafts[:length])
        return self.drafts

    def select(self, logits: np.ndarray) -> Selection:
        chosen = []
        for row, draft in zip(logits, [*self.drafts, None], strict=True):
            chosen.append(Sampled(int(row.argmax())))
            if chosen[-1].token_id != draft:
                break
        self.said += len(chosen)
        self.step += 1
        return Selection(tuple(chosen))


@pytest.mark.parametrize("lengths", [[0], [3], [1, 5, 0, 2]])
@pytest.mark.parametrize("good", [[0], [1], [2, 0, 5]])
def test_drafts_change_the_steps_but_not_the_answer(lengths: list[int], good: list[int]) -> None:
    right = answer(20, max_tokens=30)
    core = make_core(max_rows=16)
    asked = ask(core, 20, max_tokens=30)
    asked.sequence.decoder = Speculative(right, lengths, good)
    other = ask(core, 5, max_tokens=30)
    run(core)
    assert list(asked.finished.token_ids) == right
    assert list(other.finished.token_ids) == answer(5, max_tokens=30)
    if max(lengths) and max(good):
        assert asked.sequence.decoder.step < 30


class Forcing:
    """Chooses one token, then forces a fixed continuation: what a grammar's fast-forward will be to the loop."""

    seed = 0

    def propose(self, room: int) -> tuple[int, ...]:
        return ()

    def select(self, logits: np.ndarray) -> Selection:
        return Selection((Sampled(int(logits[0].argmax())),), forced=tuple(byte_ids("<->")))


def test_forced_tokens_are_said_and_run() -> None:
    core = make_core()
    asked = ask(core, 5, max_tokens=10)
    asked.sequence.decoder = Forcing()
    run(core)
    ids = asked.sequence.ids
    assert asked.finished.usage.completion_tokens == 10
    assert ids[6:9] == ids[10:13] == byte_ids("<->")
    assert ids[9] == int(hashed_logits(ids[:9]).argmax())
    assert [step.rows for step in core.session.steps] == [5, 4, 4]


# --- nothing is left behind ------------------------------------------------------------------------------------------


def mostly_right(ids: list[int]) -> int | np.ndarray:
    """What a smaller model expects."""
    return 7 if ids[-1] % 3 == 0 else hashed_logits(ids)


class EngineMachine(RuleBasedStateMachine):
    """Requests of all priorities and owners, cancels, time and steps in any order: each request ends once, with the tokens it
    would have had alone, however often it was parked, and the cache stays within its budget."""

    answers: ClassVar[dict[tuple[int, int], list[int]]] = {}

    @initialize(
        slots=st.integers(1, 3),
        spare=st.integers(0, 2),
        tiles=st.sampled_from([None, 2, 4]),
        mixed=st.integers(1, 20),
        pause_ms=st.sampled_from([0, 300]),
        drafts=st.sampled_from([None, hashed_logits, mostly_right, lambda ids: 7]),
    )
    def start(
        self, slots: int, spare: int, tiles: int | None, mixed: int, pause_ms: int, drafts: NextToken | None
    ) -> None:
        self.now = 0.0
        self.core = make_core(
            slots=slots,
            spare=spare,
            kv_budget=None if tiles is None else tiles * TILE_BYTES * (1 if drafts is None else 2),
            max_rows=24,
            mixed_chunk=mixed,
            mixed_pause_ms=pause_ms,
            max_queued_requests=2,
            clock=self.tick,
            drafts=drafts,
        )
        self.asked: list[tuple[tuple[int, int], Asked]] = []

    def tick(self) -> float:
        self.now += 0.001
        return self.now

    @rule(
        prompt=st.sampled_from([1, 5, 23, 24, 25, 60, 70]),
        priority=st.sampled_from(PRIORITIES),
        timeout_s=st.sampled_from([None, None, None, 0.03, 20.0]),
        beams=st.sampled_from([1, 1, 2, 3]),
        owner=st.sampled_from(["", "", "ann", "bob"]),
    )
    def ask(self, prompt: int, priority: str, timeout_s: float | None, beams: int, owner: str) -> None:
        try:
            asked = ask(
                self.core, prompt, max_tokens=6, priority=priority, timeout_s=timeout_s, beams=beams, owner=owner
            )
        except QueueFullError:
            assert sum(not asked.ended for _, asked in self.asked) >= 2
        except ParameterError:
            assert beams > 1
        else:
            self.asked.append(((prompt, beams), asked))

    @rule(seconds=st.sampled_from([1.0, 30.0, 400.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: any(not asked.ended for _, asked in self.asked))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        open_ones = [asked for _, asked in self.asked if not asked.ended]
        data.draw(st.sampled_from(open_ones)).sequence.cancel()

    @rule(steps=st.integers(1, 8))
    def run_steps(self, steps: int) -> None:
        for _ in range(steps):
            self.core.step()

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "core"):
            self.core.check_integrity()
            statistics = self.core.statistics()
            assert statistics.kv_cache_usage_perc <= 1
            assert statistics.num_requests_running <= self.core.info.slots

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        run(self.core)
        for (prompt, beams), asked in self.asked:
            assert sum(isinstance(event, Finished) for event in asked.events) == 1
            ids = list(asked.finished.token_ids)
            if (prompt, beams) not in self.answers:
                self.answers[prompt, beams] = answer(prompt, max_tokens=6, beams=beams)
            expected = self.answers[prompt, beams]
            if beams == 1 or asked.finished.reason is FinishReason.LENGTH:
                assert ids == (expected if asked.finished.reason is FinishReason.LENGTH else expected[: len(ids)])


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=25, stateful_step_count=30)


def test_many_requests_leave_nothing_behind() -> None:
    """B38 over the fake: objects and slots after 300 requests are what they were after a few."""
    core = make_core(says("yes"), slots=3)

    def serve(number: int) -> None:
        for i in range(number):
            ask(core, [*byte_ids("a") * (1 + i % 40), START], logprobs=bool(i % 2))
            if i % 3 == 2:
                run(core)
        run(core)

    serve(30)
    gc.collect()
    before = len(gc.get_objects())
    serve(300)
    core.session.steps.clear()
    gc.collect()
    assert len(gc.get_objects()) - before < 50
    assert core.free_slots == 3


def test_end_tokens_of_the_manifest_all_end() -> None:
    for end in (END, 0):
        core = make_core(says("ok", end=end))
        asked = ask(core, [START])
        run(core)
        assert text_of(asked.events) == "ok"
        assert asked.finished.reason is FinishReason.STOP
