"""EngineCore: the synchronous engine. One thread calls `step`; it plans, runs, selects, commits and emits."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np

from edge_llm import machine
from edge_llm.cache.blocks import BlockStore
from edge_llm.cache.kv_cache import KVCache
from edge_llm.cache.prefix_cache import common_prefix
from edge_llm.config import EngineConfig
from edge_llm.engine.beams import Branch
from edge_llm.engine.energy import EnergyMeter
from edge_llm.engine.info import EngineInfo
from edge_llm.engine.intake import Intake
from edge_llm.engine.pace import ChunkPolicy, Pace
from edge_llm.engine.reader import Reader
from edge_llm.engine.recorder import Recorder
from edge_llm.engine.request import Request
from edge_llm.engine.scheduler import Capacity, Plan, Scheduler, Share
from edge_llm.engine.sequence import Emit, Sequence
from edge_llm.engine.slots import Slots
from edge_llm.engine.waiting import QueueLimits
from edge_llm.errors import EdgeLLMError, EngineStoppedError, GenerationError, SessionError
from edge_llm.messages import Event, Finished, FinishReason, PromptProgress, TextDelta
from edge_llm.metrics import Statistics
from edge_llm.model.step import Step
from edge_llm.sampling.decoders import Selection

Chosen = list[tuple[Share, Selection | None]]
"""what each sequence of a step chose; None where a prompt goes on"""


class StepSession(Protocol):
    """What the engine asks of a model."""

    max_rows: int

    def forward(self, step: Step) -> np.ndarray:
        """float32 [step.logit_rows, vocab], valid until the next call. Raises `SessionError`."""
        ...

    def hidden_states(self, rows: int) -> np.ndarray:
        """float32 [rows, hidden] of the last step's rows, after the final norm; valid until the next call."""
        ...

    def close(self) -> None: ...


