"""From a grammar to a matcher that says which tokens may follow. The only home of llguidance, with its worker process.

A grammar is compiled in a worker process first, which is killed when it takes too long; only what passed there is compiled
here, under limits of states and work for each step. What llguidance does not support of a schema it names, before anything
is generated.
"""

from __future__ import annotations

import contextlib
import json
import re
import select
import subprocess
import sys
import threading
import weakref
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from edge_llm.errors import GenerationError, ParameterError
from edge_llm.sampling.grammar import JSON_STYLE, Grammar, GrammarKind, parse_schema
from edge_llm.sampling.grammar_faults import HINTS, fault_in_one_line, one_line
from edge_llm.sampling.schema_recursion import bound_recursion

COMPILE_SECONDS = 2.0
MAX_LEXER_STATES = 20_000
"""of one matcher; a state takes one to two kilobytes"""
_TOKEN_ID = re.compile(r"<\[[0-9]+\]>")
KEPT_GRAMMARS, KEPT_CHARACTERS = 16, 1 << 17
"""compiled grammars that are kept for the next request, and of what length together: the worst take 300 bytes a character"""


class GrammarCompiler:
    """Compiles grammars for one vocabulary; keeps the last ones. Any thread."""

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        *,
        control_ids: Sequence[int],
        end_ids: Sequence[int],
        encode: Callable[[str], list[int]],
    ) -> None:
        """`token_bytes` of every id; `control_ids` never stand for text; any of `end_ids` ends the answer; `encode` gives the
        ids of a text, as the model was trained to see it."""
        self._vocabulary = _Vocabulary(token_bytes, control_ids, end_ids, encode)
        self._prefixes = TokenPrefixes(token_bytes)
        self._tokenizer: Any = None
        self._kept: OrderedDict[Grammar, Any] = OrderedDict()
        self._worker = _Worker()
        self._lock = threading.Lock()

    def matcher(self, grammar: Grammar) -> Matcher:
        """A matcher at the beginning of the answer. Raises `ParameterError` for a grammar that cannot be used."""
        from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

        with self._lock:
            prototype = self._kept.pop(grammar, None)
            if prototype is None:
                source = _source(grammar)
                # the worker's vocabulary is bytes and one token more, which stands for all that a grammar names by id
                fault = self._worker.fault(_TOKEN_ID.sub("<[256]>", source))
                if fault is None:
                    if self._tokenizer is None:
                        self._tokenizer = LLTokenizer(
                            TokenizerWrapper(self._vocabulary), eos_token=list(self._vocabulary.end_ids)
                        )
                    limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES)
                    prototype = LLMatcher(self._tokenizer, source, log_level=0, limits=limits)
                    fault = prototype.get_error() or None
                if fault is not None:
                    told = fault_in_one_line(grammar.kind, fault)
                    raise ParameterError(f"the {grammar.kind} cannot be used: {told}", hint=HINTS[grammar.kind])
            self._kept[grammar] = prototype
            while len(self._kept) > KEPT_GRAMMARS or sum(len(kept.text) for kept in self._kept) > KEPT_CHARACTERS:
                self._kept.popitem(last=False)
            return Matcher(prototype.deep_copy(), self._prefixes)

    def close(self) -> None:
        """End the worker process; idempotent."""
        self._worker.close()


