"""Scheduler: what a step computes, who waits, and who is sent away."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_llm.engine.pace import ChunkPolicy, Pace, Portion
from edge_llm.engine.scheduler import Capacity, Scheduler
from edge_llm.engine.sequence import Phase, Sequence
from edge_llm.engine.waiting import QueueLimits
from edge_llm.engine.window import ContextWindow
from edge_llm.errors import QueueFullError


class Drafts:
    """A decoder that proposes as much as it may, up to a number."""

    def __init__(self, most: int = 0) -> None:
        self.most = most
        self.rooms: list[int] = []

    def propose(self, room: int) -> tuple[int, ...]:
        self.rooms.append(room)
        return tuple(range(100, 100 + min(room, self.most)))


def sequence(prompt: int, *, drafts: int = 0, max_tokens: int = 50, submitted: float = 0.0) -> Sequence:
    return Sequence(
        list(range(prompt)),
        max_tokens=max_tokens,
        decoder=Drafts(drafts),
        stream=SimpleNamespace(),
        emit=lambda event: None,
        submitted=submitted,
        window=ContextWindow(4096),
    )


def decoding(made: Sequence, new: int = 1) -> Sequence:
    """As after its prompt was read and `new` tokens were chosen."""
    made.committed = made.prompt_tokens
    made.ids += range(new)
    return made


def scheduler(
    slots: int = 4, *, max_rows: int = 64, mixed: int = 8, requests: int = 4, tokens: int = 1000
) -> Scheduler:
    return Scheduler(
        capacity=Capacity(slots), max_rows=max_rows, pace=settled(max_rows, mixed), limits=QueueLimits(requests, tokens)
    )


def settled(alone: int, mixed: int) -> Pace:
    """The pace of a machine on which prompt rows cost nothing, once it is known."""
    pace = Pace(ChunkPolicy(alone, mixed, pause_s=0))
    for answered in range(1, 9):
        for _ in range(3):
            pace.observe(answered, 0, 0, 0.001)
    for _ in range(3):
        pace.observe(1, mixed, 0, 0.001)
    return pace


def running(made: Scheduler, *sequences: Sequence) -> None:
    slots = iter(range(made._capacity.slots))
    for one in sequences:
        made.enqueue(one)
    made.admit(lambda _: next(slots, None), now=1.0)


def shape(made: Scheduler) -> list[tuple[int, int, int, int]]:
    return [(s.segment.slot, s.segment.position, s.segment.rows, s.segment.logit_rows) for s in made.plan().shares]


def test_drafts_leave_a_row_for_each_branch_behind_them() -> None:
    made = scheduler(5, max_rows=16)
    drafting, beams, last = sequence(5, drafts=99), sequence(6), sequence(7, drafts=99)
    beams.beams = SimpleNamespace(width=3, branches=[])
    running(made, drafting, beams, last)
    assert made.used_slots == 5
    for one in (drafting, beams, last):
        decoding(one)
    beams.beams.branches = [SimpleNamespace(slot=slot, ids=[*range(6), slot]) for slot in (7, 8, 9)]
    plan = made.plan()
    assert [share.rows for share in plan.shares] == [12, 3, 1]
    assert (plan.answered, plan.answers, plan.step.rows) == (3, 5, 16)
    assert [(one.slot, one.position, list(one.token_ids)) for one in plan.shares[1].segments] == [
        (7, 6, [7]),
        (8, 6, [8]),
        (9, 6, [9]),
    ]


def test_alone_a_prompt_takes_whole_steps() -> None:
    made, one = scheduler(), sequence(150)
    running(made, one)
    assert shape(made) == [(0, 0, 64, 0)]
    one.committed = 64
    assert shape(made) == [(0, 64, 64, 0)]
    one.committed = 128
    assert shape(made) == [(0, 128, 22, 1)]


def test_those_who_are_answered_come_first_and_keep_prompts_short() -> None:
    made = scheduler()
    first, second, third = sequence(30), decoding(sequence(5)), decoding(sequence(7))
    running(made, first, second, third)
    assert shape(made) == [(1, 5, 1, 1), (2, 7, 1, 1), (0, 0, 8, 0)]


def test_in_a_pause_only_prompts_are_read_and_nobody_is_asked_for_drafts() -> None:
    made = scheduler()
    long, short, answered = sequence(100), sequence(5), decoding(sequence(7, drafts=9))
    running(made, long, short, answered)
    asked: list[tuple[int, int, int]] = []
    made._pace.portion = lambda *situation: asked.append(situation) or Portion(60, holds=True)
    assert shape(made) == [(1, 0, 5, 1), (0, 0, 55, 0)]
    assert asked == [(1, 0, 5)]
    assert (made.plan().answers, made.plan().held, made.plan().prompt_rows) == (0, 1, 60)
    assert answered.decoder.rooms == []


def test_what_is_read_soonest_is_read_first_and_then_what_came_first() -> None:
    made = scheduler()
    running(made, sequence(50), sequence(50), sequence(10))
    assert shape(made) == [(2, 0, 10, 1), (0, 0, 50, 1), (1, 0, 4, 0)]


def test_a_long_prompt_is_read_before_short_ones_that_come_much_later() -> None:
    made = scheduler()
    long, soon, late = sequence(1000), sequence(10, submitted=4.0), sequence(10, submitted=6.0)
    running(made, long, soon, late)
    assert made.reading() == [soon, long, late]


def test_planning_changes_nothing() -> None:
    made = scheduler()
    running(made, sequence(90), decoding(sequence(3)))
    assert made.plan() == made.plan()


def test_an_empty_scheduler_plans_nothing() -> None:
    assert scheduler().plan().shares == ()
    assert len(scheduler()) == 0


def test_forced_tokens_run_before_logits_are_asked_for() -> None:
    made, one = scheduler(max_rows=8, slots=2), decoding(sequence(5), new=20)
    other = decoding(sequence(4))
    running(made, one, other)
    assert shape(made) == [(0, 5, 7, 0), (1, 4, 1, 1)]
    one.committed += 14
    assert shape(made) == [(0, 19, 6, 1), (1, 4, 1, 1)]


def test_drafts_fit_into_step_and_answer() -> None:
    made = scheduler(max_rows=16, slots=2)
    one, two = decoding(sequence(5, drafts=3)), decoding(sequence(5, drafts=100, max_tokens=5))
    running(made, one, two)
    plan = made.plan()
    assert [(share.segment.rows, share.segment.logit_rows, share.drafts) for share in plan.shares] == [
        (4, 4, 3),
        (4, 4, 3),
    ]
    assert plan.shares[0].segment.token_ids == [0, 100, 101, 102]
    assert one.decoder.rooms == [14]
    assert two.decoder.rooms == [3]  # four more tokens may be chosen: three drafts and one after them


@settings(max_examples=80)
@given(
    st.lists(st.tuples(st.integers(1, 200), st.integers(0, 40), st.integers(0, 20)), min_size=1, max_size=6),
    st.integers(6, 80),
    st.integers(1, 80),
)
def test_every_plan_is_within_its_bounds(states: list[tuple[int, int, int]], max_rows: int, mixed: int) -> None:
    made = scheduler(6, max_rows=max_rows, mixed=mixed, requests=10)
    sequences = [sequence(prompt, drafts=drafts) for prompt, _, drafts in states]
    running(made, *sequences)
    for one, (prompt, new, _) in zip(sequences, states, strict=True):
        if new:
            decoding(one, new)
        else:
            one.committed = prompt // 3
    plan = made.plan()
    planned = {share.sequence: share for share in plan.shares}
    answered = [one for one in sequences if one.phase is Phase.DECODE]
    assert 0 < plan.step.rows <= max_rows
    assert all(one in planned for one in answered)
    reading = [share for share in plan.shares if share.sequence.phase is Phase.PREFILL]
    assert not answered or sum(share.segment.rows for share in reading) <= mixed
    for one, share in planned.items():
        rows = share.segment.rows - share.drafts
        assert list(share.segment.token_ids[:rows]) == one.ids[one.committed : one.committed + rows]
        assert share.segment.logit_rows == (1 + share.drafts if rows == one.pending else 0)
        assert share.segment.position == one.committed


# --- the queue -------------------------------------------------------------------------------------------------------


def test_slots_are_given_in_order_and_given_again() -> None:
    made = scheduler(2)
    sequences = [sequence(3) for _ in range(4)]
    running(made, *sequences)
    assert [one.phase for one in sequences] == [Phase.PREFILL, Phase.PREFILL, Phase.QUEUED, Phase.QUEUED]
    assert made.sequences == tuple(sequences)
    made.remove(sequences[0], now=2.0)
    slots = iter([0, None])
    made.admit(lambda _: next(slots), now=2.0)
    assert sequences[2].slot == 0
    made.remove(sequences[3], now=2.0)
    assert made.sequences == (sequences[1], sequences[2])


def test_the_surplus_is_refused_at_once() -> None:
    """B50: one slot, a queue of one."""
    made = scheduler(1, requests=1)
    made.enqueue(sequence(3))  # not admitted yet, but the slot is there for it
    made.enqueue(sequence(3))
    with pytest.raises(QueueFullError, match="1 requests with 3 prompt tokens") as caught:
        made.enqueue(sequence(3))
    assert 1 <= caught.value.retry_after_s <= 60
    assert len(made) == 2


def test_a_queue_of_nothing_still_fills_the_slots() -> None:
    made = scheduler(2, requests=0)
    made.enqueue(sequence(3))
    made.enqueue(sequence(3))
    with pytest.raises(QueueFullError):
        made.enqueue(sequence(3))


def test_waiting_tokens_are_bounded_but_one_long_prompt_may_wait() -> None:
    made = scheduler(1, requests=9, tokens=100)
    running(made, sequence(500))
    made.enqueue(sequence(500))
    with pytest.raises(QueueFullError):
        made.enqueue(sequence(1))
    made = scheduler(1, requests=9, tokens=100)
    running(made, sequence(500))
    made.enqueue(sequence(60))
    made.enqueue(sequence(40))
    with pytest.raises(QueueFullError):
        made.enqueue(sequence(1))


def test_the_time_to_retry_follows_what_requests_took() -> None:
    made = scheduler(1, requests=1)
    for _ in range(60):
        one = sequence(3)
        running(made, one)
        made.remove(one, now=31.0)
    running(made, sequence(3), sequence(3))
    with pytest.raises(QueueFullError) as caught:
        made.enqueue(sequence(3))
    assert 50 < caught.value.retry_after_s <= 60
