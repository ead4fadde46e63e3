"""Owners: who waits beside others has an even share, whatever they ask for; who is alone has everything."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_llm.engine.owners import Owners
from edge_llm.engine.request import PRIORITIES
from edge_llm.engine.scheduler import Capacity, Scheduler
from edge_llm.engine.sequence import Phase, Sequence
from edge_llm.engine.waiting import QueueLimits
from edge_llm.errors import QueueFullError
from tests.engine.fakes import make_core
from tests.engine.test_core import Asked, answer, ask, run
from tests.engine.test_scheduler import sequence, settled

LONGEST_PROMPT, LONGEST_ANSWER = 40, 10
MIXED = 8


class Rig:
    """A scheduler whose steps cost a second and give every answer a token; nothing of who is parked is kept."""

    def __init__(self, slots: int, make: type[Scheduler] = Scheduler) -> None:
        self.slots, self.now = slots, 0.0
        self.scheduler = make(
            capacity=Capacity(slots), max_rows=32, pace=settled(32, MIXED), limits=QueueLimits(1000, 1 << 30)
        )
        self.free = list(range(slots))
        self.had = Counter[str]()
        """tokens, those of answers twice"""
        self.admitted: list[Sequence] = []
        self.plans: list[list[tuple[Sequence, int, int]]] = []

    def ask(self, owner: str, prompt: int, answer: int, priority: str = "normal") -> Sequence:
        made = sequence(prompt, max_tokens=answer, submitted=self.now)
        made.owner, made.priority = owner, priority
        self.scheduler.enqueue(made)
        return made

    def cancel(self, one: Sequence) -> None:
        one.ended = True
        self.scheduler.remove(one, self.now)
        if one.slot is not None:
            self.free.append(one.slot)
            one.slot = None

    def step(self) -> None:
        self.now += 1.0
        made = self.scheduler
        made.admit(self._place, self.now)
        while (first := made.next_waiting()) is not None and (victims := made.victims(first, self.now)):
            for one in victims:
                self.free.append(one.slot)
                made.park(one, self.now)
            made.admit(self._place, self.now, before=first)
            assert first.slot is not None
        plan = made.plan()
        self.plans.append([(share.sequence, share.segment.position, share.rows) for share in plan.shares])
        for share in plan.shares:
            self._commit(share.sequence, share.rows)

    def waiting(self, owner: str) -> int:
        return sum(one.owner == owner and one.slot is None for one in self.scheduler.sequences)

    def held(self, owner: str) -> int:
        return sum(one.owner == owner for one in self.scheduler.running)

    def _place(self, one: Sequence) -> int | None:
        if one not in self.admitted:
            self.admitted.append(one)
        return self.free.pop() if self.free else None

    def _commit(self, one: Sequence, rows: int) -> None:
        self.had[one.owner] += rows * (1 if one.phase is Phase.PREFILL else 2)
        self.scheduler.served(one, rows)
        one.committed += rows
        if not one.pending:
            one.marks.token(self.now)
            if not one.room:
                self.cancel(one)
            one.ids.append(7)


def bound(slots: int) -> int:
    """How far one of two who always wait can be ahead: what all slots can be full of."""
    return slots * (LONGEST_PROMPT + 2 * LONGEST_ANSWER)


sizes = st.tuples(st.integers(1, LONGEST_PROMPT), st.integers(1, LONGEST_ANSWER))
Load = list[tuple[int, int]]
Asking = tuple[tuple[int, int], str, int, int]
loads = st.lists(sizes, min_size=1, max_size=4)
"""prompts and answers that an owner asks for, again and again"""


def keep_waiting(rig: Rig, owner: str, load: Load, priority: str = "normal") -> None:
    """More than all slots could take."""
    while rig.waiting(owner) <= rig.slots:
        asked = sum(rig.had.values()) + rig.waiting(owner)
        rig.ask(owner, *load[asked % len(load)], priority=priority)


# --- shares ----------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), loads, loads, st.lists(st.integers(0, 200), max_size=8), st.randoms(use_true_random=False))
def test_two_who_always_wait_have_the_same(
    slots: int, ann: Load, bob: Load, cancels: list[int], chance: random.Random
) -> None:
    """Also when requests of theirs are cancelled, wherever they are."""
    rig = Rig(slots)
    for step in range(200):
        keep_waiting(rig, "ann", ann)
        keep_waiting(rig, "bob", bob)
        rig.step()
        for _ in range(cancels.count(step)):
            rig.cancel(chance.choice(rig.scheduler.sequences))
        assert abs(rig.had["ann"] - rig.had["bob"]) <= bound(slots)
    assert min(rig.had["ann"], rig.had["bob"]) > 0


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 4), loads, loads, st.booleans())
def test_who_wanted_nothing_has_no_credit(slots: int, ann: Load, bob: Load, before: bool) -> None:
    """Bob comes long after Ann, for the first time or again."""
    rig = Rig(slots)
    if before:
        rig.ask("bob", 3, 1)
    for _ in range(100):
        keep_waiting(rig, "ann", ann)
        rig.step()
    start = rig.had.copy()
    for _ in range(100):
        keep_waiting(rig, "ann", ann)
        keep_waiting(rig, "bob", bob)
        rig.step()
        gained = rig.had - start
        assert abs(gained["ann"] - gained["bob"]) <= bound(slots)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 4), loads, loads)
def test_what_one_does_not_want_the_others_have(slots: int, ann: Load, bob: Load) -> None:
    """No slot is empty while somebody waits."""
    rig = Rig(slots)
    for step in range(100):
        keep_waiting(rig, "ann", ann)
        if step % 30 == 0:
            rig.ask("bob", *bob[0])
        rig.step()
        assert sum(rows for _, _, rows in rig.plans[-1]) > 0
        assert not rig.free or not rig.scheduler.counts[1] or any(one.ended for one, _, _ in rig.plans[-1])


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), loads, sizes, st.integers(0, 60))
def test_nobody_waits_for_a_flood(slots: int, ann: Load, bob: tuple[int, int], when: int) -> None:
    """One request is answered soon, however much of somebody else's waits and is read: with more than one slot it has one
    in the next step."""
    rig = Rig(slots)
    for _ in range(when):
        keep_waiting(rig, "ann", ann)
        rig.step()
    one = rig.ask("bob", *bob)
    steps = 0
    while not one.ended:
        keep_waiting(rig, "ann", ann)
        rig.step()
        steps += 1
        assert slots == 1 or one.marks.entered is not None
    prompt, answer_ = bob
    last = LONGEST_PROMPT // MIXED + LONGEST_ANSWER if slots == 1 else 0  # that of Ann's which has the only slot
    assert steps <= last + (2 * prompt + LONGEST_PROMPT) // MIXED + answer_ + 2


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 3), st.lists(st.tuples(st.sampled_from("abc"), sizes, st.integers(0, 3)), max_size=40))
def test_the_order_within_an_owner_is_that_of_its_arrivals(
    slots: int, asked: list[tuple[str, tuple[int, int], int]]
) -> None:
    rig = Rig(slots)
    every: list[Sequence] = []
    for owner, (prompt, length), steps in asked:
        every.append(rig.ask(owner, prompt, length))
        for _ in range(steps):
            rig.step()
    while len(rig.scheduler):
        rig.step()
    for owner in "abc":
        assert [one for one in rig.admitted if one.owner == owner] == [one for one in every if one.owner == owner]


def test_all_are_equal_again_once_nobody_waits() -> None:
    rig = Rig(2)
    for prompt in (40, 40, 40):
        rig.ask("ann", prompt, 1)
    while len(rig.scheduler):
        rig.step()
    rig.step()
    assert not any(ledger._above or ledger._floor for ledger in rig.scheduler._owners._ledgers)


def test_a_thousand_owners_leave_nothing_behind() -> None:
    """While one of them always waits."""
    rig = Rig(2)
    for number in range(1000):
        keep_waiting(rig, "ann", [(5, 3)])
        rig.ask(f"owner {number}", 3, 1)
        rig.step()
        rig.step()
    for _ in range(20):
        keep_waiting(rig, "ann", [(5, 3)])
        rig.step()
    assert all(len(ledger._above) <= 2 for ledger in rig.scheduler._owners._ledgers)


# --- priorities ------------------------------------------------------------------------------------------------------


def test_priorities_go_before_shares_and_waiting_before_priorities() -> None:
    rig = Rig(1)
    running = rig.ask("ann", 5, 3)
    rig.step()
    late = rig.ask("bob", 5, 2, "normal")
    chats = [rig.ask("ann", 5, 2, "interactive") for _ in range(2)]
    for _ in range(30):
        rig.step()
    assert rig.admitted == [running, *chats, late]
    rig = Rig(1)
    first = rig.ask("ann", 5, 2, "interactive")
    old = rig.ask("bob", 5, 2, "normal")
    rig.step()
    rig.now += 61.0
    late_ones = [rig.ask("ann", 5, 2, "interactive") for _ in range(2)]
    for _ in range(30):
        rig.step()
    assert rig.admitted == [first, old, *late_ones]


@pytest.mark.parametrize("priority", ["interactive", "normal"])
def test_a_flood_that_has_waited_long_is_no_more_urgent_than_somebody_else(priority: str) -> None:
    """Neither a request of the same priority waits for it nor a more urgent one."""
    rig = Rig(1)
    flood = [rig.ask("ann", 40, 5) for _ in range(30)]
    for _ in range(100):
        rig.step()
    quick = rig.ask("bob", 5, 2, priority)
    for _ in range(25):
        rig.step()
    assert quick.ended
    assert sum(not one.ended for one in flood) > 5


def test_what_is_more_urgent_takes_the_slot_whoever_has_others() -> None:
    rig = Rig(2)
    first = rig.ask("ann", 5, 50, "interactive")
    rig.step()
    rig.ask("bob", 5, 50)
    urgent = rig.ask("ann", 5, 50, "interactive")
    rig.step()
    assert rig.admitted == [first, urgent]


@pytest.mark.parametrize(("priority", "had"), [("interactive", [5, 5, 5]), ("normal", [0, 5, 5]), ("batch", [0, 0, 5])])
def test_what_nobody_waits_for_is_not_held_against_its_owner(priority: str, had: list[int]) -> None:
    owners, one = Owners(), sequence(9)
    one.owner, one.priority, one.slot = "ann", priority, 0
    owners.served(one, 5)
    assert [ledger.had("ann") for ledger in owners._ledgers] == had
    one.committed = 9
    owners.served(one, 1)
    assert [ledger.had("ann") for ledger in owners._ledgers] == [tokens and tokens + 2 for tokens in had]


# --- one owner -------------------------------------------------------------------------------------------------------


class Unshared(Scheduler):
    """As all was before there were owners."""

    def next_waiting(self) -> Sequence | None:
        return min(self._waiting, key=lambda one: one.urgency, default=None)

    def reading(self) -> list[Sequence]:
        prompts = [one for one in self._running if one.phase is Phase.PREFILL]
        return sorted(prompts, key=lambda one: one.urgency + one.pending * 0.005)

    def victims(self, first: Sequence, now: float) -> list[Sequence]:
        victims: list[Sequence] = []
        if self._fits(first):
            return victims
        lower = sorted((one for one in self._running if one.rank > first.rank), key=lambda one: -one.urgency)
        turns = [one for one in self._running if one.rank <= min(first.rank, 1) and one.had_turn(now)]
        for one in (*lower, *sorted(turns, key=lambda one: one.since)):
            if one.urgency_if_parked(now) > first.urgency:
                victims.append(one)
                if self._fits(first, without=victims):
                    return victims
        return []


asking = st.tuples(
    sizes, st.sampled_from(PRIORITIES), st.sampled_from([0, 0, 1, 2, 9]), st.sampled_from([0, 0, 20, 90])
)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.lists(asking, max_size=30), st.sampled_from(["", "ann"]))
def test_nothing_changes_for_one_owner(slots: int, asked: list[Asking], owner: str) -> None:
    """Step for step, whatever waits, runs, is parked and takes turns."""
    shared, unshared = Rig(slots), Rig(slots, Unshared)
    plans = []
    for rig in (shared, unshared):
        names: dict[Sequence, int] = {}
        for number, ((prompt, length), priority, steps, later) in enumerate(asked):
            names[rig.ask(owner, prompt, 5 * length, priority)] = number
            for _ in range(steps):
                rig.step()
            rig.now += later
        while len(rig.scheduler):
            rig.step()
        plans.append([[(names[one], position, rows) for one, position, rows in plan] for plan in rig.plans])
    assert plans[0] == plans[1]


# --- slots -----------------------------------------------------------------------------------------------------------


def test_slots_are_shared_evenly_by_those_who_want_them() -> None:
    """Endless answers: whoever comes gets slots until all have the same, at once, and nobody's only one is taken."""
    rig = Rig(4)
    for _ in range(6):
        rig.ask("ann", 3, 4000)
    rig.step()
    assert rig.held("ann") == 4
    for _ in range(6):
        rig.ask("bob", 3, 4000)
    rig.step()
    assert (rig.held("ann"), rig.held("bob")) == (2, 2)
    for owner in ("cleo", "dan", "eve"):
        rig.ask(owner, 3, 4000)
        rig.step()
    assert sorted(rig.held(owner) for owner in ("ann", "bob", "cleo", "dan", "eve")) == [0, 1, 1, 1, 1]
    before = {one: one.preemptions for one in rig.scheduler.sequences}
    for _ in range(4):
        rig.step()
    assert before == {one: one.preemptions for one in rig.scheduler.sequences}, "and so it stays"