class TokenPrefixes:
    """Which tokens begin with some bytes. Any thread."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self.vocab = len(token_bytes)
        self._tokens = token_bytes

    @cached_property
    def _sorted(self) -> tuple[list[bytes], np.ndarray]:
        order = sorted(range(self.vocab), key=self._tokens.__getitem__)
        return [self._tokens[i] for i in order], np.array(order)

    def mask(self, prefix: bytes) -> np.ndarray:
        """int32 [(vocab + 31) / 32], a bit for each token that begins with `prefix`, which has no byte 255."""
        tokens, order = self._sorted
        ids = order[bisect_left(tokens, prefix) : bisect_left(tokens, prefix + b"\xff")]
        bits = np.zeros((self.vocab + 31) // 32 * 32, np.uint8)
        bits[ids] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)


class Matcher:
    """How far one answer is in its grammar. Used by one thread."""

    def __init__(self, matcher: Any, prefixes: TokenPrefixes) -> None:
        self._matcher, self._prefixes = matcher, prefixes
        self._mask = np.zeros((prefixes.vocab + 31) // 32, np.int32)

    @property
    def finished(self) -> bool:
        """The answer is whole, and nothing may follow."""
        return bool(self._matcher.is_stopped())

    def mask(self) -> np.ndarray:
        """int32 [(vocab + 31) / 32], a bit for each token that may follow; overwritten by the next call.

        Bytes that must follow are not cut: after `"name":` comes ` "` as one token, or a longer one, and never a space alone,
        from which a model would expect a number to follow.

        Raises `GenerationError` if the grammar needs more work than it may.
        """
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        self._check()
        known = bytes(self._matcher.compute_ff_bytes())
        if len(known) > 1 and b"\xff" not in known:
            whole = self._mask & self._prefixes.mask(known)
            if whole.any():
                self._mask[:] = whole
        return self._mask

    def fresh(self) -> Matcher:
        """Another one, as far as this one is."""
        return Matcher(self._matcher.deep_copy(), self._prefixes)

    def allows(self, token_ids: Sequence[int]) -> bool:
        """Whether these tokens may follow; if so they are accepted."""
        return int(self._matcher.try_consume_tokens(list(token_ids))) == len(token_ids)

    def accept(self, token_id: int) -> None:
        """The token follows. Raises `GenerationError` if it may not."""
        self._matcher.consume_token(token_id)
        self._check()

    def forced(self) -> list[int]:
        """The tokens that must follow, which are accepted with it; none where there is a choice."""
        tokens: list[int] = self._matcher.compute_ff_tokens()
        for token_id in tokens:
            self.accept(token_id)
        return tokens

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GenerationError(f"the answer cannot follow its grammar: {one_line(self._matcher.get_error())}")


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    bos_token_id = None

    def __init__(
        self,
        tokens: Sequence[bytes],
        control_ids: Sequence[int],
        end_ids: Sequence[int],
        encode: Callable[[str], list[int]],
    ) -> None:
        self.tokens = list(tokens)
        self.special_token_ids = sorted({*control_ids, *end_ids})
        self.end_ids = tuple(end_ids)
        self.eos_token_id = self.end_ids[0]
        self._encode = encode

    def __call__(self, text: bytes) -> list[int]:
        return self._encode(text.decode("utf-8", "replace"))


_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);from edge_llm.sampling.grammar_worker import main; main()"
)


class _Worker:
    """The process that compiles first; started when it is needed, and again after it was killed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._finalizer: weakref.finalize[Any, _Worker] | None = None

    def fault(self, source: str) -> str | None:
        """What is wrong with a grammar in llguidance's form, or None."""
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(source) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline() if _readable(process.stdout, COMPILE_SECONDS) else None
        except OSError:
            answer = ""
        if answer:
            fault: str | None = json.loads(answer)
            return fault
        self.close()
        return "it takes too long" if answer is None else "it takes too much memory"

    def _running(self) -> subprocess.Popen[str]:
        process = self._process
        if process is None or process.poll() is not None:
            process = self._process = subprocess.Popen(
                # our modules, and none that merely lie in the current folder
                [sys.executable, "-P", "-c", _START, json.dumps([*map(str, sys.path)])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="utf-8",
            )
            self._finalizer = weakref.finalize(self, _end, process)
            assert process.stdout is not None
            process.stdout.readline()  # its first line says that it is ready: loading does not count
        return process

    def close(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None


def _readable(stream: Any, seconds: float) -> bool:
    return bool(select.select([stream], [], [], seconds)[0])


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


def _source(grammar: Grammar) -> str:
    """The grammar in llguidance's own form."""
    from llguidance import LLMatcher

    options: Any = JSON_STYLE
    source: str
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            source = LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=options)
        case GrammarKind.JSON_SCHEMA:
            schema = json.dumps(bound_recursion(parse_schema(grammar.text)), ensure_ascii=False)
            source = LLMatcher.grammar_from_json_schema(schema, overrides=options)
        case GrammarKind.REGEX:
            source = LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.LARK:
            source = LLMatcher.grammar_from_lark(grammar.text)
    return source
