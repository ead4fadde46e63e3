"""Slots: which sequences have slots of the cache, and the rows in them that nobody computes again."""

from __future__ import annotations

from edge_llm.cache.blocks import BlockStore
from edge_llm.cache.kv_cache import KVCache
from edge_llm.cache.prefix_cache import PrefixCache
from edge_llm.engine.draft_model import DraftModel
from edge_llm.engine.recorder import Recorder
from edge_llm.engine.scheduler import Scheduler
from edge_llm.engine.sequence import Sequence


class Slots:
    """Carries out what a `Scheduler` decides. For the thread that runs the steps."""

    def __init__(
        self,
        cache: KVCache,
        store: BlockStore | None,
        scheduler: Scheduler,
        recorder: Recorder,
        *,
        shares_prefixes: bool,
        kv_budget: int | None,
        draft_model: DraftModel | None,
    ) -> None:
        """Prefixes are found again in `cache` and `store` if it `shares_prefixes`. Those of ended conversations go where they
        and what the running ones may come to hold are more than `kv_budget` bytes (None: any), those of the `draft_model`
        first."""
        self._cache, self._scheduler, self._recorder = cache, scheduler, recorder
        self.prefixes = PrefixCache(cache, store)
        self._shares_prefixes, self._kv_budget, self._draft_model = shares_prefixes, kv_budget, draft_model

    def admit(self, now: float) -> None:
        """Slots for those whose turn it is, taken from others if need be."""
        scheduler = self._scheduler
        scheduler.admit(self._place, now)
        while (first := scheduler.next_waiting()) is not None and (victims := scheduler.victims(first, now)):
            for sequence in victims:
                self._park(sequence, now)
            scheduler.admit(self._place, now, before=first)
        if self._draft_model is not None:
            self._draft_model.idle = len(self._scheduler.running) > 1

    def catch_up(self) -> set[Sequence]:
        """Let prompts take over what others have read of them since; gives those that wait until there is more of it."""
        waiting: set[Sequence] = set()
        ahead: list[int] = []
        for sequence in self._scheduler.reading():
            assert sequence.slot is not None
            if not sequence.shares_rows:
                continue
            if self.prefixes.awaits(sequence.slot, ahead):
                waiting.add(sequence)
                continue
            ahead.append(sequence.slot)
            rows = self.prefixes.catch_up(sequence.slot)
            self._recorder.caught_up(sequence, rows)
            sequence.found(rows)
        return waiting

    def read_next(self, sequence: Sequence, ids: list[int], same: int) -> None:
        """A sequence reads other tokens now, of which the first `same` are those that it has."""
        assert sequence.slot is not None
        sequence.read_next(ids, self.prefixes.rewind(sequence.slot, same))

    def release(self, sequence: Sequence, *, keep: bool) -> None:
        """Take all slots of a sequence that has ended; `keep` its rows for those who come after."""
        for slot in sequence.slots:
            self.prefixes.release(slot, keep=keep and slot == sequence.slot)
        sequence.slot = None

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless slots, lengths and sequences agree."""
        self._cache.check_integrity()
        self.prefixes.check_integrity()
        if self._draft_model is not None:
            self._draft_model.check_integrity()
        free = self._cache.free_slots + self.prefixes.idle_slots
        taken = {slot: sequence for sequence in self._scheduler.sequences for slot in sequence.slots}
        if len(taken) != self._cache.slots - free:
            raise AssertionError(f"{len(taken)} slots are in use, but {free} are free")
        for slot, sequence in taken.items():
            if self._cache.length(slot) != sequence.committed:
                raise AssertionError(f"slot {slot} and its sequence disagree about the committed rows")

    def _park(self, sequence: Sequence, now: float) -> None:
        """Take somebody's slot; its rows stay with those of ended conversations for as long as there is room."""
        assert sequence.slot is not None
        if not sequence.shares_rows:  # it goes on from its prompt, lest it finds rows that it has not seen
            self.read_next(sequence, sequence.ids[: sequence.prompt_tokens], sequence.prompt_tokens)
        self.prefixes.release(sequence.slot, keep=True)
        self._scheduler.park(sequence, now)
        self._recorder.metrics.num_preemptions.add()

    def _place(self, sequence: Sequence) -> int | None:
        """A slot for a sequence, with the rows of it that are known."""
        placed = self.prefixes.acquire(sequence.ids, sequence.namespace if self._shares_prefixes else None)
        if placed is None:
            return None
        self._recorder.placed(sequence, placed)
        sequence.found(placed.rows)
        rest = None
        if self._kv_budget is not None:
            rest = self._kv_budget - self._scheduler.reserved_bytes(sequence, *self._scheduler.running)
            self.prefixes.shrink(rest)
            rest -= self.prefixes.idle_bytes
        if self._draft_model is not None:
            self._draft_model.rest(rest)
        return placed.slot
