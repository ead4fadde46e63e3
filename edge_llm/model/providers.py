"""Execution providers: a graph of stock ops on ONNX Runtime's own CPU code, or on a device of a plugin.

A provider counts as there if its plugin lists a device of ours by name, never because ONNX Runtime's policies would take
some other instead of it. What it computes is tested by whoever opens it (static_session.self_test).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import shutil
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from edge_llm import paths
from edge_llm.errors import SessionError, StorageError
from edge_llm.model.ort_capi import forbid_telemetry
from edge_llm.model.static_folder import STATIC_GRAPH


@dataclass(frozen=True, slots=True)
class Plugin:
    """A provider that comes as a package of its own, and the one of its devices that is used."""

    name: str
    package: str
    requirement: str
    metadata: Mapping[str, str]
    """what tells the device from others of the plugin"""


PLUGINS = {
    "openvino": Plugin(
        name="openvino", package="onnxruntime_ep_openvino", requirement="edge-llm[npu]", metadata={"ov_device": "CPU"}
    )
}
_BUCKETS = (1, 32)
"""tokens of a run: compilers of plugins want to know"""
_PROBE = (
    b'\x08\n:9\n\x0e\n\x01x\n\x01x\x12\x01y"\x03Add\x12\x05probeZ\x0f\n\x01x\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x08'
    b"b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x08B\x04\n\x00\x10\x15"
)
"""a model of one node, y = x + x of eight float32: what `onnx` writes, which has no business here"""
_KEPT = 4
"""folders of compiled graphs, of any model, provider and version, the last used"""
_registered: set[str] = set()
_lock = threading.Lock()


def provider_state(name: str) -> str:
    """What a plugin computes on here, in words, after it has added two numbers there.

    Raises `SessionError`, saying in words why it cannot: it is never said of a device that the CPU stood in for.
    """
    device = _device(PLUGINS[name])
    options = _options(1)
    options.add_provider_for_devices([device], {})
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    ones = np.ones(8, np.float32)
    (result,) = _run(_session(_PROBE, options), ["y"], {"x": ones}).values()
    if not np.array_equal(result, ones + ones):
        raise SessionError(f"{name} gives wrong results on {device.ep_name}")
    facts = device.ep_metadata
    return f"{device.ep_name} {facts.get('version', '')} on {facts.get('FULL_DEVICE_NAME', device.device.type.name)}"


def open_graph(name: str, static_folder: Path, *, threads: int) -> CpuGraph | PluginGraph:
    """The graph of a static folder on a provider. Raises `SessionError`, saying in words why it cannot be."""
    if name == "cpu":
        return CpuGraph(static_folder / STATIC_GRAPH, threads=threads)
    return PluginGraph(PLUGINS[name], static_folder, threads=threads)


class CpuGraph:
    """The graph on ONNX Runtime's own CPU provider, which takes steps of any size."""

    def __init__(self, graph: Path, *, threads: int, optimised: bool = True) -> None:
        """Without `optimised`, every node is computed as it is written: in float32. Raises `SessionError`."""
        options = _options(threads)
        options.enable_mem_pattern = False  # shapes differ from step to step
        if not optimised:
            options.graph_optimization_level = python_onnxruntime().GraphOptimizationLevel.ORT_DISABLE_ALL
        self._session = _session(graph, options, providers=["CPUExecutionProvider"])
        self._outputs = [output.name for output in self._session.get_outputs()]

    def sizes(self, rows: int) -> tuple[int, int]:
        """(tokens of the next run, tokens that it must be filled up to)."""
        return rows, rows

    def allocate(self, shape: tuple[int, ...]) -> np.ndarray:
        """float32 zeros in memory that needs no copy."""
        return np.zeros(shape, np.float32)

    def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Outputs by name. Raises `SessionError`."""
        return _run(self._session, self._outputs, inputs)

    def close(self) -> None:
        """Free the graph."""
        self._session = None


class PluginGraph:
    """The graph on a plugin's device: compiled once for each number of tokens in _BUCKETS, and all of it or nothing."""

    def __init__(self, plugin: Plugin, static_folder: Path, *, threads: int) -> None:
        """Raises `SessionError` if the plugin or its device is not there, or cannot run the whole graph."""
        device = _device(plugin)
        self._sessions = {}
        for rows in _BUCKETS:
            options = _options(threads)
            options.add_provider_for_devices([device], _device_options(plugin, device, static_folder, threads))
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
            options.add_free_dimension_override_by_name("rows", rows)
            if rows == 1:
                options.add_free_dimension_override_by_name("logit_rows", 1)
            self._sessions[rows] = _session(static_folder / STATIC_GRAPH, options)
        session = self._sessions[1]
        self._outputs = [output.name for output in session.get_outputs()]
        past = [value.name for value in session.get_inputs()].index("past_k.0")
        self._memory = session.get_input_memory_infos()[past]
        self._values: dict[int, Any] = {}

    def sizes(self, rows: int) -> tuple[int, int]:
        """(tokens of the next run, tokens that it must be filled up to)."""
        count = min(rows, _BUCKETS[-1])
        return count, next(bucket for bucket in _BUCKETS if bucket >= count)

    def allocate(self, shape: tuple[int, ...]) -> np.ndarray:
        """float32 zeros in memory that the device reads where it lies. Raises `SessionError`."""
        try:
            value = python_onnxruntime().OrtValue.ortvalue_from_shape_and_type(
                list(shape), np.float32, memory_info=self._memory
            )
        except Exception as error:
            raise SessionError(f"the device has no memory for {shape}: {_first_line(error)}") from error
        address = value.data_ptr()
        buffer: Any = (ctypes.c_uint8 * (4 * math.prod(shape))).from_address(address)
        self._values[address] = value
        weakref.finalize(buffer, self._values.pop, address)  # the array and its views hold the buffer
        array: np.ndarray = np.frombuffer(buffer, np.float32).reshape(shape)
        array[...] = 0
        return array

    def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Outputs by name; an input that `allocate` gave is not copied. Raises `SessionError`."""
        session, value_of = self._sessions[len(inputs["embedded"])], python_onnxruntime().OrtValue.ortvalue_from_numpy
        try:
            values = {
                name: self._values.get(array.__array_interface__["data"][0]) or value_of(array)
                for name, array in inputs.items()
            }
            results = session.run_with_ort_values(self._outputs, values)
            return {name: result.numpy() for name, result in zip(self._outputs, results, strict=True)}
        except Exception as error:
            raise SessionError(f"ONNX Runtime failed in a step: {_first_line(error)}") from error

    def close(self) -> None:
        """Free the graphs; what was allocated lives as long as its arrays."""
        self._sessions.clear()


def python_onnxruntime() -> Any:
    """ONNX Runtime's Python package, which only this layout imports."""
    forbid_telemetry()
    import onnxruntime

    onnxruntime.disable_telemetry_events()
    return onnxruntime


