"""Providers: what is said of one that is not there, and OpenVINO's plugin where it is."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import onnx
import pytest

from edge_llm import paths
from edge_llm.cache.kv_cache import KVCache
from edge_llm.errors import SessionError
from edge_llm.export.static_export import export_static
from edge_llm.model import plugins, providers
from edge_llm.model.plugins import PLUGINS, Plugin, needs_fixed_sizes
from edge_llm.model.providers import CpuGraph, PluginGraph, open_graph, provider_state
from edge_llm.model.static_folder import STATIC_GRAPH, EmbeddingTable, StaticForm
from edge_llm.model.static_session import GOLDEN_IDS, StaticSession, self_test
from tests.model import static_rig
from tests.model.mixed import CONTEXT, MAX_CHUNK, append, texts, write_mixed

IDS = texts(1)[0]
needs_openvino = pytest.mark.skipif(
    find_spec(PLUGINS["openvino"].package) is None, reason="onnxruntime-ep-openvino (extra npu) is not installed"
)

needs_qnn = pytest.mark.skipif(
    find_spec(PLUGINS["qnn"].package) is None, reason="onnxruntime-qnn (Qualcomm's compiler) is not installed"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixed(tmp_path_factory.mktemp("mixed") / "model")


@pytest.fixture(scope="module")
def static_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("static")
    export_static(folder, target)
    return target


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A package in the place of OpenVINO's, whose library does not exist."""
    module = ModuleType("fake_plugin")
    module.get_library_path = lambda: "/nowhere/libplugin.so"  # type: ignore[attr-defined]
    module.get_ep_name = lambda: "FakeProvider"  # type: ignore[attr-defined]
    module.__spec__ = ModuleSpec("fake_plugin", None)
    monkeypatch.setitem(sys.modules, "fake_plugin", module)
    monkeypatch.setitem(PLUGINS, "fake", Plugin("fake", "fake_plugin", "fake-plugin", "x", "NPU of nobody", "NPU"))
    return module


def test_a_plugin_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "find_spec", lambda _: None)
    with pytest.raises(SessionError, match="openvino is not installed") as failure:
        provider_state("openvino")
    assert failure.value.hint == "pip install 'edge-llm[npu]'"


def test_a_library_that_does_not_load_is_told_in_one_line(plugin: ModuleType) -> None:
    with pytest.raises(SessionError, match=r"^fake does not load: .+$"):
        provider_state("fake")


