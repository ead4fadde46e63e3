"""TextStream: from the tokens of one answer to its text, reasoning and tool calls, and the rules by which it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from edge_llm.messages import FinishReason, ReasoningDelta, TextDelta, TokenInfo, TokenLogprob, ToolCall, ToolCallDelta
from edge_llm.sampling.decoders import Selection
from edge_llm.sampling.params import SamplingParams
from edge_llm.sampling.sampler import Sampled
from edge_llm.text.channels import ChannelSplitter
from edge_llm.text.stops import StopMatcher
from edge_llm.text.tokenizer import Tokenizer
from edge_llm.text.tool_calls import MAX_CALLS, ToolCallParser

Delta = TextDelta | ReasoningDelta | ToolCallDelta


@dataclass(frozen=True, slots=True)
class AnswerReaders:
    """What finds reasoning and tool calls in an answer's text; None where there are none to find.

    `markers` are ids that have to be shown to them, special or not; the answer ends after `max_calls`.
    """

    reasoning: ChannelSplitter | None = None
    calls: ToolCallParser | None = None
    markers: frozenset[int] = frozenset()
    max_calls: int = MAX_CALLS


class TextStream:
    """Feed it what a decoder chose in each step; it gives the deltas of the step.

    The answer ends (`finish`) with an end token or a token that a stop names, which are never shown; before a stop
    string in its text, reasoning and calls apart; after the last call that it may hold; or at `max_tokens`. Reports of
    tokens wait for text to go with, so that none runs ahead into a stop string; tokens of reasoning and calls have none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        *,
        end_ids: frozenset[int],
        max_tokens: int,
        readers: AnswerReaders | None = None,
    ) -> None:
        self._readers = readers or AnswerReaders()
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer(shown=self._readers.markers)
        self._stops = StopMatcher(params.stop) if params.stop else None
        self._stop_ids = {tokenizer.added_tokens[stop]: stop for stop in params.stop if stop in tokenizer.added_tokens}
        self._end_ids = end_ids
        self._max_tokens = max_tokens
        self._reports: list[TokenInfo] = []
        self._deltas: list[Delta] = []
        self._ended_in_text = False
        self.token_ids: list[int] = []
        """ids of the answer, without the token that ended it"""
        self.completion_tokens = 0
        """tokens chosen, the one that ended the answer included"""
        self.reasoning_tokens = 0
        """those of them that belong to reasoning"""
        self.matched_stop: str | None = None
        self.finish: FinishReason | None = None

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls so far, all whole."""
        return tuple(self._readers.calls.calls) if self._readers.calls else ()

    @property
    def invalid_tool_calls(self) -> int:
        return self._readers.calls.invalid if self._readers.calls else 0

    def feed(self, selection: Selection) -> list[Delta]:
        """What a step's tokens say; what comes after the end is dropped."""
        for token in (*selection.accepted, *map(Sampled, selection.forced)):
            self._take(token)
            if self.finish is not None:
                break
        else:
            self.finish = selection.finish
        return self._told(waits=True)

    def flush(self) -> list[Delta]:
        """What was held back, once the answer has ended. Half a character at the very end is never shown."""
        if self._ended_in_text:
            return []
        reasoning, calls = self._readers.reasoning, self._readers.calls
        self._read(reasoning.flush() if reasoning else [])
        self._tell(calls.flush() if calls else [])
        if self._stops is not None and not self._ended_in_text:
            self._say(self._stops.flush())
        return self._told(waits=False)

    def _take(self, token: Sampled) -> None:
        """Reads one token; sets `finish` if the answer ends with it."""
        token_id = token.token_id
        self.completion_tokens += 1
        if token_id in self._stop_ids or token_id in self._end_ids:
            self.matched_stop = self._stop_ids.get(token_id)
            self.finish = FinishReason.STOP
            return
        self.token_ids.append(token_id)
        if token.logprob is not None:
            self._reports.append(self._report(token, token.logprob))
        reasoning = self._readers.reasoning
        thought = reasoning is not None and reasoning.in_reasoning
        text = self._detokenizer.feed(token_id)
        self._read(reasoning.feed(text) if reasoning else [TextDelta(text)])
        if thought or (reasoning is not None and reasoning.in_reasoning):
            self.reasoning_tokens += 1
            self._drop_reports()
        elif self._readers.calls is not None and self._readers.calls.in_call:
            self._drop_reports()
            if self._readers.calls.repeats:  # a small model would go on for ever
                self.finish = self.finish or FinishReason.TOOL_CALLS
        if self.completion_tokens >= self._max_tokens and self.finish is None:
            self.finish = FinishReason.LENGTH

    def _read(self, deltas: Sequence[TextDelta | ReasoningDelta]) -> None:
        """Looks for calls in the answer's text."""
        calls = self._readers.calls
        for delta in deltas:
            self._tell(calls.feed(delta.text) if calls and isinstance(delta, TextDelta) else [delta])

    def _tell(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            if self._ended_in_text or self.finish is FinishReason.TOOL_CALLS:
                return
            if isinstance(delta, TextDelta):
                self._say_unstopped(delta.text)
                continue
            if self._stops is not None:
                self._say(self._stops.flush())  # no stop string goes across channels
            self._drop_reports()
            last = self._deltas[-1] if self._deltas else None
            if isinstance(delta, ReasoningDelta) and isinstance(last, ReasoningDelta):
                self._deltas[-1] = ReasoningDelta(last.text + delta.text)
            else:
                self._deltas.append(delta)
            if isinstance(delta, ToolCallDelta) and delta.index + 1 >= self._readers.max_calls:
                self.finish = FinishReason.TOOL_CALLS

    def _say_unstopped(self, text: str) -> None:
        if self._stops is None:
            self._say(text)
            return
        result = self._stops.feed(text)
        self._say(result.text)
        if result.matched is not None:
            self.matched_stop = result.matched
            self.finish = FinishReason.STOP
            self._ended_in_text = True

    def _say(self, text: str) -> None:
        if not text:
            return
        last = self._deltas[-1] if self._deltas else None
        if isinstance(last, TextDelta):
            self._deltas[-1] = TextDelta(last.text + text, last.tokens)
        else:
            self._deltas.append(TextDelta(text))

    def _told(self, *, waits: bool) -> list[Delta]:
        """The deltas since the last time; reports without text are kept if one `waits`, else told alone."""
        if self._reports and not waits and not (self._deltas and isinstance(self._deltas[-1], TextDelta)):
            self._deltas.append(TextDelta(""))
        self._attach_reports()
        deltas, self._deltas = self._deltas, []
        return deltas

    def _attach_reports(self) -> None:
        """Reports so far go with the text before them, if that is told now."""
        last = self._deltas[-1] if self._deltas else None
        if self._reports and isinstance(last, TextDelta):
            self._deltas[-1] = replace(last, tokens=(*last.tokens, *self._reports))
            self._reports = []

    def _drop_reports(self) -> None:
        """But for text that is told now."""
        self._attach_reports()
        self._reports.clear()

    def _report(self, token: Sampled, logprob: float) -> TokenInfo:
        def entry(token_id: int, value: float) -> TokenLogprob:
            return TokenLogprob(token_id, self._tokenizer.token_bytes(token_id), value)

        return TokenInfo(entry(token.token_id, logprob), tuple(entry(*other) for other in token.alternatives))
