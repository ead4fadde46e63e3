"""Execution providers: a graph of stock ops on ONNX Runtime's own CPU code, or on a plugin's device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from edge_llm.errors import SessionError
from edge_llm.model.ort_capi import forbid_telemetry
from edge_llm.model.static_folder import STATIC_GRAPH


def open_graph(name: str, static_folder: Path, *, threads: int) -> tuple[CpuGraph, str]:
    """The graph of a static folder on a provider, and what that is called with its device.

    Raises `SessionError`, saying in words why it cannot be.
    """
    return CpuGraph(static_folder / STATIC_GRAPH, threads=threads), "cpu"


class CpuGraph:
    """The graph on ONNX Runtime's own CPU provider, which takes steps of any size."""

    def __init__(self, graph: Path, *, threads: int, optimised: bool = True) -> None:
        """Without `optimised`, every node is computed as it is written: in float32. Raises `SessionError`."""
        onnxruntime = python_onnxruntime()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        options.enable_mem_pattern = False  # shapes differ from step to step
        if not optimised:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        try:
            self._session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # its binding raises kinds of its own
            raise SessionError(f"ONNX Runtime refused the graph: {error}") from error
        self._outputs = [output.name for output in self._session.get_outputs()]

    def sizes(self, rows: int) -> tuple[int, int]:
        """(tokens of the next run, tokens that it must be filled up to)."""
        return rows, rows

    def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Outputs by name. Raises `SessionError`."""
        try:
            return dict(zip(self._outputs, self._session.run(None, inputs), strict=True))
        except Exception as error:
            raise SessionError(f"ONNX Runtime failed in a step: {error}") from error

    def close(self) -> None:
        """Free the graph."""
        self._session = None


def python_onnxruntime() -> Any:
    """ONNX Runtime's Python package, which only this layout imports."""
    forbid_telemetry()
    import onnxruntime

    onnxruntime.disable_telemetry_events()
    return onnxruntime
