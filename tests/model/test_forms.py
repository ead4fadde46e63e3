"""Every form in which weights are stored, through the session: the embedding, the products and the head of a tiny model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edge_llm.export.reference_graph import write_reference
from edge_llm.kernels.layout import KvType
from edge_llm.kernels.warmup import KernelLibrary
from edge_llm.model.step import Segment, Step
from edge_llm.model.stock_session import StockSession
from tests.conftest import export
from tests.model.test_session import opened, taken
from tools.tiny_model import write_tiny_gguf

KINDS = ("Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL")
SIZES = {"hidden": 256, "intermediate": 512, "heads": 4, "kv_heads": 2, "head_dim": 64}
CHUNKS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 24, 25, 49, 61)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_one_type(tmp_path: Path, kernels: KernelLibrary, kind: str) -> None:
    """Near its reference in stock ops, and in any number of rows with the bits of one row at a time."""
    (tmp_path / "tiny").mkdir()
    source = write_tiny_gguf(tmp_path / "tiny" / "tiny.gguf", matrix_type=kind, head_type=kind, **SIZES)
    folder = export(source, tmp_path / "tiny" / "exported")
    ids = np.random.default_rng(3).integers(4, 300, sum(CHUNKS)).tolist()
    expected = StockSession(write_reference(folder, tmp_path, window=len(ids)), threads=1).logits(np.array(ids))
    with opened(folder, kernels, kv_type=KvType.F32) as (session, cache), taken(cache, 2) as slots:
        ways = []
        for slot, chunks in zip(slots, ([1] * len(ids), CHUNKS), strict=True):
            rows = []
            for size in chunks:
                start = cache.length(slot)
                silent = size == 3  # no logits wanted: the head has no rows
                part = Segment(slot, start, ids[start : start + size], 0 if silent else size)
                logits = session.forward(Step((part,)))
                assert logits.shape == (part.logit_rows, 331)
                rows.append(np.full((size, 331), np.nan, np.float32) if silent else logits.copy())
                cache.commit(slot, size)
            ways.append(np.concatenate(rows))
    alone, chunked = ways
    shown = ~np.isnan(chunked[:, 0])
    assert (~shown).sum() == 3
    assert np.array_equal(chunked[shown], alone[shown])
    error = np.linalg.norm(alone - expected) / np.linalg.norm(expected)
    assert error < 0.05
    assert (alone.argmax(1) == expected.argmax(1)).mean() > 0.85