class EngineCore:
    """A session, its cache and the sequences that use them.

    `prepare` and `enqueue` may be called from any thread, all else from the one that runs the steps. Each sequence that
    was enqueued ends exactly once: with `Finished`, or with an error.
    """

    def __init__(
        self,
        *,
        session: StepSession,
        cache: KVCache,
        intake: Intake,
        config: EngineConfig,
        store: BlockStore | None = None,
        kv_budget: int | None = None,
        energy: EnergyMeter | None = None,
        layout: str = "ring",
        provider: str = "cpu",
        notice: str = "",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`store` keeps prefixes for longer than the engine. The cache has at least the config's slots: more of them keep rows
        of those who do not run. It never holds more than `kv_budget` bytes (None: any) after a step, those of the intake's draft
        model among them. `energy` is asked about each step. `layout`, `provider` and `notice` are told as `info`."""
        self.intake = intake
        self.cache = cache
        self._most_slots, self._kv_budget, self._draft_model = config.slots, kv_budget, intake.draft_model
        self._layout, self._provider, self._notice = layout, provider, notice
        self.session = session
        """the model; whoever runs steps of their own (a benchmark) does so while no request runs"""
        self._clock = clock
        self._recorder = Recorder(energy)
        self._pace = Pace(ChunkPolicy(config.max_chunk, config.mixed_chunk, config.mixed_pause_ms / 1000))
        capacity = Capacity(config.slots, kv_budget, cache.bytes_of)
        if self._draft_model is not None:
            capacity = replace(capacity, draft_bytes_of=self._draft_model.bytes_of)
        self._scheduler = Scheduler(
            capacity=capacity,
            max_rows=session.max_rows,
            pace=self._pace,
            limits=QueueLimits(config.queue_limit, config.max_queued_tokens),
        )
        shares = config.prefix_cache != "off"
        self._slots = Slots(
            cache,
            store,
            self._scheduler,
            self._recorder,
            shares_prefixes=shares,
            kv_budget=kv_budget,
            draft_model=self._draft_model,
        )

    @property
    def info(self) -> EngineInfo:
        """What this engine is."""
        manifest = self.intake.manifest
        return EngineInfo(
            name=manifest.name,
            context=self.cache.context,
            slots=self._most_slots,
            vocab=manifest.dimensions.vocab,
            chats=self.intake.template is not None,
            tokenizer_digest=self.intake.tokenizer.digest,
            layout=self._layout,
            kv_type=self.cache.kv_type.name.lower(),
            parameters=manifest.parameters,
            weights_bytes=manifest.weight_bytes,
            provider=self._provider,
            notice=self._notice,
        )

    @property
    def has_work(self) -> bool:
        return len(self._scheduler) > 0

    @property
    def free_slots(self) -> int:
        """Slots that no request runs in."""
        return self._most_slots - self._scheduler.used_slots

    def prepare(self, request: Request, emit: Emit) -> Sequence:
        """Check and tokenise a request, whose events will go to `emit`. Raises what `EngineClient.submit` raises."""
        # before any work: who has too much to do must say so at once
        self._scheduler.check_room(request.priority, request.owner)
        sequence = self.intake.sequence(request, emit, self._clock)
        self._scheduler.check_fits(sequence)
        return sequence

    def enqueue(self, sequence: Sequence) -> None:
        """Let a prepared sequence take part in the steps. Raises `QueueFullError`."""
        self._scheduler.enqueue(sequence)

    def statistics(self) -> Statistics:
        """How the engine is doing. Any thread."""
        running, waiting = self._scheduler.counts
        held, most = self.cache.used_bytes, self._kv_budget or self.cache.nbytes
        if self._draft_model is not None:
            held += self._draft_model.used_bytes
        return Statistics.of(
            self._recorder.metrics,
            num_requests_running=running,
            num_requests_waiting=waiting,
            admission_rejections=self._scheduler.refused,
            kv_cache_bytes=held,
            kv_cache_usage_perc=held / most if most else 0.0,
            rss_bytes=machine.resident_memory(),
            energy_joules=self._recorder.joules,
        )

    def step(self) -> None:
        """Compute one step and tell its results; nothing if there is no work.

        A request that fails ends alone. If the session fails, all requests of the step end with its `SessionError`.
        """
        plan = self._plan()
        if not plan.shares:
            return
        start = self._clock()
        self._recorder.began(start)
        try:
            logits = self.session.forward(plan.step)
        except SessionError as error:
            self._fail_step(plan, error)
            return
        chosen = self._select(plan, logits)
        now = self._clock()
        self._pace.observe(plan.answers, plan.prompt_rows, plan.depth, now - start, held=plan.held)
        self._recorder.stepped(plan.shares, plan.step.rows, now, now - start)
        self._commit(chosen, now)
        self._emit(chosen)

    def close(self, failure: BaseException | None = None) -> None:
        """End what is left, cancelled or with the `failure` that stopped the engine; then free the model."""
        for sequence in self._scheduler.sequences:
            if failure is None:
                self._finish(sequence, FinishReason.CANCELLED)
            else:
                error = EngineStoppedError(f"the engine has stopped: {failure!r}")
                error.__cause__ = failure
                self._end(sequence, error)
        self.intake.close()
        self._slots.prefixes.close()
        self.session.close()
        self.cache.close()

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless slots, lengths and sequences agree."""
        self._slots.check_integrity()
        if self._scheduler.used_slots > self._most_slots:
            raise AssertionError(f"{self._scheduler.used_slots} slots are promised, there are {self._most_slots}")

    # --- the parts of a step ---

    def _plan(self) -> Plan:
        now = self._clock()
        for sequence in self._scheduler.sequences:
            if sequence.cancelled:
                self._finish(sequence, FinishReason.CANCELLED)
            elif sequence.deadline is not None and sequence.deadline <= now:
                self._finish(sequence, FinishReason.TIMEOUT)
        self._slots.admit(now)
        return self._scheduler.plan(self._slots.catch_up())

    def _select(self, plan: Plan, logits: np.ndarray) -> Chosen:
        """Ask each decoder that got logits, and let readers take theirs; one that fails leaves the step."""
        chosen: Chosen = []
        row = first = 0
        for share in plan.shares:
            segment, sequence = share.segment, share.sequence
            rows = logits[row : row + share.logit_rows]
            selection = None
            try:
                if sequence.reader is not None:
                    hidden = self.session.hidden_states(plan.step.rows)[first : first + segment.rows]
                    sequence.reader.feed(segment.position, hidden, rows)
                elif share.logit_rows:
                    selection = sequence.decoder.select(rows)
                    assert len(selection.accepted) <= len(rows), "more tokens accepted than there were logits"
                    chose = selection.accepted or selection.forced or selection.finish or selection.branches
                    assert chose, "nothing was chosen"
                chosen.append((share, selection))
            except Exception as error:
                self._fail(sequence, error)
            row, first = row + share.logit_rows, first + share.rows
        return chosen

    def _commit(self, chosen: Chosen, now: float) -> None:
        """Keep the rows that count: all but those of drafts that were not accepted."""
        for share, selection in chosen:
            sequence = share.sequence
            rows = share.segment.rows - share.drafts
            if selection is not None:
                self._recorder.chosen(sequence, now)
            if selection is not None and sequence.beams is None:
                right = max(0, len(selection.accepted) - 1)
                rows += right
                self._recorder.drafted(sequence, share.drafts, right)
                sequence.ids.extend(token.token_id for token in selection.accepted)
                sequence.ids.extend(selection.forced)
            assert sequence.slot is not None
            for segment in share.segments:
                self.cache.commit(segment.slot, rows)
            self._scheduler.served(sequence, rows * len(share.segments))
            sequence.committed += rows
            self._slots.prefixes.committed(sequence.slot)
            if selection is not None and sequence.beams is not None:
                sequence.beams.follow(selection.branches, Branch(sequence.slot, sequence.ids), self._slots.prefixes)

    def _emit(self, chosen: Chosen) -> None:
        for share, selection in chosen:
            sequence = share.sequence
            done = min(sequence.committed, sequence.prompt_tokens)
            if done > sequence.progress:  # not again, after it was parked
                sequence.progress = done
                sequence.emit(PromptProgress(done, sequence.prompt_tokens))
            if selection is None:
                if sequence.reader is not None and not sequence.pending:
                    self._read_on(sequence, sequence.reader)
                continue
            told = sequence.stream.completion_tokens
            try:
                deltas = sequence.stream.feed(selection)
            except Exception as error:
                self._fail(sequence, error)
                continue
            self._recorder.metrics.generation_tokens.add(sequence.stream.completion_tokens - told)
            for delta in deltas:
                sequence.emit(delta)
            if sequence.stream.finish is not None:
                self._finish(sequence, sequence.stream.finish)

    def _read_on(self, sequence: Sequence, reader: Reader) -> None:
        """All tokens of a reader are read: on to others, or to its end."""
        try:
            ids = reader.following()
        except Exception as error:
            self._fail(sequence, error)
            return
        wanted = sequence.ids[: sequence.prompt_tokens] if ids is None else ids  # whoever comes next finds the prompt
        if wanted != sequence.ids:
            same = common_prefix(sequence.ids, wanted, len(wanted))
            self._slots.read_next(sequence, wanted, same)
        if ids is None:
            self._recorder.read(sequence, self._clock())
            if reader.text:
                sequence.emit(TextDelta(reader.text))
            self._finish(sequence, FinishReason.STOP)

    # --- ends ---

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End with `Finished`, after the text that was held back."""
        try:
            deltas = []
            if sequence.beams is not None and sequence.stream.finish is None:  # it is cut: the best so far has to do
                deltas += sequence.stream.feed(sequence.beams.best)
            deltas += sequence.stream.flush()
            now = self._clock()
            last = sequence.finished(reason, now, self._recorder.joules_of(sequence, now))
        except Exception as error:
            self._fail(sequence, error)
            return
        for delta in deltas:
            sequence.emit(delta)
        self._end(sequence, last)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        """End one request with its error; others go on."""
        if not isinstance(error, EdgeLLMError):
            cause = error
            error = GenerationError(f"the request failed: {cause!r}")
            error.__cause__ = cause
        self._end(sequence, error)

    def _fail_step(self, plan: Plan, error: SessionError) -> None:
        for share in plan.shares:
            # an error of its own for each reader: a raised one collects its raiser's traceback
            own = SessionError(str(error), hint=error.hint)
            own.__cause__ = error
            self._end(share.sequence, own)

    def _end(self, sequence: Sequence, last: Event | EdgeLLMError) -> None:
        """The one way out: the slot is free to others before the reader hears of it."""
        assert not sequence.ended
        sequence.ended = True
        self._scheduler.remove(sequence, self._clock())
        self._recorder.ended(sequence, last)
        self._slots.release(sequence, keep=isinstance(last, Finished))
        sequence.emit(last)
