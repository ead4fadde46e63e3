"""A graph of stock ops on ONNX Runtime's own CPU provider: the reference that quality is measured by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from edge_llm.model.ort_capi import forbid_telemetry


class StockSession:
    """input_ids int64 [rows] -> logits float32 [rows, vocab] of a graph without cache."""

    def __init__(self, graph: Path, *, threads: int) -> None:
        forbid_telemetry()
        import onnxruntime

        onnxruntime.disable_telemetry_events()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        self._session: Any = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])

    def logits(self, token_ids: np.ndarray) -> np.ndarray:
        """float32 [rows, vocab] for tokens at positions 0, 1, ..."""
        result: np.ndarray = self._session.run(["logits"], {"input_ids": np.asarray(token_ids, np.int64)})[0]
        return result
