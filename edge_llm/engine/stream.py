"""TextStream: from the tokens of one answer to its text, and the rules by which it ends."""

from __future__ import annotations

from edge_llm.messages import FinishReason, TextDelta, TokenInfo, TokenLogprob
from edge_llm.sampling.decoders import Selection
from edge_llm.sampling.params import SamplingParams
from edge_llm.sampling.sampler import Sampled
from edge_llm.text.stops import StopMatcher
from edge_llm.text.tokenizer import Tokenizer


class TextStream:
    """Feed it what a decoder chose in each step; it gives one delta a step, or None while nothing can be shown.

    The answer ends (`finish`) with an end token or a token that a stop names, which are never shown; before a stop
    string; or at `max_tokens`. Reports of tokens wait for text to go with, so that none runs ahead into a stop string.
    """

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, *, end_ids: frozenset[int], max_tokens: int
    ) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer()
        self._stops = StopMatcher(params.stop) if params.stop else None
        self._stop_ids = {tokenizer.added_tokens[stop]: stop for stop in params.stop if stop in tokenizer.added_tokens}
        self._end_ids = end_ids
        self._max_tokens = max_tokens
        self._reports: list[TokenInfo] = []
        self._ended_in_text = False
        self.token_ids: list[int] = []
        """ids of the answer, without the token that ended it"""
        self.completion_tokens = 0
        """tokens chosen, the one that ended the answer included"""
        self.matched_stop: str | None = None
        self.finish: FinishReason | None = None

    def feed(self, selection: Selection) -> TextDelta | None:
        """Text of a step's tokens; what comes after the end is dropped."""
        text = ""
        for token in (*selection.accepted, *map(Sampled, selection.forced)):
            text += self._shown(token)
            if self.finish is not None:
                break
        else:
            self.finish = selection.finish
        return self._delta(text) if text else None

    def flush(self) -> TextDelta | None:
        """What was held back, once the answer has ended. Half a character at the very end is never shown."""
        if self._ended_in_text:
            return None
        text = self._stops.flush() if self._stops else ""
        return self._delta(text) if text or self._reports else None

    def _shown(self, token: Sampled) -> str:
        """The text that this token lets through; sets `finish` if the answer ends with it."""
        token_id = token.token_id
        self.completion_tokens += 1
        if token_id in self._stop_ids or token_id in self._end_ids:
            self.matched_stop = self._stop_ids.get(token_id)
            self.finish = FinishReason.STOP
            return ""
        self.token_ids.append(token_id)
        if token.logprob is not None:
            self._reports.append(self._report(token, token.logprob))
        text = self._detokenizer.feed(token_id)
        if self._stops is not None:
            result = self._stops.feed(text)
            text = result.text
            if result.matched is not None:
                self.matched_stop = result.matched
                self.finish = FinishReason.STOP
                self._ended_in_text = True
                return text
        if self.completion_tokens >= self._max_tokens:
            self.finish = FinishReason.LENGTH
        return text

    def _report(self, token: Sampled, logprob: float) -> TokenInfo:
        def entry(token_id: int, value: float) -> TokenLogprob:
            return TokenLogprob(token_id, self._tokenizer.token_bytes(token_id), value)

        return TokenInfo(entry(token.token_id, logprob), tuple(entry(*other) for other in token.alternatives))

    def _delta(self, text: str) -> TextDelta:
        reports, self._reports = tuple(self._reports), []
        return TextDelta(text, reports)
