from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from edge_llm.engine.contest import ROUNDS, contest

USUAL, OTHERS = 0, (1, 2, 3)


class Clock:
    """Says how long each value takes, and keeps what it said."""

    def __init__(self, seconds: Callable[[int, int], float]) -> None:
        self._seconds = seconds
        self.said: dict[int, list[float]] = {value: [] for value in (USUAL, *OTHERS)}
        self.order: list[int] = []

    def __call__(self, value: int) -> float:
        said = self.said[value]
        said.append(self._seconds(value, len(said)))
        self.order.append(value)
        return said[-1]

    def wins(self, value: int, margin: float) -> int:
        """Rounds, the one that does not count left out, in which `value` was faster by the margin."""
        pairs = zip(self.said[USUAL][1:], self.said[value][1:], strict=False)
        return sum(usual / other - 1 >= margin for usual, other in pairs)


@given(
    st.data(),
    st.floats(0.0, 0.5),
    st.lists(st.sampled_from([0.5, 0.97, 1.0, 1.03, 2.0]), min_size=4, max_size=4),
)
def test_only_what_is_faster_by_the_margin_in_all_rounds_but_one_is_chosen(
    data: st.DataObject, margin: float, typical: list[float]
) -> None:
    noise = st.sampled_from([0.7, 0.99, 1.0, 1.01, 1.4]) | st.floats(1e-6, 1e6)
    clock = Clock(lambda value, _round: typical[value] * data.draw(noise))
    verdict = contest(USUAL, OTHERS, clock, margin=margin)
    assert verdict.rounds == len(clock.said[USUAL]) - 1 <= ROUNDS
    winners = [value for value in OTHERS if clock.wins(value, margin) >= ROUNDS - 1]
    if winners:
        assert verdict.chosen in winners
        assert verdict.gain >= margin
        assert verdict.rounds == ROUNDS
    else:
        assert (verdict.chosen, verdict.gain) == (USUAL, 0.0)


def test_the_fastest_of_several_wins() -> None:
    verdict = contest(USUAL, OTHERS, Clock(lambda value, _round: (1.0, 0.8, 0.5, 0.9)[value]), margin=0.03)
    assert (verdict.chosen, verdict.gain, verdict.rounds) == (2, 1.0, ROUNDS)


def test_one_bad_round_is_forgiven_and_two_are_not() -> None:
    def seconds(bad: int) -> Callable[[int, int], float]:
        return lambda value, number: 1.0 if value == USUAL or (value == 1 and number in range(1, 1 + bad)) else 0.5

    assert contest(USUAL, [1], Clock(seconds(1)), margin=0.03).chosen == 1
    lost = contest(USUAL, [1], Clock(seconds(2)), margin=0.03)
    assert (lost.chosen, lost.rounds) == (USUAL, 2)


def test_without_a_difference_it_is_short_and_rounds_begin_with_another_value_each() -> None:
    clock = Clock(lambda _value, _round: 1.0)
    told: list[int] = []
    verdict = contest(USUAL, OTHERS, clock, margin=0.03, progress=told.append)
    assert (verdict.chosen, verdict.rounds) == (USUAL, 2)
    assert clock.order == [0, 1, 2, 3, 0, 1, 2, 3, 1, 2, 3, 0]
    assert told == [0, 1]


def test_with_nothing_to_try_nothing_is_measured() -> None:
    clock = Clock(lambda _value, _round: 1.0)
    assert contest(USUAL, [], clock, margin=0.03).chosen == USUAL
    assert clock.order == []
