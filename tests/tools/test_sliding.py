"""The measurement of sliding, on a model for which both readings must agree."""

from __future__ import annotations

from argparse import Namespace

import numpy as np
import pytest

from edge_llm.kernels.layout import KvType
from edge_llm.kernels.warmup import KernelLibrary
from edge_llm.model.manifest import ModelManifest
from edge_llm.sampling.decoders import SampledDecoder
from edge_llm.sampling.params import SamplingParams
from edge_llm.sampling.sampler import Sampler
from tests.conftest import export
from tools.eval.sliding import CHUNK, Model, Reader, distinct, judged, measure_reading
from tools.tiny_model import write_tiny_gguf

CONTEXT, VOCAB = 160, 331


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, kernels: KernelLibrary) -> Model:
    """One layer: its keys and values know nothing of other tokens, so that a window read anew is the sliding one."""
    folder = tmp_path_factory.mktemp("one-layer")
    folder = export(write_tiny_gguf(folder / "tiny.gguf", layers=1), folder / "exported")
    return Model(folder, ModelManifest.read(folder), kernels, KvType.F32)


def test_both_readings_agree_where_they_must(model: Model) -> None:
    ids = np.random.default_rng(0).integers(3, VOCAB, 900).tolist()
    sinks = {"sliding": 64, "without sinks": 0, "fresh": 64}
    readers = {name: Reader(model, context=CONTEXT, sinks=kept) for name, kept in sinks.items()}
    result = measure_reading(readers, ids, Namespace(last=400, every=10, context=CONTEXT))
    anew = result["recomputed"]["at the places"]
    assert result["sliding"]["at the places"] == pytest.approx(anew, rel=0.002)
    assert result["without sinks"]["at the places"] != pytest.approx(anew, rel=0.002)
    whole = Reader(model, context=1024, sinks=0).losses(ids, 400)
    assert len(whole) == 400
    assert result["sliding"]["of all"] != pytest.approx(float(np.exp(whole.mean())), rel=1e-6)


def test_an_answer_is_given_and_forgotten(model: Model) -> None:
    reader = Reader(model, context=CONTEXT, sinks=64)
    ids = np.random.default_rng(1).integers(3, VOCAB, 500).tolist()
    reader.read(ids)
    decoders = (
        SampledDecoder(Sampler(model.kernels, VOCAB).sequence(SamplingParams(seed=3).with_defaults({}))) for _ in "ab"
    )
    first, again = (reader.answer([5, 6, 7], decoder, ()) for decoder in decoders)
    assert first == again
    assert len(first) == CHUNK - 3
    figures = judged(Reader(model, context=CONTEXT, sinks=64), [[5, 6, 7]], [first[:90]])
    assert 1 < figures["perplexity"] < 1000
    assert distinct([1, 2, 3, 4] * 5) == 4 / 17
