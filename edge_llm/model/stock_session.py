"""Graphs of stock ops on ONNX Runtime's own CPU provider: the reference that quality is measured by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from edge_llm.model.ort_capi import forbid_telemetry

BODY_NAME = "reference.onnx"
HEAD_NAME = "reference_head.onnx"


class StockSession:
    """Token ids to logits without a cache. The output matrix is a graph of its own: a large vocabulary takes room."""

    def __init__(self, folder: Path, *, threads: int) -> None:
        """`folder` is what `export.reference_graph` has written."""
        forbid_telemetry()
        import onnxruntime

        onnxruntime.disable_telemetry_events()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        options.add_session_config_entry("session.disable_prepacking", "1")  # it would copy what is mapped
        self._body, self._head = (
            onnxruntime.InferenceSession(str(folder / name), options, providers=["CPUExecutionProvider"])
            for name in (BODY_NAME, HEAD_NAME)
        )

    def hidden_states(self, token_ids: np.ndarray) -> np.ndarray:
        """float32 [rows, hidden], after the final norm, for tokens at positions 0, 1, ..."""
        return _run(self._body, np.asarray(token_ids, np.int64))

    def head(self, hidden: np.ndarray) -> np.ndarray:
        """float32 [rows, vocab], the logits of such rows."""
        return _run(self._head, hidden)

    def logits(self, token_ids: np.ndarray) -> np.ndarray:
        """float32 [rows, vocab] for tokens at positions 0, 1, ..."""
        return self.head(self.hidden_states(token_ids))


def _run(session: Any, values: np.ndarray) -> np.ndarray:
    """The one output of a graph with one input."""
    result: np.ndarray = session.run(None, {session.get_inputs()[0].name: values})[0]
    return result
