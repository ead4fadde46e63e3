"""The static layout's session: what the ring computes with exact products, however the work is cut, also where it slides."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from edge_llm.cache.kv_cache import KVCache
from edge_llm.errors import ModelFormatError, SessionError
from edge_llm.export.static_export import export_static
from edge_llm.kernels.layout import TILE, KvType
from edge_llm.kernels.warmup import KernelLibrary
from edge_llm.model.manifest import ModelManifest
from edge_llm.model.static_folder import (
    GOLDEN_NAME,
    STATIC_NAME,
    STATIC_VERSION,
    STATIC_WEIGHTS,
    EmbeddingTable,
    StaticForm,
    StaticManifest,
)
from edge_llm.model.static_session import StaticSession, mask, self_test
from edge_llm.model.step import Segment, Step
from tests.model import mixed, static_rig
from tests.model.exact_ring import unchecked_graph, write_exact_ring
from tests.model.mixed import CONTEXT, LENGTH, MAX_CHUNK, append, recomputed, texts, write_mixed

IDS = texts(1)[0]
TOLERANCE = 1e-3
PROMPTS = Path(__file__).parents[1] / "golden" / "smollm2_prompts.json"
Open = tuple[StaticSession, KVCache]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixed(tmp_path_factory.mktemp("mixed") / "model")


@pytest.fixture(scope="module")
def static_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("static")
    export_static(folder, target, StaticForm.F32)
    return target


@pytest.fixture(scope="module")
def truth(folder: Path, kernels: KernelLibrary, tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """Logits of IDS, three contexts long, by the ring's own attention over exact products."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edge_llm.model.session.check_graph", unchecked_graph)
        exact = write_exact_ring(folder, tmp_path_factory.mktemp("exact") / "exact")
        return recomputed(exact, kernels, KvType.F32, IDS)


@pytest.fixture(scope="module")
def static(folder: Path, static_folder: Path) -> Iterator[Open]:
    with static_rig.opened(folder, static_folder, context=CONTEXT, max_chunk=MAX_CHUNK) as opened:
        yield opened


@pytest.fixture
def slots(static: Open) -> Iterator[list[int]]:
    cache = static[1]
    taken = [slot for slot in (cache.acquire(), cache.acquire()) if slot is not None]
    yield taken
    for slot in taken:
        cache.release(slot)
    cache.check_integrity()
    assert cache.used_bytes == 0


