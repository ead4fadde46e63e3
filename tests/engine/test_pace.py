"""Pace: what mixed steps are allowed, on simulated machines."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_llm.engine.pace import RATIO, ChunkPolicy, Pace, Portion

POLICY = ChunkPolicy(alone=256, mixed=64, pause_s=0.3)
STRICT = ChunkPolicy(alone=256, mixed=64, pause_s=0)


@dataclass
class Machine:
    """Reads a prompt among `answered` others; `seconds(answered, rows, depth)` is what a step takes."""

    seconds: Callable[[int, int, int], float]
    pace: Pace = field(default_factory=lambda: Pace(POLICY))

    def run(self, gaps: int = 1, *, answered: int = 1, depth: int = 0) -> list[tuple[int, float]]:
        """(prompt rows, seconds) from each token of those who are answered to the next, all at one depth."""
        return [self.gap(answered, depth) for _ in range(gaps)]

    def read(self, tokens: int, *, answered: int = 1, depth: int = 0) -> list[tuple[int, float]]:
        """The same for a prompt from its beginning, or after `depth` tokens, to its end."""
        done, end = [], depth + tokens
        while depth < end:
            done.append(self.gap(answered, depth, end - depth))
            depth += done[-1][0]
            assert len(done) < 100 * tokens, "it makes no progress"
        return done

    def gap(self, answered: int, depth: int, pending: int = 1000) -> tuple[int, float]:
        """One step, and those before it in which nobody was answered."""
        portion = self.pace.portion(answered, depth, pending) if pending else Portion(0)
        rows = min(pending, portion.rows)
        goes_on = 0 if portion.holds else answered
        seconds = self.seconds(goes_on, rows, depth)
        self.pace.observe(goes_on, rows, depth, seconds, held=answered - goes_on)
        if not portion.holds:
            return rows, seconds
        more_rows, more_seconds = self.gap(answered, depth + rows, pending - rows)
        return rows + more_rows, seconds + more_seconds


def linear(plain_s: float, row_s: float) -> Callable[[int, int, int], float]:
    return lambda answered, rows, depth: plain_s * (1 + 0.2 * answered) + row_s * rows


def xeon(answered: int, rows: int, depth: int) -> float:
    """SmolLM2-135M on two cores: a row costs 0.31 ms and as much again for each 2,000 it attends to; where there are any, the
    rows before are read anew, 12 MB a thousand, for the first of them."""
    attended = (depth + rows / 2) / 1000
    plain = 0.002 + 0.0007 * answered if answered else 0.0
    return plain + (0.0004 + rows * (0.00031 + 0.000155 * attended) + 0.0002 * attended if rows else 0.0)


def board(answered: int, rows: int, depth: int) -> float:
    """A small computer on which everything takes ten times as long."""
    return 10 * xeon(answered, rows, depth)


def percentile(values: list[float], percent: int) -> float:
    return sorted(values)[len(values) * percent // 100]


def alone_s(machine: Callable[[int, int, int], float], tokens: int) -> float:
    return sum(machine(0, min(256, tokens - depth), depth) for depth in range(0, tokens, 256))


def test_alone_a_prompt_takes_whole_steps() -> None:
    assert Pace(POLICY).portion(0, 0, 1000) == Portion(256)


@pytest.mark.parametrize(
    ("answered", "tokens", "late"),
    [(1, 300, 1.5), (1, 4000, 1.5), (2, 4000, 1.5), (4, 4000, 1.55), (8, 1000, 1.65), (8, 4000, 1.65)],
)
def test_a_long_prompt_and_those_who_are_answered_both_get_their_share(answered: int, tokens: int, late: float) -> None:
    """p95 of the gaps between tokens at most 2.5 times the median without the prompt, its first token at most `late` times as
    late as alone: the more are answered, the more of the machine's time is theirs."""
    machine = Machine(xeon)
    for _ in range(30):
        machine.pace.observe(answered, 0, 0, xeon(answered, 0, 0))
    done = machine.read(tokens, answered=answered)
    gaps = [seconds for _, seconds in done]
    if tokens > 1000:
        assert percentile(gaps, 95) <= 2.5 * xeon(answered, 0, 0)
    assert max(gaps) <= 0.4
    assert sum(gaps) <= late * alone_s(xeon, tokens)


