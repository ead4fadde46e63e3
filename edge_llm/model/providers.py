"""Execution providers: a graph of stock ops on ONNX Runtime's own CPU code, or on the device of a plugin.

What a provider computes is tested by whoever opens it (static_session.self_test).
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import math
import os
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edge_llm.errors import SessionError
from edge_llm.model.digest_index import DigestIndex
from edge_llm.model.manifest import FileSpec
from edge_llm.model.plugins import (
    PLUGINS,
    Plugin,
    compiled_folder,
    find_device,
    first_line,
    given_options,
    plain_options,
    python_onnxruntime,
    session_options,
)
from edge_llm.model.static_folder import STATIC_GRAPH
from edge_llm.model.verify import FileState, check_files, file_spec

_BUCKETS = (1, 32)
"""tokens of a run: compilers of plugins want to know"""
_CONTEXT = "compiled.onnx"
_DIGESTS = "digests.json"
"""size and sha256 of each file beside it: what a compiler has made is native code"""
_PROBE = (
    b'\x08\n:9\n\x0e\n\x01x\n\x01x\x12\x01y"\x03Add\x12\x05probeZ\x0f\n\x01x\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x08'
    b"b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x08B\x04\n\x00\x10\x15"
)
"""a model of one node, y = x + x of eight float32: what `onnx` writes, which has no business here"""


def provider_state(name: str) -> str:
    """What a plugin computes on here, in words, after it has added two numbers there.

    Raises `SessionError`, saying in words why it cannot: it is never said of a device that the CPU stood in for.
    """
    plugin = PLUGINS[name]
    device = find_device(plugin)
    ones = np.ones(8, np.float32)
    (result,) = _run(_session(_PROBE, session_options(plugin, device, 1)), ["y"], {"x": ones}).values()
    if not np.allclose(result, ones + ones, rtol=1e-3):  # Hexagon says 2.0000002
        raise SessionError(f"{name} gives wrong results on its {plugin.device}")
    facts = device.ep_metadata
    return f"{device.ep_name} {facts.get('version', '')} on {facts.get('FULL_DEVICE_NAME', plugin.device)}"


def open_graph(name: str, static_folder: Path, *, threads: int, held: Mapping[str, int]) -> CpuGraph | PluginGraph:
    """The graph of a static folder on a provider; `held` are the sizes of a full cache (static_session.held_sizes).

    Raises `SessionError`, saying in words why it cannot be.
    """
    if name == "cpu":
        return CpuGraph(static_folder / STATIC_GRAPH, threads=threads)
    return PluginGraph(PLUGINS[name], static_folder, threads=threads, held=held)


class CpuGraph:
    """The graph on ONNX Runtime's own CPU provider, which takes steps of any size."""

    def __init__(self, graph: Path, *, threads: int, optimised: bool = True) -> None:
        """Without `optimised`, every node is computed as it is written: in float32. Raises `SessionError`."""
        options = plain_options(threads)
        options.enable_mem_pattern = False  # shapes differ from step to step
        if not optimised:
            options.graph_optimization_level = python_onnxruntime().GraphOptimizationLevel.ORT_DISABLE_ALL
        self._session = _session(graph, options, providers=["CPUExecutionProvider"])
        self._inputs, self._outputs = _names(self._session)

    def sizes(self, rows: int) -> tuple[int, int]:
        """(tokens of the next run, tokens that it must be filled up to)."""
        return rows, rows

    def allocate(self, shape: tuple[int, ...]) -> np.ndarray:
        """float32 zeros in memory that needs no copy."""
        return np.zeros(shape, np.float32)

    def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Outputs by name. Raises `SessionError`."""
        outputs = _run(self._session, self._outputs, {name: inputs[name] for name in self._inputs})
        return _picked(outputs, inputs, self._inputs)

    def close(self) -> None:
        """Free the graph."""
        self._session = None


class PluginGraph:
    """The graph on a plugin's device: compiled once for each number of tokens in _BUCKETS, and all of it or nothing."""

    def __init__(self, plugin: Plugin, static_folder: Path, *, threads: int, held: Mapping[str, int]) -> None:
        """Raises `SessionError` if the plugin or its device is not there, or cannot run the whole graph."""
        self._plugin, self._device, self._threads = plugin, find_device(plugin), threads
        self._sessions = {rows: self._open(static_folder, rows, held) for rows in _BUCKETS}
        session = self._sessions[1]
        self._inputs, self._outputs = _names(session)
        self._memory = session.get_input_memory_infos()[self._inputs.index("past_k.0")]
        self._values: dict[int, Any] = {}

    def _open(self, static_folder: Path, rows: int, held: Mapping[str, int]) -> Any:
        """The session for runs of `rows` tokens, from what was compiled before if that is there."""
        plugin, device = self._plugin, self._device
        keep = compiled_folder(plugin, device, static_folder, [self._threads, dict(held) if plugin.fixed else {}])
        given = given_options(plugin, self._threads, keep)
        kept = keep / str(rows) if plugin.contexts and keep is not None else None
        if kept is not None and _is_whole(kept):
            return _session(kept / _CONTEXT, session_options(plugin, device, self._threads, given))
        sizes = fixed_sizes(rows, held) if plugin.fixed else {"rows": rows, **({"logit_rows": 1} if rows == 1 else {})}

        def options() -> Any:
            made = session_options(plugin, device, self._threads, given)
            for name, size in sizes.items():
                made.add_free_dimension_override_by_name(name, size)
            return made

        graph, first = static_folder / STATIC_GRAPH, options()
        try:
            return _session(graph, first) if kept is None else _session_and_context(graph, first, kept)
        except SessionError as error:
            if left := _left_to_the_cpu(graph, options()):
                raise SessionError(f"{plugin.name} does not take the whole graph: {left} would be the CPU's") from error
            raise

    def sizes(self, rows: int) -> tuple[int, int]:
        """(tokens of the next run, tokens that it must be filled up to)."""
        count = min(rows, _BUCKETS[-1])
        return count, next(bucket for bucket in _BUCKETS if bucket >= count)

    def allocate(self, shape: tuple[int, ...]) -> np.ndarray:
        """float32 zeros in memory that the device reads where it lies. Raises `SessionError`."""
        if self._memory.name == "Cpu":  # the host's own
            return np.zeros(shape, np.float32)
        try:
            value = python_onnxruntime().OrtValue.ortvalue_from_shape_and_type(
                list(shape), np.float32, memory_info=self._memory
            )
        except Exception as error:
            raise SessionError(f"the device has no memory for {shape}: {first_line(error)}") from error
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
                name: self._values.get(inputs[name].__array_interface__["data"][0]) or value_of(inputs[name])
                for name in self._inputs
            }
            results = session.run_with_ort_values(self._outputs, values)
            outputs = {name: result.numpy() for name, result in zip(self._outputs, results, strict=True)}
        except Exception as error:
            raise SessionError(f"ONNX Runtime failed in a step: {first_line(error)}") from error
        return _picked(outputs, inputs, self._inputs)

    def close(self) -> None:
        """Free the graphs; what was allocated lives as long as its arrays."""
        self._sessions.clear()


