"""The phases of a step, and the team of threads that goes through them together.

An op does not compute when ONNX Runtime calls it: it adds its phases to the list of the session (`add_phase`). The op
whose result something else reads, a stock op or the host, lets the whole list run (`run_phases`): once for some hundred
phases the threads are called, and between two phases they wait for one another for as long as a cache line takes. That
changes no result: all phases run in the order of the ops, over the same memory.

Any number of threads may come, at any time. A phase's items are claimed from shared counters, so whoever is there does
the work, and nobody waits for a thread that has not come: only for items that somebody has begun.
"""

from __future__ import annotations

from typing import Any

import numba
from numba import types

from edge_llm.kernels.atomics import ask_for_line, fetch_add, load_shared, rest
from edge_llm.kernels.layout import MAX_SHARES, PHASE_FIELDS, WORKSPACE_FIELDS, Items, Phase, Workspace
from edge_llm.kernels.pointers import call_1, call_2, call_5, i64_at

_WORD = 8
_LINE = 64
_CLAIMS = 16
"""claims in which a share of many small items is taken, at least"""
_WARM_BYTES = 64 << 10
"""of its next weights that a waiting thread asks for: a part of what stays in a core's own cache"""
_RESTS = 1024
"""looks at a phase that others still work at before the system may run another thread here; some ten microseconds"""


@numba.njit(inline="always")
def _place(workspace: Any, number: int) -> int:
    """Address of the record of a phase."""
    return workspace[Workspace.PHASES] + _WORD * PHASE_FIELDS * number


@numba.njit(inline="always")
def _phase(workspace: Any, number: int) -> Any:
    return i64_at(_place(workspace, number), PHASE_FIELDS)


@numba.njit(inline="always")
def _shares(workspace: Any) -> int:
    return min(max(1, workspace[Workspace.THREADS]), MAX_SHARES)


@numba.njit
def add_phase(
    workspace: Any, function: int, call: int, count: int, items: int, weights: int, weight_bytes: int
) -> None:
    """Let function(call, i) run for 0 .. count-1, after all phases that were added before.

    `items` says what they are (layout.Items). `weights` are read from their beginning to their end by the items in order; 0:
    none.
    """
    if count < 1:
        return
    number, head = workspace[Workspace.PHASE_COUNT], _phase(workspace, workspace[Workspace.PHASE_HEAD])
    phase = _phase(workspace, number)
    phase[Phase.FUNCTION] = function
    phase[Phase.CALL] = call
    phase[Phase.COUNT] = count
    phase[Phase.LINKS] = 0
    phase[Phase.WARM] = 0
    if number == 0:
        workspace[Workspace.COLD] = 0
    if number > 0 and count == head[Phase.COUNT] and _goes_on(workspace, call, count, items):
        head[Phase.LINKS] += 1
    else:
        workspace[Workspace.PHASE_HEAD] = number
        phase[Phase.DONE] = 0
        shares = _shares(workspace)
        for share in range(shares):
            phase[Phase.NEXT + share] = count * share // shares
    if weights != 0:
        for earlier in range(workspace[Workspace.COLD], number):
            _phase(workspace, earlier)[Phase.WARM] = weights
            _phase(workspace, earlier)[Phase.WARM_BYTES] = weight_bytes
        workspace[Workspace.COLD] = number
    workspace[Workspace.ITEMS] = items
    workspace[Workspace.PHASE_COUNT] = number + 1


@numba.njit(inline="always")
def _goes_on(workspace: Any, call: int, count: int, items: int) -> bool:
    """Whether items of a phase may follow those of the last one on their threads, item by item."""
    if count == 1:
        return True
    if items == Items.TASKS or items != workspace[Workspace.ITEMS]:
        return False
    last = _phase(workspace, workspace[Workspace.PHASE_COUNT] - 1)
    return items == Items.ROWS or last[Phase.CALL] == call


@numba.njit
def run_phases(context: int, workspace: Any, address: int, parallel_for: int) -> int:
    """Run what was added, on ONNX Runtime's pool where a phase has more than one item; an OrtStatus*."""
    status, number, several = 0, 0, False
    while number < workspace[Workspace.PHASE_COUNT]:
        phase = _phase(workspace, number)
        several = several or phase[Phase.COUNT] > 1
        number += 1 + phase[Phase.LINKS]
    threads = workspace[Workspace.THREADS]
    if several and threads > 1:
        status = call_5(parallel_for, context, workspace[Workspace.TEAM], threads, 0, address)
    elif number > 0:
        call_2(workspace[Workspace.TEAM], address, 0)
    workspace[Workspace.PHASE_COUNT] = 0
    return status


@numba.njit(inline="always")
def _work(workspace: Any, number: int, member: int) -> None:
    """Do items of phase `number` until all are claimed: those of the thread's own share first, then others'."""
    phase, place = _phase(workspace, number), _place(workspace, number)
    count, shares = phase[Phase.COUNT], _shares(workspace)
    for i in range(shares):
        share = (member + i) % shares
        end = count * (share + 1) // shares
        grain = max(1, (end - count * share // shares) // _CLAIMS)
        counter = place + _WORD * (Phase.NEXT + share)
        while load_shared(counter) < end:
            first = fetch_add(counter, grain)
            last = min(first + grain, end)
            for item in range(first, last):
                for link in range(number, number + 1 + phase[Phase.LINKS]):
                    step = _phase(workspace, link)
                    call_2(step[Phase.FUNCTION], step[Phase.CALL], item)
            if last > first:
                fetch_add(place + _WORD * Phase.DONE, last - first)


@numba.njit(inline="always")
def _wait(workspace: Any, number: int, member: int) -> None:
    """Wait for the items that others have begun; meanwhile ask for the weights that this thread will read next."""
    phase = _phase(workspace, number)
    count, done = phase[Phase.COUNT], _place(workspace, number) + _WORD * Phase.DONE
    if load_shared(done) >= count:
        return
    if phase[Phase.WARM] != 0:
        shares = _shares(workspace)
        share = phase[Phase.WARM_BYTES] // shares
        weights = phase[Phase.WARM] + member % shares * share
        for at in range(0, min(share, _WARM_BYTES), _LINE):
            ask_for_line(weights + at)
            if load_shared(done) >= count:
                return
    looks = 0
    while load_shared(done) < count:
        rest()
        looks += 1
        if looks % _RESTS == 0 and workspace[Workspace.YIELD] != 0:
            call_1(workspace[Workspace.YIELD], 0)


def team_run(address: int, member: int) -> None:
    """Go through all phases of the workspace at `address`, as one of the threads."""
    workspace = i64_at(address, WORKSPACE_FIELDS)
    number, phases = 0, workspace[Workspace.PHASE_COUNT]
    while number < phases:
        _work(workspace, number, member)
        _wait(workspace, number, member)
        number += 1 + _phase(workspace, number)[Phase.LINKS]


ENTRIES = {"team_run": (types.void(types.int64, types.int64), team_run)}
