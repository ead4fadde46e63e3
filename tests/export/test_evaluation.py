"""Quality figures: on the tiny model they follow their definitions, on the real one they keep the promise of the docs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edge_llm.engine.assembly import cache_geometry
from edge_llm.errors import ParameterError
from edge_llm.export.evaluation import Evaluation, _Totals, evaluate
from edge_llm.kernels.layout import KvType
from edge_llm.kernels.warmup import KernelLibrary
from edge_llm.model.manifest import ModelManifest
from edge_llm.text.tokenizer import Tokenizer

TEXT = Path(__file__).parents[2] / "tools" / "eval" / "english.txt"


def run(folder: Path, ids: list[int], kernels: KernelLibrary, window: int, kv_type: KvType = KvType.INT8) -> Evaluation:
    geometry = cache_geometry(ModelManifest.read(folder))
    return evaluate(
        folder, ids, kernels=kernels, geometry=geometry, kv_type=kv_type, threads=2, window=window, reference=True
    )


def test_totals_follow_the_definitions() -> None:
    generator = np.random.default_rng(5)
    ids = generator.integers(0, 20, 90)
    ours, reference = generator.normal(size=(2, 90, 20)).astype(np.float32)
    totals = _Totals()
    totals.add(ids[1:], ours[:-1], reference[:-1])
    result = totals.result(512, reference=True)
    p = np.exp(reference[:-1]) / np.exp(reference[:-1]).sum(1, keepdims=True)
    q = np.exp(ours[:-1]) / np.exp(ours[:-1]).sum(1, keepdims=True)
    assert result.tokens == 89
    assert result.kl == pytest.approx((p * np.log(p / q)).sum(1).mean(), rel=1e-5)
    assert result.perplexity == pytest.approx(np.exp(-np.log(q[np.arange(89), ids[1:]]).mean()), rel=1e-5)
    assert result.top1_agreement == pytest.approx((p.argmax(1) == q.argmax(1)).mean())


def test_a_tiny_model(tiny_folder: Path, kernels: KernelLibrary) -> None:
    ids = np.random.default_rng(1).integers(4, 300, 150).tolist()
    result = run(tiny_folder, ids, kernels, 64)
    assert result.tokens == 63 + 63 + 21
    assert result.kl is not None
    assert 0 < result.kl < 0.1
    assert result.reference_perplexity == pytest.approx(result.perplexity, rel=0.05)


@pytest.mark.parametrize(("count", "window"), [(1, 64), (0, 64), (100, 1), (100, 100_000)])
def test_what_cannot_be_measured(tiny_folder: Path, kernels: KernelLibrary, count: int, window: int) -> None:
    with pytest.raises(ParameterError):
        run(tiny_folder, [5] * count, kernels, window)


@pytest.mark.real_model
@pytest.mark.parametrize(("kv_type", "kl"), [(KvType.INT8, 0.0075), (KvType.F32, 0.006)], ids=["int8", "f32"])
def test_smollm2_keeps_its_quality(smollm2_folder: Path, kernels: KernelLibrary, kv_type: KvType, kl: float) -> None:
    """The bars of docs/quality.md, on the first two windows; the whole text is measured by `edge-llm eval`."""
    tokenizer = Tokenizer.from_file(smollm2_folder / "tokenizer.json")
    result = run(smollm2_folder, tokenizer.encode_raw(TEXT.read_text())[:1024], kernels, 512, kv_type)
    assert result.kl is not None
    assert result.top1_agreement is not None
    assert result.kl <= kl
    assert result.top1_agreement >= 0.94


@pytest.mark.real_model
def test_gemma3_keeps_its_quality(gemma3_folder: Path, kernels: KernelLibrary) -> None:
    """The bar of docs/quality.md, on one window that is longer than the local layers' of 512."""
    tokenizer = Tokenizer.from_file(gemma3_folder / "tokenizer.json")
    result = run(gemma3_folder, tokenizer.encode_raw(TEXT.read_text())[:640], kernels, 641)
    assert result.kl is not None
    assert result.top1_agreement is not None
    assert result.tokens == 640  # the first follows the beginning of the text
    assert result.kl <= 0.01
    assert result.top1_agreement >= 0.93