def test_there_is_room_for_what_else_makes_tokens_late() -> None:
    """Whatever runs on the machine too: one step in 25 takes twice, one in 75 three times as long, prompts a tenth longer."""
    steps = count(1)

    def disturbed(answered: int, rows: int, depth: int) -> float:
        step = next(steps)
        return xeon(answered, rows, depth) * (1.1 if rows else 3 if step % 75 == 0 else 2 if step % 25 == 0 else 1)

    machine = Machine(disturbed)
    machine.run(3)
    gaps = [seconds for _, seconds in machine.read(4000)]
    assert percentile(gaps, 95) <= 2.5 * xeon(1, 0, 0)
    assert sum(gaps) <= 1.5 * alone_s(xeon, 4000)


def test_a_small_computer_stutters_no_longer_than_allowed() -> None:
    done = Machine(board).read(2000)
    gaps = [seconds for _, seconds in done]
    assert percentile(gaps, 95) <= 2.5 * board(1, 0, 0)
    assert max(gaps) <= 0.5
    assert sum(gaps) <= 2.5 * alone_s(board, 2000)


@pytest.mark.parametrize("tokens", [1000, 4000])
def test_without_pauses_every_step_is_an_ordinary_one(tokens: int) -> None:
    done = Machine(xeon, Pace(STRICT)).read(tokens)
    plain = xeon(1, 0, 0)
    assert percentile([seconds for _, seconds in done], 95) <= 1.2 * RATIO * plain
    assert max(seconds for _, seconds in done[4:]) <= 2.5 * plain  # the fourth is a guess


@pytest.mark.parametrize("row_s", [0.00021, 0.00041, 0.00101])
@pytest.mark.parametrize("answered", [1, 8])
def test_an_ordinary_step_costs_what_it_may(row_s: float, answered: int) -> None:
    cost = linear(0.005, row_s)
    done = Machine(cost, Pace(STRICT)).run(400, answered=answered)
    plain = cost(answered, 0, 0)
    assert all(seconds <= (RATIO + 0.01) * plain for _, seconds in done[4:])  # the fourth is a guess
    assert {rows for rows, _ in done[10:] if rows} == {min(64, int((RATIO - 1) * plain / row_s))}


def test_the_first_steps_of_a_kind_are_measured_without_a_prompt() -> None:
    machine = Machine(linear(0.005, 0.00041), Pace(STRICT))
    assert [rows for rows, _ in machine.run(5)] == [0, 0, 0, 16, int((RATIO - 1) * 0.006 / 0.00041)]
    assert [rows > 0 for rows, _ in machine.run(4, answered=2)] == [False] * 3 + [True]
    assert machine.run()[0][0] > 4


def test_a_pause_is_as_many_steps_as_its_time_allows_and_answers_take_part_in_the_last() -> None:
    pace = Machine(xeon).pace
    for depth in range(0, 4000, 256):  # what rows cost is known from prompts that were read alone
        pace.observe(0, 256, depth, xeon(0, 256, depth))
    for _ in range(3):
        pace.observe(1, 0, 0, xeon(1, 0, 0))
    portions, spent = [], 0.0
    for _ in range(9):
        depth = 256 * len(portions)
        portions.append(pace.portion(1, depth, 4000))
        seconds = xeon(0 if portions[-1].holds else 1, portions[-1].rows, depth)
        pace.observe(0 if portions[-1].holds else 1, portions[-1].rows, depth, seconds, held=int(portions[-1].holds))
        spent += seconds
        if not portions[-1].holds:
            break
    assert len(portions) >= 3
    assert set(portions[:-1]) == {Portion(256, holds=True)}
    assert 0.25 <= spent <= 0.31
    assert pace.portion(1, 700, 4000) == Portion(0)