def fixed_sizes(rows: int, held: Mapping[str, int]) -> dict[str, int]:
    """Every open size of a graph for runs of `rows` tokens over a cache with these sizes (static_session.held_sizes)."""
    return {"rows": rows, **{name: size + (rows if name.startswith("total") else 0) for name, size in held.items()}}


def _session_and_context(graph: Path, options: Any, kept: Path) -> Any:
    """A session of the graph; what is compiled for it goes to the new folder `kept`, at once or not at all."""
    try:
        made = Path(tempfile.mkdtemp(prefix=".partial-", dir=kept.parent))
    except OSError:
        return _session(graph, options)
    options.add_session_config_entry("ep.context_enable", "1")
    options.add_session_config_entry("ep.context_file_path", str(made / _CONTEXT))
    try:
        session = _session(graph, options)
        with contextlib.suppress(OSError):  # another process was quicker
            specs = {path.name: dataclasses.asdict(file_spec(path)) for path in made.iterdir()}
            (made / _DIGESTS).write_text(json.dumps(specs), "utf-8")
            shutil.rmtree(kept, ignore_errors=True)
            os.rename(made, kept)
        return session
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _is_whole(kept: Path) -> bool:
    """Whether a folder holds what was compiled, and all of it is as it was written."""
    try:
        raw = json.loads((kept / _DIGESTS).read_text("utf-8"))
        specs = {str(name): FileSpec(**spec) for name, spec in raw.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return False
    states = check_files(kept, specs, known=DigestIndex())
    return _CONTEXT in states and all(state is FileState.OK for state in states.values())


def _left_to_the_cpu(graph: Path, options: Any) -> str:
    """Nodes that the plugin would leave to the CPU, in words; empty if that is not why it refused the graph."""
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "0")
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    try:
        parts = _session(graph, options).get_provider_graph_assignment_info()
    except SessionError:
        return ""
    left = Counter(
        node.op_type for part in parts if part.ep_name == "CPUExecutionProvider" for node in part.get_nodes()
    )
    return ", ".join(f"{count} {op}" for op, count in left.most_common())


def _names(session: Any) -> tuple[list[str], list[str]]:
    """Of a session's inputs and of its outputs."""
    return [value.name for value in session.get_inputs()], [value.name for value in session.get_outputs()]


def _picked(outputs: dict[str, np.ndarray], inputs: dict[str, np.ndarray], taken: list[str]) -> dict[str, np.ndarray]:
    """The outputs with the logits of the wanted rows, where the graph has not picked them itself."""
    if "logit_rows" not in taken:
        outputs["logits"] = outputs["logits"][inputs["logit_rows"]]
    return outputs


def _session(graph: Path | bytes, options: Any, **arguments: Any) -> Any:
    try:
        return python_onnxruntime().InferenceSession(
            graph if isinstance(graph, bytes) else str(graph), options, **arguments
        )
    except Exception as error:  # its binding raises kinds of its own
        raise SessionError(f"ONNX Runtime refused the graph: {first_line(error)}") from error


def _run(session: Any, outputs: list[str], inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    try:
        return dict(zip(outputs, session.run(outputs, inputs), strict=True))
    except Exception as error:
        raise SessionError(f"ONNX Runtime failed in a step: {first_line(error)}") from error
