"""Quality of an exported model on a text: perplexity, and how far its distributions are from the fp32 reference's.

The text is cut into windows of `window` tokens, each read from an empty context, after the first token (BOS) of models
that want one; in each, every token but the first is predicted from those before it. The same ids are fed to both models
(teacher forcing).
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from edge_llm.cache.kv_cache import CacheGeometry, KVCache
from edge_llm.cache.plain_rows import PlainRows
from edge_llm.errors import ParameterError
from edge_llm.export.reference_graph import write_reference
from edge_llm.export.static_export import static_form
from edge_llm.kernels.layout import KvType
from edge_llm.kernels.warmup import KernelLibrary
from edge_llm.model.manifest import ModelManifest
from edge_llm.model.plugins import form_for, needs_fixed_sizes
from edge_llm.model.providers import open_graph
from edge_llm.model.session import Session
from edge_llm.model.static_session import StaticSession, held_sizes
from edge_llm.model.step import Segment, Step
from edge_llm.model.stock_session import StockSession

Progress = Callable[[str, int, int], None]

_CHUNK_ROWS = 64
"""rows of logits at a time: those of a whole window of a large vocabulary would take gigabytes"""
_COMPARED_LOGITS = 1 << 22
"""of these at a time, in float64"""


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
    provider: str | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Evaluate the model in `folder` on `token_ids`: in the ring layout, or in the static one on `provider`.

    Raises `ParameterError` for fewer than two tokens or a bad window.
    """
    manifest = ModelManifest.read(folder)
    if not 2 <= window <= manifest.dimensions.context:
        raise ParameterError(
            f"window must be between 2 and the model's context of {manifest.dimensions.context}, not {window}"
        )
    bos = [manifest.tokens.bos] if manifest.tokens.add_bos else []
    taken = window - len(bos)
    windows = [np.array([*bos, *token_ids[i : i + taken]], np.int64) for i in range(0, len(token_ids), taken)]
    windows = [ids for ids in windows if len(ids) >= 2]
    if not windows:
        raise ParameterError("the text has fewer than two tokens", hint="give a longer text")
    with tempfile.TemporaryDirectory(prefix="edge-llm-reference-") as scratch:
        stock = (
            StockSession(write_reference(folder, Path(scratch), window=window), threads=threads) if reference else None
        )
        totals, done = _Totals(), 0
        context = max(len(ids) for ids in windows)
        chunk = min(context, _CHUNK_ROWS)
        if provider is None:
            cache = KVCache(geometry, slots=1, context=context, kv_type=kv_type, max_chunk=chunk)
            session: Session | StaticSession = Session(
                folder,
                manifest,
                kernels=kernels,
                cache_descriptor=cache.descriptor_address,
                max_rows=chunk,
                threads=threads,
            )
        else:
            storage = partial(PlainRows, whole=needs_fixed_sizes(provider))
            cache = KVCache(geometry, slots=1, context=context, kv_type=KvType.F32, max_chunk=chunk, storage=storage)
            form = static_form(folder, manifest, form_for(provider))
            graph = open_graph(provider, form, threads=threads, held=held_sizes(manifest, cache))
            session = StaticSession(folder, form, manifest, graph=graph, cache=cache, max_rows=chunk)
        for ids, first, logits in _logits(session, cache, windows, chunk):
            if first == 0:
                hidden = stock.hidden_states(ids) if stock else None
                done += 1
                if progress:
                    progress("windows", done, len(windows))
            targets = ids[first + 1 : first + 1 + len(logits)]
            rows = slice(first, first + len(targets))
            theirs = None if stock is None or hidden is None else stock.head(hidden[rows])
            totals.add(targets, logits[: len(targets)], theirs)
    return totals.result(window, reference)


def _logits(
    session: Session | StaticSession, cache: KVCache, windows: list[np.ndarray], rows: int
) -> Iterator[tuple[np.ndarray, int, np.ndarray]]:
    """(ids of a window, first row, logits of some rows from there on), window by window; then both are closed."""
    with contextlib.closing(cache), contextlib.closing(session):
        for ids in windows:
            slot = cache.acquire()
            assert slot is not None
            for first in range(0, len(ids), rows):
                chunk = ids[first : first + rows].tolist()
                yield ids, first, session.forward(Step((Segment(slot, first, chunk, logit_rows=len(chunk)),)))
                cache.commit(slot, len(chunk))
            cache.release(slot)


class _Totals:
    def __init__(self) -> None:
        self.tokens = self.agreements = 0
        self.loss = self.reference_loss = self.kl = 0.0

    def add(self, targets: np.ndarray, logits: np.ndarray, reference: np.ndarray | None) -> None:
        """Count rows of logits, each with the id that follows."""
        step = max(1, _COMPARED_LOGITS // logits.shape[1])
        for first in range(0, len(targets), step):
            rows = slice(first, first + step)
            self._add_rows(targets[rows], logits[rows], None if reference is None else reference[rows])

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
