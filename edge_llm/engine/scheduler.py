"""Scheduler: who waits, who runs, and what the next step computes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from edge_llm.engine.owners import Owners, slots_held
from edge_llm.engine.pace import Pace, Portion
from edge_llm.engine.parking import victims
from edge_llm.engine.sequence import Phase, Sequence
from edge_llm.engine.waiting import QueueLimits, WaitingQueue
from edge_llm.errors import ParameterError, QueueFullError
from edge_llm.model.step import Segment, Step

_FIRST_GUESS_S = 1.0  # how long a request runs
_STEP_BACK_S = 0.005
"""seconds by which each token that is still to be read makes a prompt count as later than it came"""


@dataclass(frozen=True, slots=True)
class Share:
    """One sequence's part of a step. The last `drafts` tokens of `segment` are guesses. `others` are like it, for branches
    beside the first."""

    sequence: Sequence
    segment: Segment
    drafts: int
    others: tuple[Segment, ...] = ()

    @property
    def segments(self) -> tuple[Segment, ...]:
        return (self.segment, *self.others)

    @property
    def rows(self) -> int:
        return sum(segment.rows for segment in self.segments)

    @property
    def logit_rows(self) -> int:
        return sum(segment.logit_rows for segment in self.segments)


@dataclass(frozen=True)
class Plan:
    """What the next step computes, in the order in which logits come back; the first `answered` shares go on with answers.
    `held` answers stand still, for a long prompt."""

    shares: tuple[Share, ...]
    answered: int = 0
    held: int = 0

    @property
    def answers(self) -> int:
        """What goes on in the first shares: one answer each, or several branches of it."""
        return sum(len(share.segments) for share in self.shares[: self.answered])

    @property
    def prompt_rows(self) -> int:
        return sum(share.segment.rows for share in self.shares[self.answered :])

    @property
    def depth(self) -> int:
        """Rows that the first prompt of the step has already."""
        return self.shares[self.answered].segment.position if self.prompt_rows else 0

    @cached_property
    def step(self) -> Step:
        return Step(tuple(segment for share in self.shares for segment in share.segments))


@dataclass(frozen=True, slots=True)
class Capacity:
    """What those who run share: `slots`, and `kv_bytes` of keys and values (None: any), of which each takes `kv_bytes_of`
    its longest answer, and one at a time `draft_bytes_of` it besides."""

    slots: int
    kv_bytes: int | None = None
    kv_bytes_of: Callable[[int], int] = lambda rows: 0
    draft_bytes_of: Callable[[int], int] = lambda rows: 0


class Scheduler:
    """The most urgent first, within bounds.

    `check_room` and `enqueue` may be called from any thread; everything else from the one that runs the steps.
    """

    def __init__(self, *, capacity: Capacity, max_rows: int, pace: Pace, limits: QueueLimits) -> None:
        """`max_rows` bounds the rows of a step and is at least the slots, so that everybody answered gets a row."""
        self._capacity, self._max_rows, self._pace = capacity, max_rows, pace
        self._lock = threading.Lock()
        self._waiting = WaitingQueue(limits)
        self._running: list[Sequence] = []
        self._owners = Owners()
        self._mean_s = _FIRST_GUESS_S
        self.refused = 0
        """requests for which there was no room"""

    def __len__(self) -> int:
        """Requests that are not done."""
        with self._lock:
            return len(self._waiting) + len(self._running)

    @property
    def counts(self) -> tuple[int, int]:
        """Requests that run, and that wait."""
        with self._lock:
            return len(self._running), len(self._waiting)

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """All that are not done, the running ones first."""
        with self._lock:
            return (*self._running, *self._waiting)

    def check_room(self, priority: str, owner: str, prompt_tokens: int = 1) -> None:
        """Raises `QueueFullError` if a request would have to wait and too much waits already."""
        with self._lock:
            self._check_room(priority, owner, prompt_tokens)

    def enqueue(self, sequence: Sequence) -> None:
        """Add a request. Raises `QueueFullError` as `check_room`."""
        with self._lock:
            self._check_room(sequence.priority, sequence.owner, sequence.prompt_tokens)
            self._waiting.add(sequence)

    def _check_room(self, priority: str, owner: str, prompt_tokens: int) -> None:
        slots = self._capacity.slots
        free = slots - self.used_slots
        try:
            self._waiting.check_room(priority, owner, prompt_tokens, free=free, retry_s=self._mean_s / slots)
        except QueueFullError:
            self.refused += 1
            raise

    def admit(self, acquire: Callable[[Sequence], int | None], now: float, *, before: Sequence | None = None) -> None:
        """Give those who wait the slots that `acquire` has, in their turn, one of them `before` all others: who is too large
        now keeps others waiting too."""
        sequence = before or self.next_waiting()
        while sequence is not None and self._fits(sequence):
            slot = acquire(sequence)
            if slot is None:
                return
            with self._lock:
                self._waiting.remove(sequence)
                sequence.slot = slot
                sequence.marks.slot(now)
                self._running.append(sequence)
            sequence = self.next_waiting()

    def victims(self, first: Sequence, now: float) -> list[Sequence]:
        """Who is to be parked so that `first` can run."""
        return victims(first, self._running, lambda chosen: self._fits(first, without=chosen), now)

    def park(self, sequence: Sequence, now: float) -> None:
        """Let somebody who runs wait again."""
        with self._lock:
            self._running.remove(sequence)
            sequence.park(now)
            self._waiting.add(sequence)

    def next_waiting(self) -> Sequence | None:
        """Who gets the next slot."""
        with self._lock:
            firsts = self._waiting.firsts
        self._owners.update([*firsts, *self._prompts()])
        return self._owners.first(firsts, slots_held(self._running))

    def _fits(self, sequence: Sequence, without: Collection[Sequence] = ()) -> bool:
        """Whether it can run beside those who do, but for those `without` whom it is to be."""
        others = [running for running in self._running if running not in without]
        if _slots(*others, sequence) > self._capacity.slots:
            return False
        return self._capacity.kv_bytes is None or self.reserved_bytes(sequence, *others) <= self._capacity.kv_bytes

    def reserved_bytes(self, *sequences: Sequence) -> int:
        """Bytes of keys and values that these may come to hold."""
        own = sum(one.width * self._capacity.kv_bytes_of(one.most_rows) for one in sequences)
        return own + self._capacity.draft_bytes_of(max((one.most_rows for one in sequences), default=0))

    @property
    def used_slots(self) -> int:
        """Slots of those who run, also such as their branches will need."""
        return _slots(*self._running)

    def check_fits(self, sequence: Sequence) -> None:
        """Raises `ParameterError` if its branches are too many or too large even if nobody else runs."""
        if sequence.width > self._capacity.slots:
            raise ParameterError(
                f"{sequence.width} beams need as many slots, this engine has {self._capacity.slots}",
                hint="ask for fewer beams, or open the engine with more slots",
            )
        needed, most = self.reserved_bytes(sequence), self._capacity.kv_bytes
        if most is not None and needed > most:
            raise ParameterError(
                f"{sequence.width} beams may take {needed >> 20} MiB of keys and values, this engine has {most >> 20}",
                hint="lower max_tokens or the number of beams",
            )

    @property
    def running(self) -> tuple[Sequence, ...]:
        return tuple(self._running)

    def remove(self, sequence: Sequence, now: float) -> None:
        """Forget a request that is done."""
        with self._lock:
            if sequence in self._running:
                self._running.remove(sequence)
                if sequence.marks.admitted is not None:
                    self._mean_s += (now - sequence.marks.admitted - self._mean_s) / 8
            else:
                self._waiting.remove(sequence)

    def plan(self, waiting: Container[Sequence] = ()) -> Plan:
        """The next step: a row for everybody who is being answered, then as much prompt as the pace allows.

        Prompts of those `waiting` are not read in it. Changes nothing; empty if nobody runs.
        """
        decoding = [sequence for sequence in self._running if sequence.phase is Phase.DECODE]
        prompts = [sequence for sequence in self.reading() if sequence not in waiting]
        answers, portion = _slots(*decoding), Portion(0)
        if prompts:
            first, *others = prompts
            behind = sum(other.pending for other in others)
            portion = self._pace.portion(answers, first.committed, first.pending, behind)
        if portion.holds:
            return Plan(tuple(_in_turn(prompts, min(portion.rows, self._max_rows))), held=answers)
        shares: list[Share] = []
        rows, behind = self._max_rows, answers
        for sequence in decoding:
            behind -= sequence.width
            share = _share(sequence, rows - behind)
            shares.append(share)
            rows -= share.rows
        return Plan((*shares, *_in_turn(prompts, min(rows, portion.rows))), len(decoding))

    def reading(self) -> list[Sequence]:
        """Those whose prompt is being read, the next first: the shorter the rest of it, the sooner, for nobody is answered
        before all of it is read. As with priorities, who came long enough before goes first. Owners share evenly."""
        prompts = sorted(self._prompts(), key=lambda sequence: sequence.urgency + sequence.pending * _STEP_BACK_S)
        return self._owners.in_turn(prompts)

    def _prompts(self) -> list[Sequence]:
        return [sequence for sequence in self._running if sequence.phase is Phase.PREFILL]

    def served(self, sequence: Sequence, rows: int) -> None:
        """A step has computed so many rows for a sequence; to be told before they are committed."""
        self._owners.served(sequence, rows)


def _slots(*sequences: Sequence) -> int:
    return sum(one.width for one in sequences)


def _in_turn(prompts: Iterable[Sequence], rows: int) -> Iterator[Share]:
    """As much of prompts, one after another, as fits into `rows`."""
    for sequence in prompts:
        if rows > 0:
            share = _share(sequence, rows)
            yield share
            rows -= share.segment.rows


def _share(sequence: Sequence, rows: int) -> Share:
    """As much of `sequence` as fits into `rows`; logits, and drafts after it, only where its tokens end."""
    assert sequence.slot is not None
    if sequence.branches:
        first, *others = (Segment(one.slot, sequence.committed, one.ids[-1:], 1) for one in sequence.branches)
        return Share(sequence, first, 0, tuple(others))
    count = min(sequence.pending, rows)
    tokens = sequence.ids[sequence.committed : sequence.committed + count]
    if sequence.reader is not None:
        wanted = sequence.reader.logit_rows(sequence.committed, sequence.committed + count)
        return Share(sequence, Segment(sequence.slot, sequence.committed, tokens, wanted), 0)
    if count < sequence.pending:
        return Share(sequence, Segment(sequence.slot, sequence.committed, tokens), 0)
    # each draft may be accepted, and one more token is always chosen
    try:
        drafts = sequence.decoder.propose(max(0, min(rows - count, sequence.room - 1)))
    except Exception:  # a guess that fails is none; everybody else's step must not fail with it
        drafts = ()
    segment = Segment(sequence.slot, sequence.committed, [*tokens, *drafts], 1 + len(drafts))
    return Share(sequence, segment, len(drafts))
