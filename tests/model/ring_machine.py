"""Conversations over rings, in any company and any order: every logit is that of a recomputation in one step."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from edge_llm.cache.kv_cache import KVCache
from edge_llm.cache.snapshot import Snapshot
from edge_llm.kernels.layout import TILE, KvType
from edge_llm.kernels.warmup import KernelLibrary
from edge_llm.model.session import Session
from edge_llm.model.step import Segment, Step
from tests.model.mixed import LENGTH, MAX_CHUNK, common, opened, recomputed, texts

TEXTS = texts()
SLOTS = 4


class Model:
    """Open sessions of one KV type, and the logits that the texts should have: float32 [LENGTH, vocab] each."""

    def __init__(self, folder: Path, kernels: KernelLibrary, kv_type: KvType, stack: ExitStack) -> None:
        self.session, self.cache = stack.enter_context(opened(folder, kernels, kv_type, slots=SLOTS))
        self.truth = [recomputed(folder, kernels, kv_type, ids) for ids in TEXTS]


@dataclass
class Reader:
    """A slot that has read the first `length` tokens of a text."""

    slot: int
    text: int
    length: int = 0

    def ids(self, count: int) -> list[int]:
        """The next tokens, as far as the text goes."""
        return TEXTS[self.text][self.length : self.length + count]

    def move(self, text: int, length: int) -> None:
        """To a place that was reached by reading `text`; on with the same text if it begins alike."""
        if common(TEXTS[self.text], TEXTS[text]) < length:
            self.text = text
        self.length = length


class RingMachine(RuleBasedStateMachine):
    """Steps of several slots with drafts that are rejected, truncate, fork, other texts, blocks copied out and brought back."""

    steps = 0
    """how many rules all machines have run"""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.session: Session = model.session
        self.cache: KVCache = model.cache
        self.truth = model.truth
        self.readers: list[Reader] = []  # draws go by the index, for slots depend on what earlier machines did
        self.blocks: list[tuple[Snapshot, int]] = []

    def teardown(self) -> None:
        for reader in self.readers:
            self.cache.release(reader.slot)
        self.cache.check_integrity()
        assert self.cache.used_bytes == 0

    def reader(self, data: st.DataObject) -> Reader:
        return self.readers[data.draw(st.integers(0, len(self.readers) - 1))]

    @precondition(lambda self: len(self.readers) < SLOTS)
    @rule(text=st.sampled_from(range(len(TEXTS))))
    def acquire(self, text: int) -> None:
        slot = self.cache.acquire()
        assert slot is not None
        self.readers.append(Reader(slot, text))

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Up to MAX_CHUNK rows of some slots; of each, the last ones may be drafts that nobody accepts."""
        numbers = data.draw(st.lists(st.integers(0, len(self.readers) - 1), min_size=1, max_size=3, unique=True))
        parts, room = [], MAX_CHUNK
        for others, number in zip(reversed(range(len(numbers))), numbers, strict=True):
            rows = data.draw(st.integers(1, room - others))
            good = data.draw(st.just(rows) | st.integers(0, rows))
            ids = self.readers[number].ids(good)
            parts.append((self.readers[number], ids, [5] * (rows - len(ids))))
            room -= rows
        self.run(parts)

    def run(self, parts: list[tuple[Reader, list[int], list[int]]]) -> None:
        """One step of (reader, tokens, drafts that are rejected)."""
        step = Step(
            tuple(Segment(r.slot, r.length, [*ids, *drafts], len(ids) + len(drafts)) for r, ids, drafts in parts)
        )
        logits, first = self.session.forward(step), 0
        for reader, ids, drafts in parts:
            expected = self.truth[reader.text][reader.length : reader.length + len(ids)]
            assert np.array_equal(logits[first : first + len(ids)], expected), (reader, len(ids))
            first += len(ids) + len(drafts)
            self.cache.commit(reader.slot, len(ids))
            reader.length += len(ids)

    @precondition(lambda self: self.readers)
    @rule(data=st.data(), rows=st.integers(1, LENGTH), chunk=st.integers(1, MAX_CHUNK))
    def go_far(self, data: st.DataObject, rows: int, chunk: int) -> None:
        reader = self.reader(data)
        for first in range(0, rows, chunk):
            if ids := reader.ids(min(chunk, rows - first)):
                self.run([(reader, ids, [])])

    def length(self, data: st.DataObject, reader: Reader) -> int:
        """A length that it had, often a late one."""
        return data.draw(st.integers(max(0, reader.length - MAX_CHUNK), reader.length) | st.integers(0, reader.length))

    @precondition(lambda self: self.readers)
    @rule(data=st.data(), text=st.sampled_from(range(len(TEXTS))))
    def truncate(self, data: st.DataObject, text: int) -> None:
        """If what is left begins another text as well, go on with that one."""
        reader = self.reader(data)
        length = self.length(data, reader)
        if self.cache.truncate(reader.slot, length):
            old, reader.text = reader.text, text
            reader.move(old, length)

    @precondition(lambda self: len(self.readers) > 1)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        source, target = data.draw(st.permutations(range(len(self.readers))))[:2]
        source, target = self.readers[source], self.readers[target]
        length = self.length(data, source)
        if self.cache.fork(source.slot, target.slot, length):
            target.move(source.text, length)

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def snapshot(self, data: st.DataObject) -> None:
        """Of the last block, whole or in part."""
        reader = self.reader(data)
        if reader.length:
            start = (reader.length - 1) // TILE * TILE
            block = self.cache.snapshot(reader.slot, start, data.draw(st.integers(start + 1, reader.length)))
            if block is not None:
                self.blocks.append((block, reader.text))

    @precondition(lambda self: self.readers and self.blocks)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        """In place of what a reader had from there on, if it has read the same text so far."""
        reader, (block, text) = self.reader(data), data.draw(st.sampled_from(self.blocks))
        alike = reader.length >= block.start <= common(TEXTS[reader.text], TEXTS[text])
        if alike and self.cache.truncate(reader.slot, block.start):
            self.cache.restore(reader.slot, block)
            reader.move(text, block.stop)

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        reader = self.reader(data)
        self.cache.release(reader.slot)
        self.readers.remove(reader)

    @invariant()
    def agree(self) -> None:
        type(self).steps += 1
        self.cache.check_integrity()
        assert all(self.cache.length(reader.slot) == reader.length for reader in self.readers)
