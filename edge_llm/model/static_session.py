"""StaticSession: steps by a graph of stock ops on any execution provider. The same `forward(step)` as the ring's Session.

Segments run one after another, in pieces; the host writes the new keys and values into the cache, and says by masks which
rows are whose. Sessions of this layout keep less of the promise than the ring's: a row does not depend on other sequences,
but where a piece ends moves the last bits of its logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np

from edge_llm.errors import SessionError
from edge_llm.model.manifest import ModelManifest
from edge_llm.model.rope import rope_rows
from edge_llm.model.static_folder import GOLDEN_NAME, EmbeddingTable, StaticManifest
from edge_llm.model.step import Segment, Step

GOLDEN_IDS = (1, 5, 9, 3, 7, 11, 2, 13, 4)
"""what the golden logits follow: ids that every vocabulary has"""
_MOST_DIVERGENCE = 0.1
"""KL(golden || found), nats: 8-bit activations cost some hundredths on a bad day, a wrong graph many times as much"""

MASKED = np.float32(-1e4)
"""finite in float16 as well; softmax makes it 0"""


class Ring(Protocol):
    """Where the row of a position lies (cache.ring_geometry)."""

    @property
    def sinks(self) -> int: ...
    @property
    def ring_rows(self) -> int: ...
    @property
    def window(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    def physical_row(self, position: int) -> int: ...


class LayerRows(Protocol):
    """The rows of one layer (cache.plain_rows)."""

    @property
    def ring(self) -> Ring: ...
    def reserve(self, slot: int, rows: int) -> None: ...
    def rows(self, slot: int) -> tuple[np.ndarray, np.ndarray]: ...


class PlainCache(Protocol):
    """What a session needs of a KVCache with plain rows."""

    @property
    def plain_layers(self) -> Sequence[LayerRows]: ...
    @property
    def limit(self) -> int: ...
    @property
    def context(self) -> int: ...
    def acquire(self) -> int | None: ...
    def release(self, slot: int) -> None: ...
    def length(self, slot: int) -> int: ...
    def commit(self, slot: int, rows: int) -> None: ...
    def reach(self, slot: int, end: int) -> None: ...


class Graph(Protocol):
    """A graph on a provider (model.providers)."""

    def sizes(self, rows: int) -> tuple[int, int]:
        """(tokens of the next run, tokens that it must be filled up to) where `rows` are to be run."""
        ...

    def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Outputs by name. Raises `SessionError`."""
        ...

    def close(self) -> None: ...