def test_a_plugin_without_its_device_is_told(plugin: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime would take another device without a word."""
    monkeypatch.setattr(plugins, "_registered", {"FakeProvider"})
    with pytest.raises(SessionError, match="fake finds no NPU of nobody here"):
        provider_state("fake")


def test_the_probe_is_an_addition() -> None:
    session = providers._session(providers._PROBE, plugins.plain_options(1), providers=["CPUExecutionProvider"])
    assert (session.run(None, {"x": np.ones(8, np.float32)})[0] == 2).all()


def test_a_graph_that_is_none_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / STATIC_GRAPH).write_bytes(b"no graph")
    with pytest.raises(SessionError, match=r"^ONNX Runtime refused the graph: .+$"):
        open_graph("cpu", tmp_path, threads=1, held={})


def test_what_is_compiled_is_kept_by_all_that_shapes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGE_LLM_HOME", str(tmp_path))
    qnn, device = PLUGINS["qnn"], SimpleNamespace(ep_metadata={"version": "1"})
    made = [
        plugins.compiled_folder(qnn, device, Path("model"), 256),
        plugins.compiled_folder(qnn, device, Path("model"), 512),
        plugins.compiled_folder(qnn, SimpleNamespace(ep_metadata={"version": "2"}), Path("model"), 256),
        plugins.compiled_folder(dataclasses.replace(qnn, options={"htp_arch": "75"}), device, Path("model"), 256),
    ]
    assert len(set(made)) == 4
    assert plugins.compiled_folder(qnn, device, Path("model"), 256) == made[0]
    for age, folder in enumerate(made):
        os.utime(folder, (1000 - age, 1000 - age))
    newest = plugins.compiled_folder(qnn, device, Path("other"), 256)
    assert set((tmp_path / "cache" / "providers").iterdir()) == {*made[:3], newest}  # four, the last used


@needs_openvino
def test_openvino_reads_the_cache_where_it_lies(folder: Path, static_folder: Path) -> None:
    """ONNX Runtime would copy ordinary arrays for each run."""
    with opened_on("openvino", folder, static_folder) as (session, cache):
        slot = cache.acquire()
        append(session, cache, slot, IDS[:5])
        rows = [array for layer in cache.plain_layers for array in layer.rows(slot)]
        given = session._graph._values
        assert {array.__array_interface__["data"][0] for array in rows} == set(given)
        cache.release(slot)
        del rows
        assert not given


@needs_openvino
def test_openvino_says_what_it_computes_on() -> None:
    for _ in range(2):  # its library is registered once
        assert "OpenVINOExecutionProvider" in provider_state("openvino")


@needs_openvino
@pytest.mark.parametrize("form", [StaticForm.BLOCKS, StaticForm.F32, StaticForm.COREML])
def test_openvino_comes_to_the_same_logits(folder: Path, tmp_path: Path, form: StaticForm) -> None:
    """Over wraps and slides, in chunks of any size; the second time from what it compiled the first time."""
    export_static(folder, tmp_path, form)
    opened = static_rig.opened(folder, tmp_path, context=CONTEXT, max_chunk=MAX_CHUNK, optimised=False)
    with opened as (session, cache):
        expected = _read(session, cache)
    for _ in range(2):
        with opened_on("openvino", folder, tmp_path) as (session, cache):
            self_test(session, cache, tmp_path)
            assert np.abs(_read(session, cache) - expected).max() < (0.02 if form is StaticForm.F32 else 1.5)
    assert list((paths.cache_dir() / "providers").glob(f"openvino-{tmp_path.name}-*/*"))


@needs_openvino
def test_no_folder_for_what_is_compiled_is_no_fault(
    folder: Path, static_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGE_LLM_HOME", "/proc/none")
    with opened_on("openvino", folder, static_folder) as (session, cache):
        self_test(session, cache, static_folder)


def opened_on(name: str, folder: Path, static_folder: Path):
    def provide(held: Mapping[str, int]) -> CpuGraph | PluginGraph:
        return open_graph(name, static_folder, threads=2, held=held)

    whole = needs_fixed_sizes(name)
    return static_rig.opened(folder, static_folder, context=CONTEXT, max_chunk=MAX_CHUNK, provide=provide, whole=whole)


def _read(session: StaticSession, cache) -> np.ndarray:
    slot, out = cache.acquire(), []
    for size in [MAX_CHUNK] * 5 + [1, 1, 7, 1, 3]:
        start = cache.length(slot)
        out.append(append(session, cache, slot, IDS[start : start + size]))
    cache.release(slot)
    return np.concatenate(out)


@needs_openvino
def test_nodes_that_openvino_leaves_to_the_cpu_are_named(folder: Path, tmp_path: Path) -> None:
    export_static(folder, tmp_path)
    model = onnx.load(tmp_path / STATIC_GRAPH, load_external_data=False)
    model.graph.node.add(op_type="Transpose", input=["hidden"], output=["turned"])
    model.graph.node.add(op_type="MatMul", input=["turned", "hidden"], output=["square"])
    model.graph.node.add(op_type="Det", input=["square"], output=["volume"])
    model.graph.output.add(name="volume")
    (tmp_path / STATIC_GRAPH).write_bytes(model.SerializeToString())
    with (
        pytest.raises(SessionError, match=r"^openvino does not take the whole graph: 1 Det would be the CPU's$"),
        opened_on("openvino", folder, tmp_path),
    ):
        pass


@needs_openvino
def test_every_size_can_be_fixed(folder: Path, static_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As compilers of NPUs want it: a slot's memory is a whole ring from the first row on."""
    monkeypatch.setitem(PLUGINS, "openvino", dataclasses.replace(PLUGINS["openvino"], fixed=True))
    with opened_on("openvino", folder, static_folder) as (session, cache):
        self_test(session, cache, static_folder)
        fixed = _read(session, cache)
    monkeypatch.undo()
    with opened_on("openvino", folder, static_folder) as (session, cache):
        assert np.abs(_read(session, cache) - fixed).max() < 1e-3


@needs_qnn
def test_other_hardware_of_a_plugin_does_not_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qualcomm's compiler runs on this CPU, and ONNX Runtime lists that as a device."""
    monkeypatch.setitem(PLUGINS, "qnn", dataclasses.replace(PLUGINS["qnn"], kind="FPGA", device="Qualcomm FPGA"))
    with pytest.raises(SessionError, match=r"^qnn finds no Qualcomm FPGA here$"):
        provider_state("qnn")


@pytest.mark.parametrize("fault", ["", "changed", "gone", "no digests", "digests of nothing", "no json"])
def test_only_what_was_compiled_is_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Whatever else lies there is compiled again, in its place."""
    monkeypatch.setenv("EDGE_LLM_HOME", str(tmp_path / "home"))
    kept = tmp_path / "1"

    class Options:
        def add_session_config_entry(self, name: str, value: str) -> None:
            if name == "ep.context_file_path":
                Path(value).write_bytes(b"graph")
                Path(value).with_name("native.bin").write_bytes(b"code")

    monkeypatch.setattr(providers, "_session", lambda *_: "session")
    assert not providers._is_whole(kept)
    assert providers._session_and_context(tmp_path / "static.onnx", Options(), kept) == "session"
    assert providers._is_whole(kept)
    if fault == "changed":
        (kept / "native.bin").write_bytes(b"evil")
    elif fault == "gone":
        (kept / "native.bin").unlink()
    elif fault == "no digests":
        (kept / "digests.json").unlink()
    elif fault:
        (kept / "digests.json").write_text("{}" if fault == "digests of nothing" else "[")
    assert providers._is_whole(kept) == (not fault)
    providers._session_and_context(tmp_path / "static.onnx", Options(), kept)
    assert providers._is_whole(kept)
    assert [path.name for path in tmp_path.glob(".partial-*")] == []


@pytest.fixture
def hexagon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PLUGINS, "qnn", static_rig.emulated_hexagon())


@needs_qnn
def test_an_emulated_hexagon_comes_to_the_same_logits(folder: Path, tmp_path: Path, hexagon: None) -> None:
    """The whole graph, in float16; the second time from what was compiled the first time."""
    export_static(folder, tmp_path, StaticForm.QNN)
    ids, found = IDS[: MAX_CHUNK + 1], []
    with static_rig.opened(folder, tmp_path, context=CONTEXT, max_chunk=MAX_CHUNK, optimised=False) as (session, cache):
        expected = _chunk_and_token(session, cache, ids)
    assert provider_state("qnn").endswith("on emulated Hexagon V75")
    for _ in range(2):
        with opened_on("qnn", folder, tmp_path) as (session, cache):
            self_test(session, cache, tmp_path)
            found.append(_chunk_and_token(session, cache, ids))
    (kept,) = (paths.cache_dir() / "providers").glob(f"qnn-{tmp_path.name}-*")
    assert sorted(path.name for path in kept.iterdir()) == ["1", "32"]
    for rows in ("1", "32"):
        assert [node.op_type for node in onnx.load(kept / rows / "compiled.onnx").graph.node] == ["EPContext"]
    assert np.array_equal(*found)
    assert np.abs(found[0] - expected).max() < 0.02 * np.abs(expected).max()
    assert (found[0].argmax(axis=1) == expected.argmax(axis=1)).all()


@needs_qnn
def test_activations_whose_squares_float16_cannot_hold(
    folder: Path, tmp_path: Path, hexagon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As SmolLM2 has in its residual."""
    export_static(folder, tmp_path, StaticForm.QNN)
    rows = EmbeddingTable.rows

    def large(table: EmbeddingTable, token_ids: np.ndarray) -> np.ndarray:
        embedded = 50 * rows(table, token_ids)
        embedded[:, 7] = 25_000
        return embedded

    monkeypatch.setattr(EmbeddingTable, "rows", large)
    with static_rig.opened(folder, tmp_path, context=CONTEXT, max_chunk=MAX_CHUNK, optimised=False) as (session, cache):
        expected = _chunk_and_token(session, cache, IDS[:9])
    with opened_on("qnn", folder, tmp_path) as (session, cache):
        found = _chunk_and_token(session, cache, IDS[:9])
    assert np.abs(found - expected).max() < 0.02 * np.abs(expected).max()


@needs_qnn
@pytest.mark.skipif(not os.environ.get("EDGE_LLM_TEST_NPU"), reason="takes many minutes: EDGE_LLM_TEST_NPU=1")
def test_the_real_model_on_an_emulated_hexagon(
    smollm2_folder: Path, tmp_path: Path, hexagon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KL in float16, nats a token."""
    monkeypatch.setattr(providers, "_BUCKETS", (1,))
    export_static(smollm2_folder, tmp_path, StaticForm.QNN)
    room = {"context": 40, "max_chunk": 16, "slots": 1}

    def read(session: StaticSession, cache: KVCache) -> np.ndarray:
        slot = cache.acquire()
        logits = np.concatenate([append(session, cache, slot, [token]) for token in GOLDEN_IDS[:4]]).astype(float)
        return logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)

    def provide(held: Mapping[str, int]) -> CpuGraph | PluginGraph:
        return open_graph("qnn", tmp_path, threads=1, held=held)

    with static_rig.opened(smollm2_folder, tmp_path, optimised=False, **room) as opened:
        expected = read(*opened)
    with static_rig.opened(smollm2_folder, tmp_path, provide=provide, whole=True, **room) as opened:
        found = read(*opened)
    assert (np.exp(expected) * (expected - found)).sum(axis=1).mean() < 0.006
    assert (found.argmax(axis=1) == expected.argmax(axis=1)).all()


@needs_qnn
def test_a_hexagon_does_not_take_blocks_under_dequantize_linear(
    folder: Path, static_folder: Path, hexagon: None
) -> None:
    with (
        pytest.raises(SessionError, match=r"^qnn does not take the whole graph: .* DequantizeLinear"),
        opened_on("qnn", folder, static_folder),
    ):
        pass


def _chunk_and_token(session: StaticSession, cache: KVCache, ids: Sequence[int]) -> np.ndarray:
    slot = cache.acquire()
    logits = [append(session, cache, slot, part).copy() for part in (ids[:-1], ids[-1:])]
    cache.release(slot)
    return np.concatenate(logits)