def goes_on(static: Open, slot: int, rows: int, truth: np.ndarray) -> bool:
    """Whether the next rows of IDS have the logits that they should."""
    start = static[1].length(slot)
    ids = IDS[start : start + rows]
    return not ids or np.allclose(append(*static, slot, ids), truth[start : start + len(ids)], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("chunk", [1, 2, 7, MAX_CHUNK])
def test_every_wrap_and_slide_is_the_rings(static: Open, slots: list[int], truth: np.ndarray, chunk: int) -> None:
    """Three contexts: local rings wrap, global layers slide behind their sinks."""
    while static[1].length(slots[0]) < LENGTH:
        assert goes_on(static, slots[0], chunk, truth), static[1].length(slots[0])


def test_sinks_lie_where_they_lay(static: Open, slots: list[int], truth: np.ndarray) -> None:
    """Their keys are turned for a run and no longer."""
    layer = static[1].plain_layers[1]
    while static[1].length(slots[0]) < CONTEXT:
        assert goes_on(static, slots[0], MAX_CHUNK, truth)
    before = layer.rows(slots[0])[0][:, :, :TILE].copy()
    assert goes_on(static, slots[0], MAX_CHUNK, truth)
    assert np.array_equal(layer.rows(slots[0])[0][:, :, :TILE], before)


@pytest.mark.parametrize("written", [0, 40, 64, 65, 129, 200, 329])
def test_truncate_fork_and_rejected_drafts(static: Open, slots: list[int], truth: np.ndarray, written: int) -> None:
    session, cache = static
    source, target = slots
    while cache.length(source) < written:
        assert goes_on(static, source, min(MAX_CHUNK, written - cache.length(source)), truth)
    session.forward(Step((Segment(source, written, [7] * MAX_CHUNK, 0),)))
    for length in range(written, max(0, written - 20), -7):
        if cache.fork(source, target, length):
            assert goes_on(static, target, 3, truth), length
    assert goes_on(static, source, MAX_CHUNK, truth)


def test_snapshots_go_on_as_their_source(static: Open, slots: list[int], truth: np.ndarray) -> None:
    source, target = slots
    for stop in (TILE, 90):
        while static[1].length(source) < stop:
            assert goes_on(static, source, min(MAX_CHUNK, stop - static[1].length(source)), truth)
        block = static[1].snapshot(source, (stop - 1) // TILE * TILE, stop)
        assert block is not None
        static[1].restore(target, block)
    assert goes_on(static, target, 10, truth)


def test_company_changes_no_bit(static: Open, slots: list[int]) -> None:
    session, cache = static
    alone = append(session, cache, slots[0], IDS[:MAX_CHUNK]).copy()
    other = cache.acquire()
    assert other is not None
    step = Step((Segment(other, 0, IDS[5:15], 1), Segment(slots[1], 0, IDS[: MAX_CHUNK - 10], 3)))
    logits = session.forward(step)
    assert np.allclose(logits[1:], alone[MAX_CHUNK - 13 : MAX_CHUNK - 10], atol=1e-5)
    assert np.array_equal(logits[0], session.forward(Step((step.segments[0],)))[0])
    hidden = session.hidden_states(10).copy()
    session.forward(Step((Segment(slots[1], 0, IDS[:5]), step.segments[0])))
    assert np.array_equal(session.hidden_states(15)[5:], hidden)
    cache.release(other)


def segment(slot: int = 0, position: int = 0, ids: Sequence[int] = (5,), logit_rows: int = 1) -> Segment:
    return Segment(slot, position, ids, logit_rows)


@pytest.mark.parametrize(
    "segments",
    [
        [],
        [segment(ids=[5] * (MAX_CHUNK + 1))],
        [segment(ids=[])],
        [segment(), segment()],
        [segment(logit_rows=2)],
        [segment(ids=[-1])],
        [segment(ids=[1 << 20])],
        [segment(position=3)],
        [segment(slot=99)],
    ],
)
def test_impossible_steps_are_refused(static: Open, slots: list[int], segments: list[Segment]) -> None:
    moved = tuple(segment if segment.slot else Segment(slots[0], *_rest(segment)) for segment in segments)
    with pytest.raises(SessionError):
        static[0].forward(Step(moved))


def _rest(segment: Segment) -> tuple[int, Sequence[int], int]:
    return segment.position, segment.token_ids, segment.logit_rows


def test_a_context_that_does_not_slide_ends(folder: Path, static_folder: Path) -> None:
    with static_rig.opened(folder, static_folder, context=40, max_chunk=MAX_CHUNK) as (session, cache):
        slot = cache.acquire()
        assert slot is not None
        append(session, cache, slot, IDS[:20])
        append(session, cache, slot, IDS[20:40])
        with pytest.raises(SessionError, match="no room"):
            session.forward(Step((Segment(slot, 40, [5], 1),)))
    with pytest.raises(SessionError, match="closed"):
        session.forward(Step((Segment(slot, 40, [5], 1),)))


def test_memory_that_is_not_there_is_an_error_of_the_step(
    static: Open, slots: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(slot: int, rows: int) -> None:
        raise MemoryError

    monkeypatch.setattr(static[1].plain_layers[1], "reserve", fail)
    with pytest.raises(SessionError, match="no memory for 1 rows"):
        static[0].forward(Step((Segment(slots[0], 0, [5], 1),)))


def test_a_mask_shows_what_a_row_attends_to(static: Open) -> None:
    """By the rule's own words, at every position around the wraps."""
    for layer in static[1].plain_layers:
        ring = layer.ring
        for position in range(0, 3 * CONTEXT, 5):
            held = min(ring.capacity, 256)
            found = mask(ring, held, position, 9) == 0
            owner = {ring.physical_row(p): p for p in range(position)}
            for row in range(9):
                own = position + row
                seen = [p < ring.sinks or own - ring.window < p for p in range(own + 1)]
                for place in range(held):
                    assert found[row, place] == (place in owner and seen[owner[place]])
                for other in range(9):
                    assert found[row, held + other] == (other <= row and seen[position + other])


def test_the_self_test_tells_a_wrong_graph(folder: Path, static_folder: Path, tmp_path: Path) -> None:
    export_static(folder, tmp_path)
    with static_rig.opened(folder, tmp_path, context=CONTEXT, max_chunk=MAX_CHUNK) as (session, cache):
        self_test(session, cache, tmp_path)
        self_test(session, cache, static_folder)  # the form makes no difference to what is right
        golden = np.fromfile(tmp_path / GOLDEN_NAME, np.float32)
        golden[::-1].tofile(tmp_path / GOLDEN_NAME)
        with pytest.raises(SessionError, match="wrong logits"):
            self_test(session, cache, tmp_path)
        golden[:10].tofile(tmp_path / GOLDEN_NAME)
        with pytest.raises(SessionError, match="no numbers"):
            self_test(session, cache, tmp_path)
        assert cache.free_slots == cache.slots


@pytest.mark.parametrize("fault", ["missing", "cut", "no json", "other version", "no list"])
def test_a_folder_that_is_not_whole_is_refused(folder: Path, tmp_path: Path, fault: str) -> None:
    manifest = export_static(folder, tmp_path)
    assert StaticManifest.read(tmp_path) == manifest
    path = tmp_path / STATIC_NAME
    if fault == "missing":
        (tmp_path / GOLDEN_NAME).unlink()
    elif fault == "cut":
        (tmp_path / STATIC_WEIGHTS).write_bytes((tmp_path / STATIC_WEIGHTS).read_bytes()[:-1])
    elif fault == "no json":
        path.write_bytes(b"\xff{")
    elif fault == "other version":
        path.write_text(path.read_text().replace(f'"version": {STATIC_VERSION}', '"version": 9'))
    else:
        path.write_text("[1]")
    with pytest.raises(ModelFormatError, match="static form"):
        StaticManifest.read(tmp_path)


@pytest.mark.parametrize("codes", [(1 << 40, None), (-64, None), (0, 5)])
def test_embeddings_outside_the_file_are_refused(
    folder: Path, static_folder: Path, codes: tuple[int, int | None]
) -> None:
    matrix = StaticManifest.read(static_folder).embedding
    moved = dataclasses.replace(matrix, codes=(codes[0], codes[1] or matrix.codes[1]))
    with pytest.raises(ModelFormatError, match="not this model"):
        EmbeddingTable(folder, ModelManifest.read(folder), moved)


@pytest.fixture
def scratch() -> Iterator[Path]:
    """For what takes a gigabyte: gone with the test."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_the_real_model_says_what_the_ring_says_with_exact_products(
    smollm2_folder: Path, kernels: KernelLibrary, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedily, from float32 weights."""
    prompts = [
        json.loads(PROMPTS.read_text("utf-8"))["prompts"][name]["ids"] for name in ("answered", "two user turns")
    ]
    export_static(smollm2_folder, scratch, StaticForm.F32)
    monkeypatch.setattr("edge_llm.model.session.check_graph", lambda folder, manifest: None)
    exact = write_exact_ring(smollm2_folder, scratch / "exact")
    room = {"context": 128, "max_chunk": 64, "slots": 1}
    with mixed.opened(exact, kernels, KvType.F32, max_rows=64, **room) as opened:
        expected = [greedy(*opened, ids) for ids in prompts]
    with static_rig.opened(smollm2_folder, scratch, **room) as opened:
        assert [greedy(*opened, ids) for ids in prompts] == expected


def greedy(session: StaticSession, cache: KVCache, ids: Sequence[int]) -> list[int]:
    slot, said = cache.acquire(), []
    assert slot is not None
    for _ in range(24):
        said.append(int(append(session, cache, slot, said[-1:] or ids)[-1].argmax()))
    cache.release(slot)
    return said
