"""Sequence: one request inside the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from edge_llm.engine.beams import Beams, Branch
from edge_llm.engine.energy import Account
from edge_llm.engine.reader import MAX_CHOICE_TOKENS, Reader
from edge_llm.engine.request import PRIORITIES
from edge_llm.engine.stream import TextStream
from edge_llm.engine.window import ContextWindow
from edge_llm.errors import EdgeLLMError
from edge_llm.messages import Event, Finished, FinishReason, Timings, Usage
from edge_llm.sampling.decoders import Decoder

Emit = Callable[[Event | EdgeLLMError], None]
"""takes a request's events; `Finished` or an error comes last, once"""


_TURN_S = 10.0
"""seconds for which a request is answered before others, whose turn comes next, may have its slot"""
_TURN_READS = 3.0
"""the same in times of what it took until it was answered: coming back may cost that again"""
_PARKED_S = 30.0
"""seconds that being parked once counts as waiting, lest it is parked each time that it has just been read again"""
_STEPS_BACK_S = dict(zip(PRIORITIES, (0.0, 60.0, 300.0), strict=True))
"""seconds by which a request counts as later than it came"""


class Phase(Enum):
    QUEUED = auto()
    PREFILL = auto()
    DECODE = auto()
    ENDED = auto()


@dataclass(slots=True)
class Marks:
    """When things happened to a request, in seconds of the engine's clock. `entered` and `resumed` are the last times that it
    got a slot, and a token after that."""

    submitted: float
    admitted: float | None = None
    entered: float | None = None
    resumed: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    def slot(self, now: float) -> None:
        """It got a slot."""
        self.entered, self.resumed = now, None
        if self.admitted is None:
            self.admitted = now

    def token(self, now: float) -> None:
        """Tokens were chosen."""
        if self.resumed is None:
            self.resumed = now
        if self.first_token is None:
            self.first_token = now
        self.last_token = now


