"""A KVCache beside a plain model of it: whatever is done in whatever order, both hold the same rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edge_llm.cache.plain_rows import PlainRows
from edge_llm.cache.snapshot import Snapshot
from edge_llm.cache.tiled_rows import TiledRows
from edge_llm.kernels.layout import TILE, KvType
from tests.cache.rig import CONTEXT, GEOMETRY, MAX_CHUNK, Layer, layers, make, write

_NOBODY = -1
STORAGE: list[tuple[KvType, type[TiledRows] | type[PlainRows]]] = [
    (KvType.F32, TiledRows),
    (KvType.INT8, TiledRows),
    (KvType.F32, PlainRows),
]


@dataclass
class Conversation:
    """What a slot should hold: its tokens, and for each layer which position and token was last written to each row."""

    tokens: list[int]
    owners: list[np.ndarray]
    contents: list[np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        self.contents = [owner.copy() for owner in self.owners]

    def write(self, rings: list[Layer], tokens: list[int]) -> None:
        positions = range(len(self.tokens), len(self.tokens) + len(tokens))
        for ring, owner, content in zip(rings, self.owners, self.contents, strict=True):
            owner[ring.rows(positions)], content[ring.rows(positions)] = positions, tokens

    def held(self, rings: list[Layer]) -> Iterator[tuple[Layer, np.ndarray]]:
        """Physical rows that hold a row of the conversation, layer by layer."""
        tokens = np.array([*self.tokens, _NOBODY], np.int64)
        for ring, owner, content in zip(rings, self.owners, self.contents, strict=True):
            counts = (owner != _NOBODY) & (owner < len(self.tokens))
            yield ring, np.flatnonzero(counts & (content == tokens[np.where(counts, owner, _NOBODY)]))

    def positions(self, rings: list[Layer]) -> Iterator[tuple[Layer, np.ndarray]]:
        """Positions whose rows are there, layer by layer."""
        for (ring, rows), owner in zip(self.held(rings), self.owners, strict=True):
            yield ring, owner[rows]

    def can_go_on(self, rings: list[Layer], length: int) -> bool:
        """Whether the row of position `length` finds all that it attends to."""
        for ring, positions in self.positions(rings):
            seen = (positions < length) & ((positions < ring.sinks) | (positions > length - ring.window))
            if seen.sum() != min(ring.sinks, length) + len(range(max(ring.sinks, length - ring.window + 1), length)):
                return False
        return True

    def copy(self, length: int) -> Conversation:
        other = Conversation(self.tokens[:length], [owner.copy() for owner in self.owners])
        other.contents = [content.copy() for content in self.contents]
        return other


class CacheMachine(RuleBasedStateMachine):
    """acquire, write + commit, truncate, fork, snapshot, restore and release in any order, across many wraps."""

    steps = 0
    """how many rules all machines have run"""

    @initialize(storage=st.sampled_from(STORAGE), sinks=st.sampled_from([0, TILE]))
    def start(self, storage: tuple[KvType, type[TiledRows] | type[PlainRows]], sinks: int) -> None:
        self.cache = make(storage[0], sinks=sinks, storage=storage[1])
        self.rings = layers(self.cache)
        self.model: dict[int, Conversation] = {}
        self.snapshots: list[tuple[Snapshot, list[int]]] = []
        self.token = 0

    def slot(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.model)))

    def new_tokens(self, count: int) -> list[int]:
        self.token += count
        return list(range(self.token - count, self.token))

    @rule()
    def acquire(self) -> None:
        slot = self.cache.acquire()
        assert (slot is None) == (len(self.model) == self.cache.slots)
        if slot is not None:
            assert slot not in self.model
            self.model[slot] = Conversation([], [np.full(ring.capacity, _NOBODY) for ring in self.rings])
            assert not any(array[slot].any() for ring in self.rings for array in ring.arrays.values())

    @precondition(lambda self: self.model)
    @rule(data=st.data(), rows=st.integers(1, MAX_CHUNK), dropped=st.integers(0, 3) | st.just(MAX_CHUNK))
    def step(self, data: st.DataObject, rows: int, dropped: int) -> None:
        """Writes some rows and commits all but the last `dropped` of them, as after rejected drafts."""
        self.run(self.slot(data), rows, max(0, rows - dropped))

    @precondition(lambda self: self.model)
    @rule(data=st.data(), rows=st.integers(1, 2 * CONTEXT))
    def go_far(self, data: st.DataObject, rows: int) -> None:
        slot = self.slot(data)
        for first in range(0, rows, MAX_CHUNK):
            self.run(slot, min(MAX_CHUNK, rows - first), min(MAX_CHUNK, rows - first))

    def run(self, slot: int, rows: int, kept: int) -> None:
        tokens = self.new_tokens(rows)
        write(self.cache, slot, len(self.model[slot].tokens), tokens)
        self.model[slot].write(self.rings, tokens)
        self.cache.commit(slot, kept)
        self.model[slot].tokens.extend(tokens[:kept])

    def length(self, data: st.DataObject, slot: int) -> int:
        """A length of the slot, often one near its end."""
        length = len(self.model[slot].tokens)
        return data.draw(st.integers(0, length) | st.integers(max(0, length - 100), length))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        slot = self.slot(data)
        length = self.length(data, slot)
        assert self.cache.truncate(slot, length) == self.model[slot].can_go_on(self.rings, length)
        if self.cache.length(slot) == length:
            del self.model[slot].tokens[length:]
            self.check_memory(slot)

    @precondition(lambda self: len(self.model) > 1)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        source, target = data.draw(st.permutations(sorted(self.model)))[:2]
        length = self.length(data, source)
        possible = self.model[source].can_go_on(self.rings, length)
        assert self.cache.fork(source, target, length) == possible
        if possible:
            self.model[target] = self.model[source].copy(length)
            self.check_memory(target)

    @precondition(lambda self: any(conversation.tokens for conversation in self.model.values()))
    @rule(data=st.data())
    def snapshot(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from([slot for slot in sorted(self.model) if self.model[slot].tokens]))
        tokens = self.model[slot].tokens
        start = TILE * data.draw(st.integers(0, (len(tokens) - 1) // TILE))
        stop = data.draw(st.integers(start + 1, min(len(tokens), start + 2 * TILE)))
        possible = all(
            ((positions >= start) & (positions < stop)).sum() == stop - start
            for _, positions in self.model[slot].positions(self.rings)
        )
        snapshot = self.cache.snapshot(slot, start, stop)
        assert (snapshot is not None) == possible
        if snapshot is not None:
            self.snapshots.append((snapshot, tokens[start:stop]))

    @precondition(lambda self: self.model and self.snapshots)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        slot, (snapshot, tokens) = self.slot(data), data.draw(st.sampled_from(self.snapshots))
        try:
            self.cache.restore(slot, snapshot)
        except ValueError:
            assert len(self.model[slot].tokens) != snapshot.start
            return
        assert len(self.model[slot].tokens) == snapshot.start
        self.model[slot].write(self.rings, tokens)
        self.model[slot].tokens.extend(tokens)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slot = self.slot(data)
        self.cache.release(slot)
        del self.model[slot]

    def check_memory(self, slot: int) -> None:
        """Tiles in which no row counts were given back."""
        for ring, held in self.model[slot].held(self.rings):
            free = np.ones(ring.capacity // TILE, np.bool_)
            free[held // TILE] = False
            assert not any(array[slot][:, free].any() for array in ring.arrays.values())

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "cache"):
            return
        type(self).steps += 1
        self.cache.check_integrity()
        assert self.cache.free_slots == self.cache.slots - len(self.model)
        used = 0
        for slot, conversation in self.model.items():
            assert self.cache.length(slot) == len(conversation.tokens)
            for ring, held in conversation.held(self.rings):
                assert ring.holds(slot, held, conversation.contents[ring.number][held])
                row_bytes = GEOMETRY.layers[ring.number].row_bytes(self.cache.kv_type)
                used += len(np.unique(held // TILE)) * TILE * row_bytes
            assert conversation.can_go_on(self.rings, len(conversation.tokens))
        assert self.cache.used_bytes == (self.cache.nbytes if self.cache.plain_layers else used)