def test_turns_are_not_taken_from_who_has_no_more() -> None:
    rig = Rig(4)
    alone = rig.ask("bob", 3, 4000)
    for _ in range(9):
        rig.ask("ann", 3, 4000)
    for _ in range(200):
        rig.step()
        assert rig.held("bob") == 1
    assert alone.preemptions == 0
    assert sum(one.preemptions > 0 for one in rig.scheduler.sequences) == 9, "those of one owner go round"


def test_owners_take_turns_where_they_are_more_than_slots() -> None:
    rig = Rig(2)
    for owner in ("ann", "bob", "cleo", "ann"):
        rig.ask(owner, 3, 4000)
    for _ in range(600):
        rig.step()
    had = [rig.had[owner] for owner in ("ann", "bob", "cleo")]
    assert max(had) < 1.3 * min(had)


def test_who_is_parked_for_others_has_the_same_tokens() -> None:
    core = make_core(slots=2, spare=1)
    long = [ask(core, n, owner="ann", max_tokens=30, temperature=1.0, seed=n) for n in (20, 21, 22)]
    for _ in range(12):
        core.step()
    short = ask(core, 7, owner="bob", max_tokens=5)
    core.step()
    assert [one.sequence.preemptions for one in long] == [0, 1, 0], "the last that came"
    assert short.sequence.slot is not None
    run(core)
    assert list(short.finished.token_ids) == answer(7, max_tokens=5)
    for one, prompt in zip(long, (20, 21, 22), strict=True):
        assert list(one.finished.token_ids) == answer(prompt, max_tokens=30, temperature=1.0, seed=prompt)