def _options(threads: int) -> Any:
    options = python_onnxruntime().SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return options


def _session(graph: Path | bytes, options: Any, **arguments: Any) -> Any:
    try:
        return python_onnxruntime().InferenceSession(
            graph if isinstance(graph, bytes) else str(graph), options, **arguments
        )
    except Exception as error:  # its binding raises kinds of its own
        raise SessionError(f"ONNX Runtime refused the graph: {_first_line(error)}") from error


def _run(session: Any, outputs: list[str], inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    try:
        return dict(zip(outputs, session.run(outputs, inputs), strict=True))
    except Exception as error:
        raise SessionError(f"ONNX Runtime failed in a step: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _device(plugin: Plugin) -> Any:
    """The plugin's device. Its library is registered once a process: a second time would double its devices."""
    if find_spec(plugin.package) is None:
        raise SessionError(f"{plugin.name} is not installed", hint=f"pip install '{plugin.requirement}'")
    onnxruntime = python_onnxruntime()
    try:
        package = import_module(plugin.package)
        with _lock:
            if plugin.name not in _registered:
                onnxruntime.register_execution_provider_library(f"edge_llm_{plugin.name}", package.get_library_path())
                _registered.add(plugin.name)
        wanted = package.get_ep_name()
        for device in onnxruntime.get_ep_devices():
            if device.ep_name == wanted and plugin.metadata.items() <= device.ep_metadata.items():
                return device
    except Exception as error:  # a library for another system, another version of ONNX Runtime, ...
        raise SessionError(f"{plugin.name} does not load: {_first_line(error)}") from error
    raise SessionError(f"{plugin.name} has no device here that is used")


def _device_options(plugin: Plugin, device: Any, static_folder: Path, threads: int) -> dict[str, str]:
    """OpenVINO's: float32 as the graph says, our threads, and a folder for what it compiles, named by all that shapes it."""
    settings = {"INFERENCE_NUM_THREADS": str(threads), "INFERENCE_PRECISION_HINT": "f32"}
    version = device.ep_metadata.get("version", "unknown").replace("/", "_")
    with contextlib.suppress(StorageError):  # compiled anew each time, then
        root = paths.private_dir(paths.private_dir(paths.cache_dir()) / "providers")
        folder = paths.private_dir(root / f"{plugin.name}-{static_folder.name}-{version}-{threads}")
        settings["CACHE_DIR"] = str(folder)
        with contextlib.suppress(OSError):
            os.utime(folder)
            for old in sorted(root.iterdir(), key=lambda path: path.stat().st_mtime)[:-_KEPT]:
                shutil.rmtree(old, ignore_errors=True)
    return {"load_config": json.dumps({plugin.metadata["ov_device"]: settings})}


def forget_compiled(name: str, static_folder: Path) -> bool:
    """Drop what a provider has compiled of this folder's graph; whether there was anything."""
    found = list((paths.cache_dir() / "providers").glob(f"{name}-{static_folder.name}-*"))
    for folder in found:
        shutil.rmtree(folder, ignore_errors=True)
    return bool(found)
