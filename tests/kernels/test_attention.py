"""The attention kernels, on this CPU's lowering, against the slow truth."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge_llm.kernels.attention import attention_plan
from edge_llm.kernels.layout import TILE, AttentionCall, CacheLayer, KvType, attention_scratch_bytes
from edge_llm.kernels.tile_product import LOWERING
from tests.kernels.attention_rig import (
    LOWERING_SHAPES,
    Rig,
    Segment,
    Shape,
    check_independence,
    check_not_finite,
    check_ring,
    check_shape,
    chunks,
    random_rows,
    run,
    same_bits,
)
from tests.kernels.test_lowering import TARGETS

kv_types = pytest.mark.parametrize("kv_type", KvType, ids=lambda kv_type: kv_type.name)


@kv_types
@pytest.mark.parametrize("dim", [8, 16, 40, 64, 72, 80, 96, 128, 256])
def test_every_head_size(kv_type: KvType, dim: int) -> None:
    check_shape(Shape(heads=3, dim=dim, kv_type=kv_type))


@kv_types
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (4, 2), (9, 3), (5, 1), (7, 1), (16, 2), (32, 1)])
def test_every_group_size(kv_type: KvType, heads: int, kv_heads: int) -> None:
    check_shape(Shape(heads=heads, kv_heads=kv_heads, dim=16, kv_type=kv_type))


@kv_types
@pytest.mark.parametrize("rotary_dim", [0, 2, 20, 32])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_norms_rotary_and_soft_cap(kv_type: KvType, rotary_dim: int, norms: bool, softcap: float) -> None:
    check_shape(Shape(dim=32, kv_type=kv_type, rotary_dim=rotary_dim, norms=norms, softcap=softcap), 70)


@kv_types
def test_a_context_of_several_splits(kv_type: KvType) -> None:
    rig = Rig(Shape(heads=2, dim=32, kv_type=kv_type, capacity=15 * TILE))
    for segment in chunks(random_rows(rig.shape, 900), (500, 397, 1, 2)):
        rig.check([segment], threads=2)


@kv_types
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 1, 64), (6, 2, 40), (5, 5, 8)])
def test_a_row_does_not_depend_on_others_or_on_the_cut(kv_type: KvType, heads: int, kv_heads: int, dim: int) -> None:
    check_independence(Shape(heads=heads, kv_heads=kv_heads, dim=dim, kv_type=kv_type, capacity=10 * TILE), 530)


@kv_types
def test_nor_do_windows_and_sinks(kv_type: KvType) -> None:
    check_independence(Shape(dim=16, kv_type=kv_type, capacity=10 * TILE, sinks=TILE, window=200), 530)


@kv_types
@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 100, 300])
def test_a_ring_gives_the_bits_of_a_full_cache(kv_type: KvType, window: int) -> None:
    chunk = 37
    capacity = -(-(window + chunk - 1) // TILE) * TILE
    check_ring(Shape(dim=16, kv_type=kv_type, window=window, capacity=capacity), 3 * capacity + 70, chunk)


@kv_types
@pytest.mark.parametrize(("sinks", "window"), [(TILE, 30), (TILE, 129), (5 * TILE, 100)])
def test_so_does_a_ring_with_sinks(kv_type: KvType, sinks: int, window: int) -> None:
    capacity = sinks + -(-(window + 20) // TILE) * TILE
    shape = Shape(dim=16, kv_type=kv_type, window=window, sinks=sinks, capacity=capacity)
    check_ring(shape, 2 * capacity, 21)
    check_ring(replace(shape, rotary_dim=16, sink_rope=True), 2 * capacity, 21)


@kv_types
@pytest.mark.parametrize(("sinks", "window", "rotary_dim"), [(TILE, 200, 0), (TILE, 193, 16), (5 * TILE, 70, 16)])
def test_below_the_context_a_window_with_sinks_changes_no_bit(
    kv_type: KvType, sinks: int, window: int, rotary_dim: int
) -> None:
    """Rows up to sinks + window see everything, also in a chunk whose later rows do not."""
    context = sinks + window
    qkv = random_rows(Shape(dim=16), context + 60)
    everything = run(Rig(Shape(dim=16, kv_type=kv_type, capacity=10 * TILE, rotary_dim=rotary_dim)), qkv, (90,))
    shape = Shape(dim=16, kv_type=kv_type, window=window, sinks=sinks, capacity=10 * TILE, rotary_dim=rotary_dim)
    for sizes, slides in [((90,), True), ((context, 60), False), ((context - 7, 67), True), ((1,), False)]:
        rig = Rig(replace(shape, sink_rope=slides and rotary_dim > 0), seed=len(sizes))
        out = run(rig, qkv, sizes, threads=2)
        assert same_bits(out[:context], everything[:context]), sizes
        assert not same_bits(out[context:], everything[context:])


@kv_types
@pytest.mark.parametrize("sinks", [0, TILE])
def test_what_a_ring_has_forgotten_may_have_been_anything(kv_type: KvType, sinks: int) -> None:
    """A row of NaN reaches those that attend to it, round after round, and never what comes after."""
    shape = Shape(dim=16, kv_type=kv_type, window=70, sinks=sinks, capacity=sinks + 2 * TILE)
    qkv = random_rows(shape, 600)
    good = run(Rig(shape), qkv, (50,))
    bad_rows = [200, 333, 470]
    bad = qkv.copy()
    bad[bad_rows, shape.heads] = np.nan  # the key
    out = run(Rig(shape), bad, (50, 1, 17), threads=3)
    reached = np.zeros(600, np.bool_)
    for row in bad_rows:
        reached[row : row + shape.window] = True
    assert np.isnan(out[reached]).all()
    assert same_bits(out[~reached], good[~reached])


@kv_types
def test_not_a_number_stays_one_and_stays_alone(kv_type: KvType) -> None:
    check_not_finite(kv_type)


def test_the_cost_of_int8_is_small() -> None:
    """Against keys and values that were never quantised."""
    shape = Shape(heads=8, kv_heads=2, capacity=5 * TILE)
    qkv = random_rows(shape, 300)
    exact = run(Rig(replace(shape, kv_type=KvType.F32)), qkv, (300,))
    error = run(Rig(shape), qkv, (300,)) - exact
    assert np.linalg.norm(error) < 0.02 * np.linalg.norm(exact)


# --- ragged steps --------------------------------------------------------------------------------------------------

_RAGGED = Shape(heads=4, kv_heads=2, dim=8, slots=4, capacity=6 * TILE)
_TEXTS = [random_rows(_RAGGED, 330, seed) for seed in range(_RAGGED.slots)]


@pytest.fixture(scope="module")
def alone() -> dict[KvType, list[np.ndarray]]:
    """What each conversation gives by itself."""
    return {
        kv_type: [
            run(Rig(replace(_RAGGED, kv_type=kv_type)), qkv, (330,), slot=slot) for slot, qkv in enumerate(_TEXTS)
        ]
        for kv_type in KvType
    }


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kv_type=st.sampled_from(KvType),
    steps=st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 90)), max_size=4), max_size=8),
    threads=st.integers(1, 9),
)
def test_any_mix_of_segments(
    alone: dict[KvType, list[np.ndarray]], kv_type: KvType, steps: list[list[tuple[int, int]]], threads: int
) -> None:
    """Steps of any conversations and rows, none among them, give each row the bits it has alone."""
    rig = Rig(replace(_RAGGED, kv_type=kv_type), seed=threads)
    lengths = [0] * _RAGGED.slots
    for step in steps:
        segments = []
        for slot, rows in dict(step).items():
            part = _TEXTS[slot][lengths[slot] : lengths[slot] + rows]
            segments.append(Segment(slot, lengths[slot], part))
            lengths[slot] += len(part)
        if segments:
            expected = [alone[kv_type][s.slot][s.position : s.position + len(s.qkv)] for s in segments]
            assert same_bits(rig.step(segments, threads=threads), np.concatenate(expected))


def test_rows_that_were_written_but_not_committed_do_not_count() -> None:
    rig = Rig(Shape(dim=16))
    qkv, rejected = random_rows(rig.shape, 100), random_rows(rig.shape, 100, 5)
    expected = run(Rig(rig.shape), qkv, (50,))
    first = rig.step([Segment(0, 0, qkv[:50])])
    rig.step([Segment(0, 50, rejected[50:])])
    second = rig.step([Segment(0, 50, qkv[50:])])
    assert same_bits(np.concatenate([first, second]), expected)


# --- the plan ------------------------------------------------------------------------------------------------------


def planned(rig: Rig, segments: list[Segment], threads: int) -> tuple[int, int]:
    """Tasks and merges of a step."""
    rig.fill_call(segments, threads)
    tasks = attention_plan(rig.call.ctypes.data)
    return tasks, int(rig.call[AttentionCall.MERGES])


def test_work_is_cut_where_it_is_worth_it() -> None:
    rig = Rig(Shape(heads=9, kv_heads=3, dim=8, capacity=64 * TILE, slots=8))
    row = random_rows(rig.shape, 1)
    assert planned(rig, [Segment(0, 40, row)], 2) == (1, 0)
    assert planned(rig, [Segment(0, 60, row)], 2) == (3, 0)
    assert planned(rig, [Segment(0, 4000, row)], 1) == (1, 0)
    tasks, merges = planned(rig, [Segment(0, 4000, row)], 2)
    assert (tasks, merges) == (16, 1)
    assert planned(rig, [Segment(slot, 4000, row) for slot in range(8)], 2) == (16, 0)
    assert planned(rig, [Segment(0, 0, random_rows(rig.shape, 512))], 64)[0] == 64
    assert planned(rig, [Segment(0, 0, random_rows(rig.shape, 0))], 2) == (0, 0)


def test_without_room_for_parts_work_is_cut_by_rows_only() -> None:
    rig = Rig(Shape(heads=6, kv_heads=2, dim=8, capacity=32 * TILE))
    row = Segment(0, 2000, random_rows(rig.shape, 1))
    assert planned(rig, [row], 4) == (16, 1)
    rig.call[AttentionCall.SCRATCH_BYTES] -= 8 * 6 * 11 * (4 * 8 + 8)  # all parts
    assert attention_plan(rig.call.ctypes.data) == 2
    assert rig.call[AttentionCall.MERGES] == 0


def test_the_scratch_is_modest() -> None:
    assert attention_scratch_bytes(max_rows=512, heads=9, head_dim=64, capacity=8448) < 5 << 20
    assert attention_scratch_bytes(max_rows=1, heads=9, head_dim=64, capacity=768) < 1 << 20


_WRONG_FIELDS = {
    AttentionCall.ROWS: (-1, 59, 61),
    AttentionCall.HEADS: (0, -4, 3),
    AttentionCall.KV_HEADS: (0, 1, 4),
    AttentionCall.HEAD_DIM: (0, 8, 12, 32, -16),
    AttentionCall.ROTARY_DIM: (-2, 7, 18),
    AttentionCall.SCRATCH_BYTES: (0, 64, -1),
    AttentionCall.SEGMENT_COUNT: (0, 1),
}
_WRONG_LAYER = {
    CacheLayer.CAPACITY: (0, 60, -TILE),
    CacheLayer.SINKS: (-TILE, 10, 3 * TILE, 4 * TILE),
    CacheLayer.WINDOW: (0, -1),
    CacheLayer.KV_HEADS: (1, 3),
    CacheLayer.HEAD_DIM: (8, 24),
    CacheLayer.KV_TYPE: (-1, 2),
}
_WRONG_SEGMENTS = {
    0: (-1,),  # slot
    1: (-1, 1, 40),  # first row
    2: (-1, 0, 41, 60, 1 << 30),  # rows
    3: (-1, 3 * TILE - 39, 1 << 30),  # position
}


def _wrong() -> Iterator[tuple[str, int, int]]:
    for where, table in (("call", _WRONG_FIELDS), ("layer", _WRONG_LAYER), ("segment", _WRONG_SEGMENTS)):
        for field, values in table.items():
            yield from ((where, int(field), value) for value in values)


@pytest.mark.parametrize(("where", "field", "value"), [*_wrong()])
def test_a_step_that_does_not_fit_is_refused(where: str, field: int, value: int) -> None:
    rig = Rig(Shape(heads=4, kv_heads=2, dim=16, slots=2, capacity=3 * TILE, rotary_dim=16))
    qkv = random_rows(rig.shape, 60)
    assert planned(rig, [Segment(0, 0, qkv[:40]), Segment(1, 5, qkv[40:])], 1) == (1, 0)
    segments = np.ctypeslib.as_array((ctypes.c_int32 * 8).from_address(int(rig.call[AttentionCall.SEGMENTS])))
    record = {"call": rig.call, "layer": rig.layer, "segment": segments[:4]}[where]
    record[field] = value
    assert attention_plan(rig.call.ctypes.data) == -1
    assert rig.call[AttentionCall.TASKS] == 0
    assert rig.call[AttentionCall.MERGES] == 0


def test_a_window_that_the_ring_cannot_hold_is_refused() -> None:
    rig = Rig(Shape(dim=16, window=100, capacity=2 * TILE))
    qkv = random_rows(rig.shape, 40)
    assert planned(rig, [Segment(0, 1000, qkv[:29])], 1)[0] == 1
    assert planned(rig, [Segment(0, 1000, qkv[:30])], 1)[0] == -1


# --- other CPUs ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def processes() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """All lowerings but this process's own, checked side by side with the tests above."""
    host = llvm.get_host_cpu_features()
    started = {}
    for name, (cpu, features) in TARGETS.items():
        runs_here = all(host.get(feature[1:], False) for feature in features.split(",") if feature)
        if runs_here and name != LOWERING.name:
            environment = {**os.environ, "NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features}
            if name == "generic":
                environment["NUMBA_BOUNDSCHECK"] = "1"
            started[name] = subprocess.Popen(
                [sys.executable, "-W", "error", "-m", "tests.kernels.attention_rig"],
                cwd=Path(__file__).parents[2],
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
    yield started
    for process in started.values():
        process.kill()
        process.communicate()


@pytest.mark.parametrize("name", TARGETS)
def test_every_other_lowering_is_right(name: str, processes: dict[str, subprocess.Popen[str]]) -> None:
    if name not in processes:
        pytest.skip("the lowering of this process (tested in place), or this CPU lacks it")
    output, errors = processes[name].communicate(timeout=300)
    assert processes[name].returncode == 0, errors
    assert output.strip() == name


@pytest.mark.parametrize("shape", LOWERING_SHAPES, ids=lambda shape: f"{shape.kv_type.name}-{shape.dim}")
def test_the_shapes_that_every_lowering_is_tested_with(shape: Shape) -> None:
    check_shape(shape, 110)
