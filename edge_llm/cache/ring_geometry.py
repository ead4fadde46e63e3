"""RingGeometry: which rows of a conversation a layer keeps, and where. Numbers only; TiledRows holds the bytes.

Four numbers are kept apart:

    position      counts a conversation's tokens from 0, for ever
    length        committed rows of a slot: the positions [0, length) belong to the conversation (KVCache's affair)
    capacity      rows that a slot has room for
    physical row  where the row of a position lies in its slot: [0, sinks) stays, [sinks, capacity) is a ring

Whatever a step writes past the length, committed or not, overwrites the ring. So a fifth number counts: `written`, the
end of the furthest rows that were ever written. The ring holds the positions [written - ring_rows, length).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from edge_llm.kernels.layout import TILE, UNBOUNDED


@dataclass(frozen=True, slots=True)
class RingGeometry:
    """Row p attends to the rows k < `sinks` and p - `window` < k <= p."""

    capacity: int
    """rows a slot has room for, a multiple of TILE"""
    sinks: int
    """first rows that are never overwritten, a multiple of TILE"""
    window: int
    """rows that a row attends to, itself among them and sinks not; UNBOUNDED: all"""

    @classmethod
    def of(cls, window: int | None, *, context: int, sinks: int, max_chunk: int) -> RingGeometry:
        """The ring of a layer that looks `window` rows back (None: to the beginning, so far as the context goes).

        There is room for the window and the `max_chunk` rows of a step. A global layer keeps `sinks` rows and the last
        context - sinks: below the context, that is everything. Where the sinks would take all of it, it cannot slide.
        """
        if sinks < 0 or sinks % TILE or context < 1 or max_chunk < 1 or (window is not None and window < 1):
            raise ValueError(f"no ring has window {window}, context {context}, sinks {sinks}, max_chunk {max_chunk}")
        if window is not None:
            return cls(_whole_tiles(window + max_chunk), 0, window)
        if context <= sinks:
            return cls(_whole_tiles(context), 0, UNBOUNDED)
        return cls(_whole_tiles(context + max_chunk), sinks, context - sinks)

    @property
    def ring_rows(self) -> int:
        """Rows that the ring holds, sinks not among them."""
        return self.capacity - self.sinks

    def physical_row(self, position: int) -> int:
        """Where the row of `position` lies in its slot."""
        if position < self.sinks:
            return position
        return self.sinks + (position - self.sinks) % self.ring_rows

    def oldest_held(self, written: int) -> int:
        """The first position of the ring whose row is there."""
        return max(self.sinks, written - self.ring_rows)

    def serves(self, length: int, written: int) -> bool:
        """Whether a conversation can go on from `length`: what rows from there on attend to is there."""
        return max(self.sinks, length - self.window + 1) >= self.oldest_held(written)

    def forgets(self, length: int, written: int) -> bool:
        """Whether `written` may become `length` once no more rows count: then all rows that are held are known to be."""
        return written <= self.capacity or length <= self.sinks

    def held(self, length: int, written: int) -> tuple[range, range]:
        """Positions below `length` whose rows are there: of sinks, and of the ring."""
        return range(min(length, self.sinks)), range(min(self.oldest_held(written), length), length)

    def holds(self, start: int, stop: int, written: int) -> bool:
        """Whether all rows of the positions [start, stop), which a conversation has, are there."""
        return stop <= self.sinks or max(start, self.sinks) >= self.oldest_held(written)

    def kept_tiles(self, length: int, written: int, start: int = 0) -> np.ndarray:
        """bool [capacity / TILE]: physical tiles that hold a row of a position in [start, length)."""
        kept = np.zeros(self.capacity // TILE, np.bool_)
        sinks, ring = self.held(length, written)
        kept[start // TILE : -(-sinks.stop // TILE)] = True
        first = max(ring.start, start)
        if first < ring.stop:
            tiles = np.arange(first // TILE, -(-ring.stop // TILE)) - self.sinks // TILE
            kept[self.sinks // TILE + tiles % (self.ring_rows // TILE)] = True
        return kept


def runs(tiles: np.ndarray) -> Iterator[tuple[int, int]]:
    """(begin, end) of each run of True in bool [tiles]."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], tiles.view(np.int8), [0]))))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _whole_tiles(rows: int) -> int:
    return -(-rows // TILE) * TILE
