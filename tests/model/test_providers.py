"""Providers: what is said of one that is not there, and OpenVINO's plugin where it is."""

from __future__ import annotations

import subprocess
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import pytest

from edge_llm import paths
from edge_llm.errors import SessionError
from edge_llm.export.static_export import export_static
from edge_llm.model import providers
from edge_llm.model.providers import PLUGINS, open_graph, provider_state
from edge_llm.model.static_folder import STATIC_GRAPH, StaticForm
from edge_llm.model.static_session import StaticSession, self_test
from tests.model import static_rig
from tests.model.mixed import CONTEXT, MAX_CHUNK, append, texts, write_mixed

IDS = texts(1)[0]
needs_openvino = pytest.mark.skipif(
    find_spec(PLUGINS["openvino"].package) is None, reason="onnxruntime-ep-openvino (extra npu) is not installed"
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
    fake = providers.Plugin("fake", "fake_plugin", "x", {"ov_device": "CPU"})
    monkeypatch.setitem(providers.PLUGINS, "fake", fake)
    return module


def test_a_plugin_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "find_spec", lambda _: None)
    with pytest.raises(SessionError, match="openvino is not installed") as failure:
        provider_state("openvino")
    assert failure.value.hint == "pip install 'edge-llm[npu]'"


def test_a_library_that_does_not_load_is_told_in_one_line(plugin: ModuleType) -> None:
    with pytest.raises(SessionError, match=r"^fake does not load: .+$"):
        provider_state("fake")


def test_a_plugin_without_its_device_is_told(plugin: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime would take another device without a word."""
    monkeypatch.setattr(providers, "_registered", {"fake"})
    with pytest.raises(SessionError, match="no device here"):
        provider_state("fake")


def test_the_probe_is_an_addition() -> None:
    session = providers._session(providers._PROBE, providers._options(1), providers=["CPUExecutionProvider"])
    assert (session.run(None, {"x": np.ones(8, np.float32)})[0] == 2).all()


def test_a_graph_that_is_none_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / STATIC_GRAPH).write_bytes(b"no graph")
    with pytest.raises(SessionError, match=r"^ONNX Runtime refused the graph: .+$"):
        open_graph("cpu", tmp_path, threads=1)


@needs_openvino
def test_openvino_says_what_it_computes_on() -> None:
    for _ in range(2):  # its library is registered once
        assert "OpenVINOExecutionProvider" in provider_state("openvino")


@needs_openvino
@pytest.mark.parametrize("form", StaticForm)
def test_openvino_comes_to_the_same_logits(folder: Path, tmp_path: Path, form: StaticForm) -> None:
    """Over wraps and slides, in chunks of any size; the second time from what it compiled the first time."""
    export_static(folder, tmp_path, form)
    opened = static_rig.opened(folder, tmp_path, context=CONTEXT, max_chunk=MAX_CHUNK, optimised=False)
    with opened as (session, cache):
        expected = _read(session, cache)
    for _ in range(2):
        with opened_on_openvino(folder, tmp_path) as (session, cache):
            self_test(session, cache, tmp_path)
            assert np.abs(_read(session, cache) - expected).max() < (0.02 if form is StaticForm.F32 else 1.5)
    assert list((paths.cache_dir() / "providers").glob(f"openvino-{tmp_path.name}-*/*"))


@needs_openvino
def test_no_folder_for_what_is_compiled_is_no_fault(
    folder: Path, static_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGE_LLM_HOME", "/proc/none")
    with opened_on_openvino(folder, static_folder) as (session, cache):
        self_test(session, cache, static_folder)


def opened_on_openvino(folder: Path, static_folder: Path):
    graph = open_graph("openvino", static_folder, threads=2)
    return static_rig.opened(folder, static_folder, context=CONTEXT, max_chunk=MAX_CHUNK, graph=graph)


def _read(session: StaticSession, cache) -> np.ndarray:
    slot, out = cache.acquire(), []
    for size in [MAX_CHUNK] * 5 + [1, 1, 7, 1, 3]:
        start = cache.length(slot)
        out.append(append(session, cache, slot, IDS[start : start + size]))
    cache.release(slot)
    return np.concatenate(out)


@pytest.mark.skipif(find_spec("onnxruntime_qnn") is None, reason="onnxruntime-qnn is not installed")
def test_qualcomms_compiler_takes_the_whole_float32_graph(folder: Path, tmp_path: Path) -> None:
    """Compiled for a Hexagon V75 and not run: no such device was ever here (docs/providers.md)."""
    export_static(folder, tmp_path, StaticForm.F32)
    program = f"""
import onnxruntime, onnxruntime_qnn
onnxruntime.register_execution_provider_library("qnn", onnxruntime_qnn.get_library_path())
devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name == "qnn"]
options = onnxruntime.SessionOptions()
options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
options.add_provider_for_devices(
    devices, {{"backend_path": onnxruntime_qnn.get_qnn_htp_path(), "htp_arch": "75", "soc_model": "57"}}
)
sizes = {{"rows": 1, "logit_rows": 1}}
for layer in range(3):
    sizes[f"past.{{layer}}"] = 256
for name in ("mask", "mask.40", "mask.23"):
    sizes[f"total.{{name}}"] = 257
for name, size in sizes.items():
    options.add_free_dimension_override_by_name(name, size)
for key, value in {{
    "session.disable_cpu_ep_fallback": "1",
    "ep.context_enable": "1",
    "ep.context_file_path": {str(tmp_path / "compiled.onnx")!r},
}}.items():
    options.add_session_config_entry(key, value)
onnxruntime.InferenceSession({str(tmp_path / STATIC_GRAPH)!r}, options)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [node.op_type for node in onnx.load(tmp_path / "compiled.onnx").graph.node] == ["EPContext"]
