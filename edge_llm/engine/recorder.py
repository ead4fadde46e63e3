"""Recorder: what happens to requests, in the terms of metrics."""

from __future__ import annotations

from collections.abc import Iterable

from edge_llm.cache.prefix_cache import Placed
from edge_llm.engine.energy import EnergyMeter
from edge_llm.engine.scheduler import Share
from edge_llm.engine.sequence import Sequence
from edge_llm.errors import EdgeLLMError
from edge_llm.messages import Event, Finished, FinishReason
from edge_llm.metrics import Metrics

MEMORY, DISK = "memory", "disk"
"""tiers in which rows of a prompt are found"""


class Recorder:
    """Keeps an engine's `metrics`, and the marks of its sequences that they follow from."""

    def __init__(self, energy: EnergyMeter | None = None) -> None:
        self.metrics = Metrics()
        self._energy = energy

    @property
    def joules(self) -> float | None:
        """What all steps took; None where nobody tells."""
        return None if self._energy is None else self._energy.joules

    def joules_of(self, sequence: Sequence, now: float) -> float | None:
        """What a request has taken so far."""
        if self._energy is None or sequence.account is None:
            return None
        return self._energy.of(sequence.account, now)

    def began(self, now: float) -> None:
        """A step begins."""
        if self._energy is not None:
            self._energy.began(now)

    def stepped(self, shares: Iterable[Share], rows: int, now: float, seconds: float) -> None:
        """A step of so many rows has taken so long."""
        self.metrics.num_steps.add()
        if self._energy is None:
            return
        self._energy.ended(now, seconds)
        for share in shares:
            assert share.sequence.account is not None
            share.sequence.account.work_s += seconds * share.rows / rows

    def placed(self, sequence: Sequence, placed: Placed) -> None:
        """A request has got a slot, and rows with it; what it finds of its own after it was parked is no hit."""
        if self._energy is not None and sequence.account is None:
            sequence.account = self._energy.open()
        if sequence.preemptions:
            return
        self.metrics.prefix_cache_queries.add(sequence.prompt_tokens)
        self.metrics.prefix_cache_hits[DISK] += placed.stored
        self.metrics.prefix_cache_hits[MEMORY] += placed.rows - placed.stored

    def caught_up(self, sequence: Sequence, rows: int) -> None:
        """It has so many rows now, some of them from somebody who reads the same prompt."""
        if not sequence.preemptions:
            self.metrics.prefix_cache_hits[MEMORY] += rows - sequence.committed

    def chosen(self, sequence: Sequence, now: float) -> None:
        """A step has given a request tokens."""
        marks, metrics = sequence.marks, self.metrics
        if marks.last_token is not None:
            metrics.inter_token_latency_seconds.observe(now - marks.last_token)
        else:
            assert marks.admitted is not None
            metrics.time_to_first_token_seconds.observe(now - marks.submitted)
            metrics.request_prefill_time_seconds.observe(now - marks.admitted)
            metrics.prompt_tokens.add(sequence.prompt_tokens)
        marks.token(now)

    def read(self, sequence: Sequence, now: float) -> None:
        """A request that is read and not answered has been read."""
        assert sequence.marks.admitted is not None
        self.metrics.request_prefill_time_seconds.observe(now - sequence.marks.admitted)
        self.metrics.prompt_tokens.add(sequence.prompt_tokens)

    def drafted(self, sequence: Sequence, drafts: int, right: int) -> None:
        """Drafts were tried."""
        sequence.drafted += drafts
        sequence.accepted_drafts += right
        if drafts:
            self.metrics.spec_decode_num_drafts.add()
            self.metrics.spec_decode_num_draft_tokens.add(drafts)
            self.metrics.spec_decode_num_accepted_tokens.add(right)

    def ended(self, sequence: Sequence, last: Event | EdgeLLMError) -> None:
        """A request is over."""
        marks, metrics = sequence.marks, self.metrics
        if not isinstance(last, Finished):
            metrics.request_errors[type(last).__name__] += 1
            return
        metrics.request_success[last.reason.value] += 1
        if sequence.structured and last.reason in (FinishReason.LENGTH, FinishReason.TIMEOUT):
            metrics.truncated_structures.add()
        metrics.invalid_tool_calls.add(last.invalid_tool_calls)
        metrics.request_queue_time_seconds.observe(last.timings.queue_s)
        metrics.e2e_request_latency_seconds.observe(last.timings.total_s)
        metrics.request_prompt_tokens.observe(last.usage.prompt_tokens)
        metrics.request_generation_tokens.observe(last.usage.completion_tokens)
        if marks.first_token is not None and marks.last_token is not None:
            metrics.request_decode_time_seconds.observe(marks.last_token - marks.first_token)
