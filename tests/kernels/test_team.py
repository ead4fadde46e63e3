"""A step's phases by a team of threads: each item once, phases one after another, whoever comes and whenever."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import types

from edge_llm.kernels.atomics import fetch_add
from edge_llm.kernels.layout import MAX_SHARES, PHASE_FIELDS, WORKSPACE_FIELDS, Items, Phase, Workspace
from edge_llm.kernels.pointers import i64_at
from edge_llm.kernels.team import add_phase, team_run

MOST = 64
_TICK, _RUNS, _TURNS, _FIRST = range(4)
_CALL_FIELDS = _FIRST + MOST
_team = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)
_compiled_team = numba.cfunc("void(int64, int64)", error_model="numpy")(team_run)


@numba.cfunc(types.void(types.int64, types.int64), error_model="numpy")
def note(call: int, item: int) -> None:
    """Write into the call record when each item ended, by a clock that all calls share, and count the runs.

    An item takes so many turns, times its number: of two that begin together the second ends later.
    """
    fields = i64_at(call, _CALL_FIELDS)
    for _ in range(item * fields[_TURNS]):
        fetch_add(fields[_TICK], 0)
    fields[_FIRST + item] = fetch_add(fields[_TICK], 1)
    fetch_add(call + 8 * _RUNS, 1)


@numba.njit
def _add(workspace, function, call, count, items, weights, nbytes):
    add_phase(workspace, function, call, count, items, weights, nbytes)


@dataclass(frozen=True)
class Wanted:
    count: int
    items: Items
    weights: bool = False


class Plan:
    """A workspace with phases that only note when they run."""

    def __init__(self, wanted: list[Wanted], threads: int, turns: int = 0) -> None:
        self.wanted, self.turns = wanted, turns
        memory = np.zeros(PHASE_FIELDS * (len(wanted) + 1) + 8, np.int64)
        start = -memory.ctypes.data % 64 // 8
        self.phases = memory[start : start + PHASE_FIELDS * len(wanted)].reshape(-1, PHASE_FIELDS)
        self.clock = np.zeros(1, np.int64)
        self.calls = np.zeros((len(wanted), _CALL_FIELDS), np.int64)
        self.calls[:, _TICK] = self.clock.ctypes.data
        self.weights = np.zeros(1 << 12, np.uint8)
        self.workspace = np.zeros(WORKSPACE_FIELDS, np.int64)
        self.workspace[Workspace.THREADS] = threads
        self.workspace[Workspace.PHASES] = self.phases.ctypes.data
        self.workspace[Workspace.MAX_PHASES] = len(wanted)
        self.add()

    def add(self) -> None:
        self.calls[:, _RUNS:] = 0
        self.calls[:, _TURNS] = self.turns
        self.workspace[Workspace.PHASE_COUNT] = 0
        for phase, call in zip(self.wanted, self.calls, strict=True):
            weights = (self.weights.ctypes.data, self.weights.size) if phase.weights else (0, 0)
            _add(self.workspace, note.address, call.ctypes.data, phase.count, phase.items, *weights)

    def run(self, members: list[int]) -> None:
        team = _team(_compiled_team.address)
        others = [threading.Thread(target=team, args=(self.workspace.ctypes.data, m)) for m in members[1:]]
        for thread in others:
            thread.start()
        team(self.workspace.ctypes.data, members[0])
        for thread in others:
            thread.join()

    def check(self) -> None:
        """Every item ran once; what is not linked ran after all before it, what is linked after its own item."""
        before, links, head = -1, 0, None
        listed = iter(range(len(self.wanted)))
        for phase, call in zip(self.wanted, self.calls, strict=True):
            assert call[_RUNS] == phase.count
            ticks = call[_FIRST : _FIRST + phase.count]
            if phase.count == 0:
                continue
            if links == 0:
                assert ticks.min() > before
                links = self.phases[next(listed)][Phase.LINKS]
            else:
                assert head is not None
                assert (ticks > head).all()
                next(listed)
                links -= 1
            head, before = ticks, max(before, ticks.max())


wanted = st.lists(
    st.builds(
        Wanted,
        count=st.sampled_from([0, 1, 1, 2, 3, 7, MOST]),
        items=st.sampled_from(list(Items)),
        weights=st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


@given(wanted, st.integers(1, 9), st.integers(1, 4))
def test_each_item_once_and_in_order(wanted: list[Wanted], threads: int, members: int) -> None:
    plan = Plan(wanted, threads)
    for _ in range(2):  # the records are used again in the next step
        plan.run(list(range(members)))
        plan.check()
        plan.add()
        plan.clock[0] = 0


@pytest.mark.parametrize("members", [[0], [3], [1, 0], [5, 5, 5]])
def test_whoever_comes_does_the_work(members: list[int]) -> None:
    plan = Plan([Wanted(MOST, Items.TASKS), Wanted(1, Items.ROWS), Wanted(MOST, Items.TASKS, True)], 4)
    plan.run(members)
    plan.check()


def test_who_comes_when_all_is_done_leaves_at_once() -> None:
    plan = Plan([Wanted(5, Items.TASKS), Wanted(3, Items.TASKS)], 2)
    plan.run([0])
    plan.run([1])
    plan.check()


def test_nobody_goes_on_before_what_others_have_begun_is_done() -> None:
    """Items of milliseconds, so that two threads are in a phase together, and one of them leaves it first."""
    for _ in range(20):
        plan = Plan([Wanted(2, Items.TASKS), Wanted(3, Items.ROWS)] * 2, 2, turns=200_000)
        plan.run([0, 1])
        plan.check()


def links(*wanted: Wanted) -> list[int]:
    return Plan(list(wanted), 2).phases[:, Phase.LINKS].tolist()


def test_what_is_linked() -> None:
    rows, heads, tasks = Items.ROWS, Items.HEADS, Items.TASKS
    assert links(Wanted(4, rows), Wanted(4, rows)) == [1, 0]
    assert links(Wanted(4, rows), Wanted(5, rows)) == [0, 0]
    assert links(Wanted(4, rows), Wanted(4, heads)) == [0, 0]
    assert links(Wanted(4, tasks), Wanted(4, tasks)) == [0, 0]
    assert links(Wanted(1, tasks), Wanted(1, rows), Wanted(1, heads)) == [2, 0, 0]
    assert links(Wanted(3, heads), Wanted(3, heads), Wanted(1, rows)) == [0, 0, 0], "two attentions share their scratch"


def test_phases_of_one_attention_are_linked() -> None:
    plan = Plan([Wanted(3, Items.HEADS)] * 2, 2)
    plan.workspace[Workspace.PHASE_COUNT] = 0
    for _ in plan.wanted:
        _add(plan.workspace, note.address, plan.calls[0].ctypes.data, 3, Items.HEADS, 0, 0)
    assert plan.phases[:, Phase.LINKS].tolist() == [1, 0]


def test_waiting_threads_know_which_weights_come_next() -> None:
    plan = Plan([Wanted(1, Items.ROWS), Wanted(4, Items.TASKS, True), Wanted(2, Items.ROWS)], MAX_SHARES)
    assert plan.phases[0][Phase.WARM] == plan.weights.ctypes.data
    assert plan.phases[1:, Phase.WARM].tolist() == [0, 0]
