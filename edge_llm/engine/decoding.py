"""Decoding: which decoder chooses the tokens of a request, and the grammars that rule some of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from edge_llm.engine.request import Request
from edge_llm.engine.stream import TextStream
from edge_llm.engine.tooling import Tooling, forces_calls, offered
from edge_llm.errors import ParameterError
from edge_llm.messages import FinishReason
from edge_llm.model.manifest import ModelManifest
from edge_llm.sampling.beams import BeamDecoder, Ends
from edge_llm.sampling.decoders import (
    Decoder,
    FreeDecoder,
    GrammarDecoder,
    SampledDecoder,
    Selection,
    TriggeredDecoder,
    mask_without,
)
from edge_llm.sampling.grammar import Grammar
from edge_llm.sampling.params import SamplingParams
from edge_llm.sampling.sampler import Sampler
from edge_llm.sampling.speculation import SpeculativeDecoder
from edge_llm.text.prompt import RenderedPrompt
from edge_llm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from edge_llm.sampling.grammar_compiler import GrammarCompiler, Matcher


class Decoding:
    """Makes the decoders of one model's requests. May be used by several threads at once."""

    def __init__(
        self, manifest: ModelManifest, tokenizer: Tokenizer, tooling: Tooling, sampler: Sampler, *, speculates: bool
    ) -> None:
        self._manifest, self._tokenizer, self._tooling = manifest, tokenizer, tooling
        self._sampler, self._speculates = sampler, speculates
        self._grammars: GrammarCompiler | None = None
        self._lock = threading.Lock()

    def decoder(
        self, request: Request, params: SamplingParams, ids: list[int], prompt: RenderedPrompt | None
    ) -> Decoder:
        """The decoder of a request whose prompt has the tokens `ids`. Raises `ParameterError` for an unusable grammar."""
        sampler = self._sampler.sequence(params, ids, self._tokenizer.token_bytes)
        matcher, trigger = self._matcher(request), self._tooling.trigger(request, prompt)
        if matcher is not None and trigger is None:
            return GrammarDecoder(sampler, matcher)
        free: FreeDecoder = SpeculativeDecoder(sampler, ids) if self._speculates else SampledDecoder(sampler)
        if matcher is None or trigger is None:
            return free
        if not trigger.in_grammar:  # what was asked for follows the reasoning: no end may come before
            free = SampledDecoder(sampler, mask_without(self._manifest.tokens.eos, self._manifest.dimensions.vocab))
        return TriggeredDecoder(
            sampler,
            free,
            matcher,
            trigger,
            token_bytes=self._tokenizer.token_bytes,
            encode=self._tokenizer.encode_raw,
            once=not trigger.in_grammar,
        )

    def beam_decoder(
        self,
        request: Request,
        params: SamplingParams,
        end_ids: frozenset[int],
        max_tokens: int,
        new_stream: Callable[[], TextStream],
    ) -> BeamDecoder:
        """What looks for the most probable answer; it ends where a stream made by `new_stream` would end it."""
        added, special = self._tokenizer.added_tokens, self._tokenizer.special_ids

        def shown_bytes(token_id: int) -> bytes:
            return b"" if token_id in special else self._tokenizer.token_bytes(token_id)

        def is_stop(token_ids: Sequence[int]) -> bool:
            stream = new_stream()
            stream.feed(Selection((), forced=tuple(token_ids)))
            return stream.finish is FinishReason.STOP

        ends = Ends(
            end_ids | {added[stop] for stop in params.stop if stop in added},
            tuple(stop.encode("utf-8", "surrogatepass") for stop in params.stop),
            shown_bytes,
            is_stop,
        )
        return BeamDecoder(
            request.beams,
            max_tokens=max_tokens,
            ends=ends,
            length_penalty=request.length_penalty,
            early_stopping=request.early_stopping,
        )

    def _matcher(self, request: Request) -> Matcher | None:
        """Where the grammar of an answer, or of the calls in it, begins; None if it has none."""
        if request.response_format is not None:
            return self._compiler().matcher(request.response_format)
        try:
            grammar = self._tooling.grammar(request)
            return None if grammar is None else self._compiler().matcher(grammar)
        except ParameterError as error:
            if not forces_calls(request):
                return None  # what the model decides to call is read, not ruled
            fault = self._fault_of_a_tool(request) or str(error)
            raise ParameterError(
                f"tool_choice {request.tool_choice} cannot be kept: {fault}", hint=error.hint
            ) from None

    def _fault_of_a_tool(self, request: Request) -> str | None:
        """Whose parameters no grammar holds: the grammar of all tools is not what the caller wrote."""
        for tool in offered(request):
            try:
                self._compiler().matcher(Grammar.json_schema(tool.parameters))
            except ParameterError as error:
                return f"the parameters of the tool {tool.name}: {error}"
        return None

    def _compiler(self) -> GrammarCompiler:
        with self._lock:
            if self._grammars is None:
                from edge_llm.sampling.grammar_compiler import GrammarCompiler

                tokenizer, size = self._tokenizer, self._manifest.dimensions.vocab
                known = min(size, tokenizer.vocab_size)
                self._grammars = GrammarCompiler(
                    [tokenizer.token_bytes(i) for i in range(known)] + [b""] * (size - known),
                    control_ids=sorted(tokenizer.added_tokens.values()),
                    end_ids=self._manifest.tokens.eos,
                    encode=tokenizer.encode_raw,
                )
            return self._grammars

    def close(self) -> None:
        """End the process that compiles grammars, if there is one; idempotent."""
        with self._lock:
            if self._grammars is not None:
                self._grammars.close()