class StaticSession:
    """A loaded model over one KV cache with plain rows. Not thread-safe: one step at a time."""

    def __init__(
        self,
        folder: Path,
        static_folder: Path,
        manifest: ModelManifest,
        *,
        graph: Graph,
        cache: PlainCache,
        max_rows: int,
    ) -> None:
        """`folder` is the model's, `static_folder` what was derived from it, `graph` its graph on some provider.

        Raises `ModelFormatError` if the two do not belong together.
        """
        self.manifest, self.max_rows = manifest, max_rows
        self.vocab, self.hidden = manifest.dimensions.vocab, manifest.dimensions.hidden
        self._embedding = EmbeddingTable(folder, manifest, StaticManifest.read(static_folder).embedding)
        self._graph: Graph | None = graph
        self._cache, self._layers = cache, tuple(cache.plain_layers)
        self._sinks = max(layer.ring.sinks for layer in self._layers)
        self._hidden = np.empty((max_rows, self.hidden), np.float32)

    def forward(self, step: Step) -> np.ndarray:
        """Run one step: float32 [step.logit_rows, vocab].

        Rows of a segment go to cache rows position, position + 1, ... of its slot, whose committed length `position` is.
        Raises `SessionError` for a step that the cache or the session has no room for.
        """
        self._check(step)
        logits = [np.empty((0, self.vocab), np.float32)]
        first = 0
        for segment in step.segments:
            for start, count, filled in self._pieces(segment):
                wanted = min(count, max(0, start + count - (segment.rows - segment.logit_rows)))
                outputs = self._run(segment, start, count, filled, wanted)
                logits.append(outputs["logits"][:wanted])
                self._hidden[first + start : first + start + count] = outputs["hidden"][:count]
            first += segment.rows
        return np.concatenate(logits)

    def hidden_states(self, rows: int) -> np.ndarray:
        """float32 [rows, hidden]: the last step's rows after the final norm; a view that the next step overwrites."""
        return self._hidden[:rows]

    def close(self) -> None:
        """Free the graph; idempotent. The cache belongs to its owner."""
        if self._graph is not None:
            self._graph.close()
            self._graph = None

    def _check(self, step: Step) -> None:
        if self._graph is None:
            raise SessionError("the session is closed")
        if not 0 < step.rows <= self.max_rows:
            raise SessionError(f"a step has {step.rows} rows, the session takes 1 to {self.max_rows}")
        slots = [segment.slot for segment in step.segments]
        if len(set(slots)) != len(slots):
            raise SessionError("a step has two segments of one slot")
        for segment in step.segments:
            if not 0 <= segment.logit_rows <= segment.rows:
                raise SessionError("a segment wants logits of more rows than it has")
            if min(segment.token_ids) < 0 or max(segment.token_ids) >= self.vocab:
                raise SessionError("a token lies outside the vocabulary")
            if segment.position != self._length(segment.slot) or segment.position + segment.rows > self._cache.limit:
                raise SessionError(f"slot {segment.slot} has no room for rows at {segment.position}")

    def _length(self, slot: int) -> int:
        try:
            return self._cache.length(slot)
        except ValueError as error:
            raise SessionError(str(error)) from None

    def _pieces(self, segment: Segment) -> Iterator[tuple[int, int, int]]:
        """(first row, rows, rows to fill up to) of each run. Where a conversation slides, its rows run alone: the keys
        of sinks are turned for each of them."""
        assert self._graph is not None
        start = 0
        while start < segment.rows:
            rows = segment.rows - start
            if self._sinks:
                rows = min(rows, max(1, self._cache.context - segment.position - start))
            count, filled = self._graph.sizes(rows)
            yield start, count, filled
            start += count

    def _turn(self, position: int) -> int:
        """By how many positions sinks have moved up for the row at `position`: as if it were the last row that attends to
        everything (StreamingLLM, arXiv:2309.17453: positions inside the cache)."""
        return max(0, position - self._cache.context + 1) if self._sinks else 0

    def _run(self, segment: Segment, start: int, count: int, filled: int, wanted: int) -> dict[str, np.ndarray]:
        """Run rows [start, start + count) of a segment and write their keys and values."""
        assert self._graph is not None
        slot, position = segment.slot, segment.position + start
        try:
            for layer in self._layers:
                layer.reserve(slot, position + count)
        except MemoryError:
            raise SessionError(f"there is no memory for {position + count} rows of keys and values") from None
        inputs = self._rope(np.arange(position, position + filled))
        inputs["embedded"] = np.zeros((filled, self.hidden), np.float32)
        inputs["embedded"][:count] = self._embedding.rows(np.array(segment.token_ids[start : start + count]))
        inputs["logit_rows"] = np.arange(count - max(wanted, 1), count, dtype=np.int32)
        for index, layer in enumerate(self._layers):
            inputs[f"past_k.{index}"], inputs[f"past_v.{index}"] = layer.rows(slot)
            name = mask_name(self.manifest.layers[index].window)
            if name not in inputs:
                inputs[name] = mask(layer.ring, inputs[f"past_k.{index}"].shape[2], position, filled)
        with self._turned_sinks(inputs, self._turn(position)):
            outputs = self._graph.run(inputs)
        self._write(slot, position, count, outputs["new_k"], outputs["new_v"])
        return outputs

    def _write(self, slot: int, position: int, count: int, keys: np.ndarray, values: np.ndarray) -> None:
        self._cache.reach(slot, position + count)
        places: dict[Ring, slice | list[int]] = {}
        for index, layer in enumerate(self._layers):
            if layer.ring not in places:
                places[layer.ring] = _places(layer.ring, position, count)
            where, (past_k, past_v) = places[layer.ring], layer.rows(slot)
            past_k[0][:, where] = keys[index, :, :count]
            past_v[0][:, where] = values[index, :, :count]

    def _rope(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        """Tables as wide as a head: cosines twice, sines with their signs; what does not turn is multiplied by 1."""
        inputs, width = {}, self.manifest.dimensions.head_dim
        for index, table in enumerate(self.manifest.rope):
            rows = np.empty((1, len(positions), table.rotary_dim), np.float32)
            rope_rows([table], positions, out=rows)
            half = table.rotary_dim // 2
            cos, sin = np.ones((len(positions), width), np.float32), np.zeros((len(positions), width), np.float32)
            cos[:, :half] = cos[:, half : 2 * half] = rows[0, :, :half]
            sin[:, half : 2 * half] = rows[0, :, half:]
            sin[:, :half] = -rows[0, :, half:]
            inputs[f"cos.{index}"], inputs[f"sin.{index}"] = cos, sin
        return inputs

    @contextmanager
    def _turned_sinks(self, inputs: dict[str, np.ndarray], turn: int) -> Iterator[None]:
        """Keys of sinks as if they stood `turn` positions later, while a run reads them."""
        if not turn:
            yield
            return
        tables, kept = self._rope(np.array([turn])), {}
        for index, (layer, spec) in enumerate(zip(self._layers, self.manifest.layers, strict=True)):
            if not layer.ring.sinks or spec.rope is None:
                continue
            half = self.manifest.rope[spec.rope].rotary_dim // 2
            sinks = inputs[f"past_k.{index}"][:, :, : layer.ring.sinks]
            kept[index] = sinks.copy()
            swapped = kept[index].copy()
            swapped[..., :half] = kept[index][..., half : 2 * half]
            swapped[..., half : 2 * half] = kept[index][..., :half]
            sinks[:] = kept[index] * tables[f"cos.{spec.rope}"] + swapped * tables[f"sin.{spec.rope}"]
        try:
            yield
        finally:
            for index, rows in kept.items():
                inputs[f"past_k.{index}"][:, :, : rows.shape[2]] = rows


def _places(ring: Ring, position: int, count: int) -> slice | list[int]:
    """Where the rows of `count` positions lie; a slice, which copies faster, if they lie together."""
    places = [ring.physical_row(row) for row in range(position, position + count)]
    return slice(places[0], places[-1] + 1) if places[-1] - places[0] == count - 1 else places


def mask_name(window: int | None) -> str:
    """Of the input that says what rows of layers with this window attend to."""
    return "mask" if window is None else f"mask.{window}"


def held_sizes(manifest: ModelManifest, cache: PlainCache) -> dict[str, int]:
    """Rows that a full cache holds, by the names of the sizes in the graph that depend on them."""
    sizes = {}
    for index, (layer, spec) in enumerate(zip(cache.plain_layers, manifest.layers, strict=True)):
        sizes[f"past.{index}"] = sizes[f"total.{mask_name(spec.window)}"] = layer.ring.capacity
    return sizes


def mask(ring: Ring, held: int, position: int, rows: int) -> np.ndarray:
    """float32 [rows, held + rows]: what each of `rows` rows from `position` on attends to, 0 or MASKED, of the `held` rows of
    memory and of the new ones themselves."""
    own = np.arange(position, position + rows)[:, None]
    places = np.arange(held)
    turns = (position - 1 - places) // ring.ring_rows  # -1: nobody was there yet
    holds = np.where(places < ring.sinks, places, places + turns * ring.ring_rows)
    there = (places < position) & (holds < position)
    positions = np.concatenate([holds, own[:, 0]])
    seen = (positions <= own) & ((positions > own - ring.window) | (positions < ring.sinks))
    seen[:, :held] &= there
    hidden: np.ndarray = np.where(seen, np.float32(0), MASKED)
    return hidden


def golden_logits(session: StaticSession, cache: PlainCache) -> np.ndarray:
    """float32 [vocab] after GOLDEN_IDS, read as a prompt and one more token: both kinds of a step are run."""
    slot = cache.acquire()
    if slot is None:
        raise SessionError("the cache has no free slot for the self-test")
    try:
        session.forward(Step((Segment(slot, 0, GOLDEN_IDS[:-1]),)))
        cache.commit(slot, len(GOLDEN_IDS) - 1)
        logits: np.ndarray = session.forward(Step((Segment(slot, len(GOLDEN_IDS) - 1, GOLDEN_IDS[-1:], 1),)))[0]
        return logits
    finally:
        cache.release(slot)


def self_test(session: StaticSession, cache: PlainCache, static_folder: Path) -> None:
    """Raises `SessionError` unless the session comes to the logits that were stored when its graph was written."""
    golden = np.fromfile(static_folder / GOLDEN_NAME, np.float32)
    found = golden_logits(session, cache)
    if golden.shape != found.shape or not np.isfinite(found).all():
        raise SessionError("the self-test gave no numbers to compare")
    theirs, ours = (values - np.logaddexp.reduce(values) for values in (golden.astype(np.float64), found))
    divergence = float((np.exp(theirs) * (theirs - ours)).sum())
    if not divergence <= _MOST_DIVERGENCE:
        raise SessionError(f"the self-test gave wrong logits: their divergence from the right ones is {divergence:.3g}")