def test_beams_get_their_slots_too_but_no_more_than_others() -> None:
    core = make_core(slots=4)
    for n in (5, 6, 7, 8):
        ask(core, n, owner="ann", max_tokens=50)
    core.step()
    wide = ask(core, 9, owner="bob", max_tokens=5, beams=3)
    core.step()
    assert wide.sequence.slot is None, "then Bob would have more than Ann"
    wide.sequence.cancel()
    beams = ask(core, 9, owner="bob", max_tokens=5, beams=2)
    core.step()
    assert beams.sequence.slot is not None
    run(core)


def test_a_slot_is_given_up_for_who_has_had_more() -> None:
    """The one that is parked would be the next by what its owner has had; it does not come back at once."""
    core = make_core(slots=4, max_rows=16, context=1024)
    cleo = ask(core, 900, owner="cleo", max_tokens=2)
    core.step()
    bob = ask(core, 100, owner="bob", max_tokens=1)
    while not bob.ended:
        core.step()
    ann = [ask(core, n, owner="ann", max_tokens=200) for n in (3, 4, 5)]
    while not all(one.sequence.phase is Phase.DECODE for one in ann):
        core.step()
    again = ask(core, 6, owner="bob", max_tokens=5)
    core.step()
    assert cleo.sequence.phase is Phase.PREFILL
    had = core._scheduler._owners._ledgers[1].had
    assert had("ann") < had("bob")
    assert [one.sequence.slot is None for one in (*ann, again)] == [False, False, True, False]


