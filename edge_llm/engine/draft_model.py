"""DraftModel: a smaller model with the same tokenizer, which says what a larger one may say next.

It has a session and a cache of its own. Drafts are guesses, so whatever goes wrong here costs speed and no text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from edge_llm.cache.kv_cache import KVCache
from edge_llm.cache.prefix_cache import PrefixCache, common_prefix
from edge_llm.model.step import Segment, Step
from edge_llm.sampling.sampler import Sampler, SequenceSampler
from edge_llm.sampling.speculation import ROW_COST

if TYPE_CHECKING:
    from edge_llm.engine.core import StepSession

SLOTS = 5
"""a conversation that is drafted for, and such as may go on"""
CHUNK = 64
"""rows of a text that it reads between two steps of the larger model, at most: the reader's next token waits for them"""


class DraftModel:
    """Drafts for one conversation at a time, and only while its engine has no other: several share each load of the larger
    model's weights as it is. What it has read of the others stays for as long as there is room.

    `drafts` may be called from any thread, all else from the one that runs the steps.
    """

    def __init__(
        self, *, session: StepSession, cache: KVCache, sampler: Sampler, vocab: int, cost: float, keeps: bool = True
    ) -> None:
        """`cache` has SLOTS slots and room for steps of CHUNK rows, `sampler` rows of `vocab` logits, as many as both
        models have. `cost` of a token is told in steps of the larger model. `keeps`: it remembers ended conversations."""
        self.cost = cost
        self.idle = False
        """drafts nothing for now"""
        self.sampler = sampler
        self._session, self._cache, self._vocab, self._keeps = session, cache, vocab, keeps
        self._prefixes = PrefixCache(cache)
        self._holder: ModelDrafts | None = None
        self._spare: int | None = None

    def drafts(self, ids: list[int], namespace: str | None, sampler: SequenceSampler) -> ModelDrafts:
        """What drafts for a conversation that begins with `ids`, shares rows within `namespace` and is sampled by `sampler`."""
        return ModelDrafts(self, ids, namespace if self._keeps else None, sampler)

    def bytes_of(self, rows: int) -> int:
        """Bytes of keys and values of a conversation so long."""
        return self._cache.bytes_of(rows)

    @property
    def used_bytes(self) -> int:
        return self._cache.used_bytes

    def rest(self, nbytes: int | None) -> None:
        """Draft for nobody until asked again. From now on at most so many bytes (None: any) are kept of those whom it does not
        draft for."""
        self._spare = nbytes
        self._let_go()

    def _let_go(self) -> None:
        if self._holder is not None:
            self._prefixes.release(self._holder.leave(), keep=True)
            self._holder = None
        if self._spare is not None:
            self._prefixes.shrink(self._spare)

    def place(self, drafts: ModelDrafts, ids: list[int], namespace: str | None) -> int | None:
        """A slot for a conversation, with the rows of it that are known; it is the one that is drafted for now."""
        self._let_go()
        placed = self._prefixes.acquire(ids, namespace)
        if placed is None:
            return None
        self._holder = drafts
        return placed.slot

    def length(self, slot: int) -> int:
        """Rows of a slot."""
        return self._cache.length(slot)

    def rewind(self, slot: int, rows: int) -> int:
        """Take back all but the first `rows` rows; how many are left."""
        return self._prefixes.rewind(slot, rows)

    def read(self, slot: int, token_ids: list[int], *, wanted: bool) -> np.ndarray:
        """Add rows; float32 [vocab] logits of the last if they are `wanted`. Raises `SessionError`, and `ValueError` for what
        the model has no row for."""
        if max(token_ids) >= self._vocab:
            raise ValueError("a token that only the larger model has")
        segment = Segment(slot, self._cache.length(slot), token_ids, int(wanted))
        logits = self._session.forward(Step((segment,)))
        self._cache.commit(slot, len(token_ids))
        return logits[0, : self._vocab] if wanted else logits

    def close(self) -> None:
        """Free the model."""
        self._session.close()
        self._cache.close()

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless slots, lengths and the conversation that is drafted for agree."""
        self._cache.check_integrity()
        running = self._cache.slots - self._cache.free_slots - self._prefixes.idle_slots
        if running != (self._holder is not None):
            raise AssertionError(f"{running} slots of the draft model are in use")
        if self._holder is not None:
            self._holder.check_integrity()


class ModelDrafts:
    """What a DraftModel expects of one conversation.

    rows of its slot    [0, sound)      tokens of the text
                        [sound, rows)   the drafts of the last time, of which the text may have come to hold some
    """

    def __init__(self, model: DraftModel, ids: list[int], namespace: str | None, sampler: SequenceSampler) -> None:
        self.cost = model.cost
        self._model, self._namespace, self._sampler = model, namespace, sampler
        self._text, self._prompt_tokens = list(ids), len(ids)
        self._ahead: list[int] = []
        self._slot: int | None = None
        self._failed = False

    def observe(self, token_id: int) -> None:
        self._text.append(token_id)

    def draft(self, length: int) -> tuple[int, ...]:
        if length < 1 or self._failed or self._model.idle:
            return ()
        try:
            return self._draft(length)
        except Exception:  # what failed once, such as numbers out of range, would fail again
            self._failed = True
            return ()

    def leave(self) -> int:
        """Give its slot back, with rows of its text alone."""
        slot = self._slot
        assert slot is not None
        self._settle(slot)
        self._slot = None
        return slot

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless its slot holds tokens of the text and drafts, and nothing else."""
        if self._slot is None or self._model.length(self._slot) - len(self._ahead) > len(self._text):
            raise AssertionError("the draft model has rows of no token")

    def _draft(self, length: int) -> tuple[int, ...]:
        model = self._model
        if self._slot is None:
            self._slot = model.place(self, self._text, self._namespace)
        slot = self._slot
        if slot is None:
            return ()
        unread = self._text[self._settle(slot) :]
        answered = len(self._text) - self._prompt_tokens
        # a text is read once the answer is so long that one as long again would be worth it
        if ROW_COST * self.cost * len(unread) > answered:
            return ()
        if len(unread) > CHUNK:
            model.read(slot, unread[:CHUNK], wanted=False)
            return ()
        sampler = self._sampler.copy(model.sampler)
        drafts: list[int] = []
        row = model.read(slot, unread, wanted=True)
        while True:
            # drawn as the larger model's token at this place will be, so that equal rows give equal tokens
            drafts.append(sampler.sample(row, answered + len(drafts)).token_id)
            if len(drafts) == length:
                return tuple(drafts)
            sampler.observe(drafts[-1])
            row = model.read(slot, drafts[-1:], wanted=True)
            self._ahead.append(drafts[-1])

    def _settle(self, slot: int) -> int:
        """Take back the rows of drafts that the text does not hold; how many are left, fewer than the text has tokens."""
        rows = self._model.length(slot)
        start = rows - len(self._ahead)
        sound = start + common_prefix(self._ahead, self._text[start:], len(self._ahead))
        self._ahead = []
        sound = min(sound, len(self._text) - 1)
        return self._model.rewind(slot, sound) if sound < rows else rows
