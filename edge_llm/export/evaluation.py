"""Quality of an exported model on a text: perplexity, and how far its distributions are from the fp32 reference's.

The text is cut into windows of `window` tokens, each read from an empty context; in each, every token but the first is
predicted from those before it. The same ids are fed to both models (teacher forcing).
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edge_llm.cache.kv_cache import CacheGeometry, KVCache
from edge_llm.errors import ParameterError
from edge_llm.export.reference_graph import write_reference
from edge_llm.kernels.layout import KvType
from edge_llm.kernels.warmup import KernelLibrary
from edge_llm.model.manifest import ModelManifest
from edge_llm.model.session import Session
from edge_llm.model.step import Segment, Step
from edge_llm.model.stock_session import StockSession

Progress = Callable[[str, int, int], None]

_CHUNK = 64
"""rows compared at a time: float64 copies of a whole window's logits would take half a gigabyte"""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """`kl` is the mean of KL(reference || model) in nats a token; `top1_agreement` the share of tokens with equal argmax.

    Both, and `reference_perplexity`, are None where no reference was asked for.
    """

    perplexity: float
    tokens: int
    window: int
    reference_perplexity: float | None = None
    kl: float | None = None
    top1_agreement: float | None = None


def evaluate(
    folder: Path,
    token_ids: Sequence[int],
    *,
    kernels: KernelLibrary,
    geometry: CacheGeometry,
    kv_type: KvType,
    threads: int,
    window: int = 512,
    reference: bool = False,
    progress: Progress | None = None,
) -> Evaluation:
    """Evaluate the model in `folder` on `token_ids`. Raises `ParameterError` for fewer than two tokens or a bad window."""
    manifest = ModelManifest.read(folder)
    if not 2 <= window <= manifest.dimensions.context:
        raise ParameterError(
            f"window must be between 2 and the model's context of {manifest.dimensions.context}, not {window}"
        )
    windows = [np.asarray(token_ids[i : i + window], np.int64) for i in range(0, len(token_ids), window)]
    windows = [ids for ids in windows if len(ids) >= 2]
    if not windows:
        raise ParameterError("the text has fewer than two tokens", hint="give a longer text")
    with tempfile.TemporaryDirectory(prefix="edge-llm-reference-") as scratch:
        stock = (
            StockSession(write_reference(folder, Path(scratch), window=window), threads=threads) if reference else None
        )
        totals = _Totals()
        for done, (ids, logits) in enumerate(
            _ring_logits(folder, manifest, windows, kernels, geometry, kv_type, threads)
        ):
            totals.add(ids, logits, stock.logits(ids) if stock else None)
            if progress:
                progress("windows", done + 1, len(windows))
    return totals.result(window, reference)


def _ring_logits(
    folder: Path,
    manifest: ModelManifest,
    windows: list[np.ndarray],
    kernels: KernelLibrary,
    geometry: CacheGeometry,
    kv_type: KvType,
    threads: int,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    rows = max(len(ids) for ids in windows)
    cache = KVCache(geometry, slots=1, context=rows, kv_type=kv_type, max_chunk=rows)
    session = Session(
        folder, manifest, kernels=kernels, cache_descriptor=cache.descriptor_address, max_rows=rows, threads=threads
    )
    with session:
        slot = cache.acquire()
        assert slot is not None
        for ids in windows:
            yield ids, session.forward(Step((Segment(slot, 0, ids.tolist(), logit_rows=len(ids)),)))
    cache.close()


class _Totals:
    def __init__(self) -> None:
        self.tokens = self.agreements = 0
        self.loss = self.reference_loss = self.kl = 0.0

    def add(self, ids: np.ndarray, logits: np.ndarray, reference: np.ndarray | None) -> None:
        for first in range(0, len(ids) - 1, _CHUNK):
            rows = slice(first, min(first + _CHUNK, len(ids) - 1))
            self._add_rows(ids[1:][rows], logits[rows], None if reference is None else reference[rows])

    def _add_rows(self, targets: np.ndarray, logits: np.ndarray, reference: np.ndarray | None) -> None:
        ours = _log_softmax(logits)
        self.tokens += len(targets)
        self.loss -= float(ours[np.arange(len(targets)), targets].sum())
        if reference is None:
            return
        theirs = _log_softmax(reference)
        self.reference_loss -= float(theirs[np.arange(len(targets)), targets].sum())
        self.kl += float((np.exp(theirs) * (theirs - ours)).sum())
        self.agreements += int((ours.argmax(axis=1) == theirs.argmax(axis=1)).sum())

    def result(self, window: int, reference: bool) -> Evaluation:
        perplexity = math.exp(self.loss / self.tokens)
        if not reference:
            return Evaluation(perplexity, self.tokens, window)
        return Evaluation(
            perplexity=perplexity,
            tokens=self.tokens,
            window=window,
            reference_perplexity=math.exp(self.reference_loss / self.tokens),
            kl=self.kl / self.tokens,
            top1_agreement=self.agreements / self.tokens,
        )


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    """Natural logarithms of the softmax of each row, float64."""
    values = logits.astype(np.float64)
    values -= values.max(axis=1, keepdims=True)
    result: np.ndarray = values - np.log(np.exp(values).sum(axis=1, keepdims=True))
    return result