def test_a_pause_ends_with_its_prompt() -> None:
    machine = Machine(xeon)
    machine.read(4000)
    machine.run(40)
    machine.pace.observe(0, 100, 0, 0.1, held=1)
    machine.pace.observe(1, 0, 0, xeon(1, 0, 0))
    assert machine.pace.portion(1, 0, 4000) == Portion(0)


def test_a_short_prompt_is_read_at_once_if_there_was_no_pause_of_late() -> None:
    machine = Machine(xeon)
    machine.read(4000)
    for _ in range(40):
        machine.pace.observe(1, 0, 0, xeon(1, 0, 0))
    assert machine.pace.portion(1, 0, 200).rows >= 200
    machine.read(200)
    assert machine.pace.portion(1, 0, 4000).rows == 0


def test_soon_after_a_pause_only_what_is_read_before_the_next_one_is_read() -> None:
    machine = Machine(xeon)
    machine.read(4000)
    machine.run(37)
    assert [machine.pace.portion(1, 0, pending).rows > 0 for pending in (20, 4000)] == [True, False]


def test_a_pause_that_was_not_made_is_not_spent() -> None:
    machine = Machine(xeon)
    machine.read(3000)
    for _ in range(40):
        machine.pace.observe(1, 0, 0, xeon(1, 0, 0))
    machine.read(3)
    assert machine.pace.portion(1, 0, 4000).rows >= 200


def test_the_cost_of_a_plain_step_is_measured_again() -> None:
    """A machine that has become slower (its clock went down, or the answers are longer now)."""
    machine = Machine(linear(0.005, 0.00041), Pace(STRICT))
    machine.run(100)
    machine.seconds = slow = linear(0.020, 0.00041)
    done = machine.run(2000)
    assert sum(rows == 0 for rows, _ in done) <= 8
    assert {rows for rows, _ in done[-200:] if rows} == {min(64, int((RATIO - 1) * slow(1, 0, 0) / 0.00041))}


def test_depths_are_told_apart() -> None:
    """A new prompt begins as quickly as the last one did, not as slowly as it ended."""
    machine = Machine(xeon, Pace(STRICT))
    first = [rows for rows, _ in machine.read(4000)]
    again = [rows for rows, _ in machine.read(4000)]
    assert min(first[6:16]) - 3 <= again[0] <= max(first[6:16])
    assert first[-2] < again[0] / 2


def test_single_disturbances_change_nothing() -> None:
    noise = random.Random(1)
    cost = linear(0.005, 0.00041)
    disturbed = Machine(lambda *step: cost(*step) * (20 if noise.random() < 0.05 else 1), Pace(STRICT))
    rows = [rows for rows, _ in disturbed.run(1000)[20:]]
    assert sum(one == int((RATIO - 1) * 0.006 / 0.00041) for one in rows) > 0.9 * len(rows)


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 300), st.integers(0, 9000), st.floats(0, 1e6)), max_size=60),
    st.integers(1, 300),
    st.integers(1, 300),
    st.sampled_from([0.0, 0.01, 0.3]),
)
def test_whatever_is_measured_the_rows_stay_in_bounds_and_a_prompt_is_read(
    steps: list[tuple[int, int, int, float]], alone: int, mixed: int, pause_s: float
) -> None:
    pace = Pace(ChunkPolicy(alone, mixed, pause_s))
    for answered, rows, depth, seconds in steps:
        pace.observe(answered, rows, depth, seconds, held=depth % 3)
        for asked in range(9):
            assert 0 <= pace.portion(asked, depth, 500).rows <= max(alone, mixed)
    for answered in range(9):
        waits = 0
        while not pace.portion(answered, 100, 5000).rows:
            pace.observe(answered, 0, 0, 0.01)
            waits += 1
        assert waits <= 36
    held = 0
    while pace.portion(1, 100, 5000).holds:
        pace.observe(0, alone, 100, 0.01, held=1)
        held += 1
    assert held <= 30