class Sequence:
    """Tokens of one request and how far they are. Facts are stored once; what follows from them is a property.

    ids    [0, committed)          rows in the cache slot
           [committed, len(ids))   pending: the rest of the prompt, or the last tokens chosen
    """

    __slots__ = (
        "__weakref__",
        "accepted_drafts",
        "account",
        "beams",
        "cached",
        "cancelled",
        "committed",
        "deadline",
        "decoder",
        "drafted",
        "emit",
        "ended",
        "ids",
        "marks",
        "max_tokens",
        "namespace",
        "owner",
        "places",
        "preemptions",
        "priority",
        "progress",
        "prompt_tokens",
        "reached",
        "reader",
        "since",
        "slot",
        "stream",
        "structured",
        "to_read",
        "window",
        "yields",
    )

    def __init__(
        self,
        prompt_ids: list[int],
        *,
        max_tokens: int,
        decoder: Decoder,
        stream: TextStream,
        emit: Emit,
        submitted: float,
        window: ContextWindow,
        places: tuple[range, ...] = (),
        namespace: str | None = None,
        owner: str = "",
        structured: bool = False,
        priority: str = "normal",
        timeout_s: float | None = None,
        reader: Reader | None = None,
        beams: Beams | None = None,
    ) -> None:
        """`max_tokens` bounds the answer, by the context too unless it slides; `places` are where the request's messages
        lie among the prompt's tokens; `namespace` is whom it shares rows with (None: with nobody); `owner` is whose
        it is; `structured` tells that a grammar has a say in where the answer ends; a `reader` takes the place of an
        answer; `beams` are what the decoder looks along."""
        self.ids = prompt_ids
        self.prompt_tokens = len(prompt_ids)
        self.max_tokens = max_tokens
        self.decoder = decoder
        self.stream = stream
        self.emit = emit
        self.marks = Marks(submitted)
        self.window = window
        self.places = places
        self.namespace = namespace
        self.owner = owner
        self.structured = structured
        self.priority = priority
        self.deadline = None if timeout_s is None else submitted + timeout_s
        self.reader = reader
        self.beams = beams
        self.slot: int | None = None
        self.to_read = self.prompt_tokens
        """ids that must be in the cache before the answer begins, or goes on"""
        self.committed = self.cached = 0
        self.reached = self.progress = 0
        """most rows that were there before it was parked; prompt tokens that were told of"""
        self.since = submitted
        """when it has come, or when its turn was over"""
        self.preemptions = 0
        self.yields = 0
        """how often it was parked before its turn was over"""
        self.account: Account | None = None
        """its part of the energy, where that is known"""
        self.drafted = self.accepted_drafts = 0
        self.cancelled = False
        self.ended = False

    @property
    def phase(self) -> Phase:
        if self.ended:
            return Phase.ENDED
        if self.slot is None:
            return Phase.QUEUED
        given = self.reader is not None or self.committed < self.to_read
        return Phase.PREFILL if given else Phase.DECODE

    @property
    def width(self) -> int:
        """Slots that it needs."""
        return 1 if self.beams is None else self.beams.width

    @property
    def branches(self) -> list[Branch]:
        """What it goes on as, of which `ids` and `slot` are one; empty while there is only that."""
        return [] if self.beams is None else self.beams.branches

    @property
    def slots(self) -> list[int]:
        """All that it has."""
        own = [] if self.slot is None else [self.slot]
        return [branch.slot for branch in self.branches] or own

    @property
    def most_rows(self) -> int:
        """Rows that it may come to have, in each of its slots."""
        return self.prompt_tokens + (self.max_tokens if self.reader is None else MAX_CHOICE_TOKENS)

    @property
    def shares_rows(self) -> bool:
        """Whether it may skip rows that others have. A reader needs what follows its prompt."""
        return self.reader is None or len(self.ids) == self.prompt_tokens

    @property
    def urgency(self) -> float:
        """When its turn comes, the smallest first: its arrival, later by what its priority costs and sooner each time that
        it was parked before its turn was over.

        So somebody of a lower priority goes before all who come long enough after, and nobody waits for ever.
        """
        return self._urgency(self.since, self.yields)

    def urgency_if_parked(self, now: float) -> float:
        return self._urgency(*self._parked(now))

    def _urgency(self, since: float, yields: int) -> float:
        return since + max(0.0, _STEPS_BACK_S[self.priority] - _PARKED_S * yields)

    def _parked(self, now: float) -> tuple[float, int]:
        """What `since` and `yields` are once it is parked."""
        return (now, self.yields) if self.had_turn(now) else (self.since, self.yields + 1)

    def had_turn(self, now: float) -> bool:
        """Whether it has been answered for so long that others may go on in its place."""
        marks = self.marks
        if marks.entered is None or marks.resumed is None or self.phase is not Phase.DECODE:
            return False
        return now - marks.resumed >= max(_TURN_S, _TURN_READS * (marks.resumed - marks.entered))

    @property
    def rank(self) -> int:
        """Place of its priority, 0 for the most urgent."""
        return PRIORITIES.index(self.priority)

    @property
    def pending(self) -> int:
        """Tokens that are not in the cache yet."""
        return len(self.ids) - self.committed

    @property
    def room(self) -> int:
        """Tokens that may still be chosen."""
        return self.max_tokens - (len(self.ids) - self.prompt_tokens)

    def found(self, rows: int) -> None:
        """The slot holds the first `rows` rows, of which some did not have to be computed."""
        if not self.preemptions:  # what it computed itself before is no hit
            self.cached += rows - self.committed
        self.committed = rows

    def read_next(self, ids: list[int], rows: int) -> None:
        """Other tokens are to be read now; the slot holds the first `rows` rows."""
        self.ids[:] = ids
        self.committed = rows

    def park(self, now: float) -> None:
        """Wait again, for a slot of somebody more urgent. Nothing is lost but the slot: the decoder goes on where it is."""
        self.since, self.yields = self._parked(now)
        self.reached = max(self.reached, self.committed)
        self.slot, self.committed, self.to_read = None, 0, len(self.ids)
        self.preemptions += 1

    def cancel(self) -> None:
        """Ask for an end, which the next step brings. Any thread."""
        self.cancelled = True

    def finished(self, reason: FinishReason, now: float, joules: float | None = None) -> Finished:
        """The last event, for an end at `now`; it has taken so many `joules`, where that is known."""
        calls = self.stream.tool_calls
        rows = max(self.reached, self.committed)
        return Finished(
            reason=FinishReason.TOOL_CALLS if calls and reason is FinishReason.STOP else reason,
            usage=Usage(
                self.prompt_tokens,
                self.stream.completion_tokens,
                self.cached,
                draft_tokens=self.drafted,
                accepted_draft_tokens=self.accepted_drafts,
                reasoning_tokens=self.stream.reasoning_tokens,
            ),
            timings=self._timings(now, joules),
            seed=self.decoder.seed,
            token_ids=tuple(self.stream.token_ids),
            matched_stop=self.stream.matched_stop,
            forgotten=self.window.forgotten_places(self.places, rows),
            forgotten_tokens=len(self.window.forgotten(rows)),
            tool_calls=calls,
            invalid_tool_calls=self.stream.invalid_tool_calls,
            **({} if self.reader is None else self.reader.results()),
            beams=() if self.beams is None else self.beams.results(),
        )

    def _timings(self, now: float, joules: float | None) -> Timings:
        marks = self.marks
        queue_s = (now if marks.admitted is None else marks.admitted) - marks.submitted
        if marks.admitted is None or marks.first_token is None or marks.last_token is None:
            return Timings(queue_s=queue_s, ttft_s=None, total_s=now - marks.submitted, joules=joules)
        prefill_s = marks.first_token - marks.admitted
        decode_s = marks.last_token - marks.first_token
        steps = self.stream.completion_tokens - 1
        measured = steps > 0 and decode_s > 0
        return Timings(
            queue_s=queue_s,
            ttft_s=marks.first_token - marks.submitted,
            total_s=now - marks.submitted,
            prefill_tokens_per_s=(self.prompt_tokens - self.cached) / prefill_s if prefill_s > 0 else None,
            decode_tokens_per_s=steps / decode_s if measured else None,
            tpot_s=decode_s / steps if measured else None,
            joules=joules,
        )
