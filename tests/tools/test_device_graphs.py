"""Graphs with fixed sizes run as they stand on the CPU provider, to the numbers of the master form."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from edge_llm.export.device_rules import RULES
from edge_llm.export.static_graph import write_static
from edge_llm.model.static_folder import STATIC_GRAPH, StaticForm
from tools.device_graphs import divergence, write_device_graphs


@pytest.mark.parametrize("form", RULES)
def test_every_size_is_fixed_and_every_number_the_masters(tiny_folder: Path, tmp_path: Path, form: StaticForm) -> None:
    write_static(tiny_folder, tmp_path)
    target = tmp_path / "device"
    target.mkdir()
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    master = onnxruntime.InferenceSession(str(tmp_path / STATIC_GRAPH), options, providers=["CPUExecutionProvider"])
    graphs = write_device_graphs(tiny_folder, target, form, 200, [1, 8])
    assert [graph.name for graph in graphs] == ["rows-1.onnx", "rows-8.onnx"]
    for graph, rows in zip(graphs, (1, 8), strict=True):
        session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
        draws = np.random.default_rng(rows)
        inputs = {value.name: draws.standard_normal(value.shape).astype(np.float32) for value in session.get_inputs()}
        assert inputs["embedded"].shape == (rows, 64)
        wanted = {**inputs, "logit_rows": np.arange(rows, dtype=np.int32)}
        for name in ("logits", "hidden", "new_k", "new_v"):
            (found,), (expected,) = session.run([name], inputs), master.run([name], wanted)
            np.testing.assert_allclose(found, expected, atol=2e-5)
    assert divergence(tiny_folder, target) < 1e-9
