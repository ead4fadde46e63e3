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
_FIRST_CREDIT, _MOST_CREDIT = 8.0, 256.0
"""steps of the larger model that it may cost before it has saved any, and however many it has saved"""
_SHARE = 0.05
"""of the steps of an answer, which it may cost in any case: so it is tried again now and then"""


class DraftModel:
    """Drafts for one conversation at a time, and only while its engine has no other: several share each load of the larger
    model's weights as it is. What it has read of the others stays for as long as there is room.

    It keeps an account, in steps of the larger model: each draft that was right has saved one, each row that it computes costs
    its part. Who has no credit does nothing, so whoever chose a bad one loses some steps and a twentieth.

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
        self._credit = _FIRST_CREDIT

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

    def earn(self, tokens: int, right: int) -> None:
        """Answers are so many tokens longer, of which so many were drafts."""
        self._credit = min(_MOST_CREDIT, self._credit + _SHARE * tokens + right)

    def spend(self, steps: float, *, whole: float) -> bool:
        """Whether something may be done that takes so many `steps`, and with what must follow it `whole`; then it is paid."""
        if whole > self._credit:
            return False
        self._credit -= steps
        return True

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
        self._drafts: list[int] = []
        """the last ones, until it is known what has become of them"""
        self._told = len(ids)
        """tokens of the text that the account knows of"""
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
        self._account()
        if self._slot is None:
            self._slot = model.place(self, self._text, self._namespace)
        slot = self._slot
        if slot is None:
            return ()
        unread = self._text[self._settle(slot) :]
        answered = len(self._text) - self._prompt_tokens
        reading = ROW_COST * self.cost * (len(unread) - 1)
        # a text is read once the answer is so long that one as long again would be worth it
        if reading > answered:
            return ()
        if len(unread) > CHUNK:
            if model.spend(ROW_COST * self.cost * CHUNK, whole=reading):
                model.read(slot, unread[:CHUNK], wanted=False)
            return ()
        price = reading + self.cost * length
        if not model.spend(price, whole=price):
            return ()
        sampler = self._sampler.copy(model.sampler)
        row = model.read(slot, unread, wanted=True)
        while True:
            # drawn as the larger model's token at this place will be, so that equal rows give equal tokens
            self._drafts.append(sampler.sample(row, answered + len(self._drafts)).token_id)
            if len(self._drafts) == length:
                return tuple(self._drafts)
            sampler.observe(self._drafts[-1])
            row = model.read(slot, self._drafts[-1:], wanted=True)
            self._ahead.append(self._drafts[-1])

    def _account(self) -> None:
        """Tell what has become of the last drafts."""
        right = common_prefix(self._drafts, self._text[self._told :], len(self._drafts))
        self._model.earn(len(self._text) - self._told, right)
        self._drafts, self._told = [], len(self._text)

    def _settle(self, slot: int) -> int:
        """Take back the rows of drafts that the text does not hold; how many are left, fewer than the text has tokens."""
        rows = self._model.length(slot)
        start = rows - len(self._ahead)
        sound = start + common_prefix(self._ahead, self._text[start:], len(self._ahead))
        self._ahead = []
        sound = min(sound, len(self._text) - 1)
        return self._model.rewind(slot, sound) if sound < rows else rows