# --- prompts ---------------------------------------------------------------------------------------------------------


def test_prompts_are_read_in_turn_and_short_ones_pass() -> None:
    """A prompt that was begun goes on until somebody else's would be done with less."""
    core = make_core(slots=8, max_rows=16, prefix_cache="off")
    ann = [ask(core, n, owner="ann", max_tokens=1) for n in (60, 61, 62)]
    core.step()
    bob = [ask(core, n, owner="bob", max_tokens=1) for n in (70, 71)]
    core.step()
    cleo = ask(core, 10, owner="cleo", max_tokens=1)
    order: list[Asked] = []
    while core.has_work:
        core.step()
        order += [one for one in (*ann, *bob, cleo) if one.ended and one not in order]
    assert order == [cleo, ann[0], bob[0], ann[1], bob[1], ann[2]]


@pytest.mark.parametrize(
    ("ann", "bob", "order"),
    [([10, 11, 12], [15, 16], [10, 15, 11, 16, 12]), ([30, 31], [70, 5], [5, 30, 31, 70])],
)
def test_prompts_of_one_step_are_in_turn_too(ann: list[int], bob: list[int], order: list[int]) -> None:
    rig = Rig(5)
    for owner, prompts in (("ann", ann), ("bob", bob)):
        for prompt in prompts:
            rig.ask(owner, prompt, 1)
    rig.scheduler.admit(rig._place, 1.0)
    assert [one.prompt_tokens for one in rig.scheduler.reading()] == order


def test_prompts_that_fill_the_queue_leave_room_for_one_of_others() -> None:
    core = make_core(slots=1, max_queued_tokens=100)
    for _ in range(2):
        ask(core, 90, owner="ann", max_tokens=1)
    with pytest.raises(QueueFullError):
        ask(core, 90, owner="ann", max_tokens=1)
    ask(core, 90, owner="bob", max_tokens=1)
    with pytest.raises(QueueFullError):
        ask(core, 5, owner="bob", max_tokens=1)
    run(core)
