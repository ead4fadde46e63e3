"""Benchmark: how fast the model alone is, in llama-bench's terms, sampling, text and scheduling left out; and several
conversations at once, all of that included."""

from __future__ import annotations

import time
from collections.abc import Sequence

from edge_llm.engine.core import EngineCore
from edge_llm.engine.request import Request
from edge_llm.engine.sequence import Phase
from edge_llm.errors import EdgeLLMError, ParameterError
from edge_llm.messages import Event
from edge_llm.model.step import Segment, Step
from edge_llm.sampling.params import SamplingParams


class Benchmark:
    """Measures steps of one conversation in a slot of an engine's cache, or of several by the engine itself. Nothing else may
    use the engine meanwhile."""

    def __init__(self, core: EngineCore, token_ids: Sequence[int]) -> None:
        """`token_ids` are what is computed, from the first on; as many as the context has."""
        slot = core.cache.acquire()
        assert slot is not None, "the engine is in use"
        self._session, self._cache, self._slot, self._ids = core.session, core.cache, slot, token_ids
        self._core = core

    def prefill(self, depth: int, tokens: int) -> float:
        """Seconds for `tokens` tokens of prompt after `depth` others, in chunks of the session's rows, the last one's
        logits included. Raises `ParameterError` if the context has no room for them."""
        self._move_to(depth, tokens)
        start = time.perf_counter()
        self._read(depth + tokens, logits=1)
        return time.perf_counter() - start

    def decode(self, depth: int, tokens: int) -> float:
        """Seconds for `tokens` tokens one by one, the first after `depth` others. Raises as `prefill`."""
        self._move_to(depth, tokens)
        start = time.perf_counter()
        for position in range(depth, depth + tokens):
            self._step(position, 1, logits=1)
        return time.perf_counter() - start

    def together(self, prompts: Sequence[Sequence[int]], tokens: int) -> float:
        """Seconds for `tokens` steps of the engine while all `prompts` are being answered, greedily: planning, sampling, text
        and events included. An answer may have a quarter of the context."""
        core = self._core
        params = SamplingParams(max_tokens=self._cache.context // 4, temperature=0.0, ignore_eos=True)
        running = []
        try:
            for ids in prompts:
                running.append(core.prepare(Request(token_ids=tuple(ids), params=params), _raise_failure))
                core.enqueue(running[-1])
            while any(sequence.phase in (Phase.QUEUED, Phase.PREFILL) for sequence in running):
                core.step()
            start = time.perf_counter()
            for _ in range(tokens):
                core.step()
            return time.perf_counter() - start
        finally:
            for sequence in running:
                sequence.cancel()
            core.step()

    def _move_to(self, depth: int, tokens: int) -> None:
        if depth + tokens > self._cache.context:
            raise ParameterError(
                f"{tokens} tokens after {depth} do not fit into the context of {self._cache.context}",
                hint="measure less, or a model with a larger context",
            )
        length = self._cache.length(self._slot)
        if length > depth and not self._cache.truncate(self._slot, depth):
            self._cache.truncate(self._slot, 0)  # a local layer has forgotten what those rows attend to
        self._read(depth, logits=0)

    def _read(self, end: int, logits: int) -> None:
        """Compute the tokens up to `end` in chunks."""
        while (start := self._cache.length(self._slot)) < end:
            rows = min(self._session.max_rows, end - start)
            self._step(start, rows, logits if start + rows == end else 0)

    def _step(self, position: int, rows: int, logits: int) -> None:
        ids = self._ids[position : position + rows]
        self._session.forward(Step((Segment(self._slot, position, ids, logits),)))
        self._cache.commit(self._slot, rows)


def _raise_failure(event: Event | EdgeLLMError) -> None:
    if isinstance(event, EdgeLLMError):
        raise event
