"""The host's side of sampling: keeps each request's parameters and history as the kernel reads them, and calls it."""

from __future__ import annotations

import ctypes
import math
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from edge_llm.errors import GenerationError, ParameterError, RuntimeFailure, UnsupportedModelError
from edge_llm.kernels.layout import CALL_FIELDS, MAX_VOCAB, SampleCall, SampleStatus, sample_scratch_bytes
from edge_llm.sampling.dry import DryWindow, TokenBytes
from edge_llm.sampling.history import SeenTokens
from edge_llm.sampling.params import SamplingParams

_SEED_BITS = 53  # a drawn seed survives readers of JSON that know only floats


class Kernels(Protocol):
    """Where compiled kernels are found: `warmup.load_kernels()` gives one."""

    def address(self, name: str) -> int:
        """Address of the C function `name`."""
        ...


@dataclass(frozen=True, slots=True)
class Sampled:
    """A chosen token. Log-probabilities are natural ones under the raw logits, given only if they were asked for."""

    token_id: int
    logprob: float | None = None
    alternatives: tuple[tuple[int, float], ...] = ()
    """(id, log-probability) of the most probable tokens, best first"""


class Sampler:
    """The sampling kernel for rows of `vocab` logits; one serves all requests of an engine, from any thread.

    Raises `UnsupportedModelError` if there are more than MAX_VOCAB tokens.
    """

    def __init__(self, kernels: Kernels, vocab: int) -> None:
        if not 0 < vocab <= MAX_VOCAB:
            raise UnsupportedModelError(
                f"a vocabulary of {vocab} tokens cannot be sampled from: at most {MAX_VOCAB} are supported"
            )
        self.vocab = vocab
        self._kernels = kernels  # kept: they hold the code that is called
        self._call = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(kernels.address("sample_row"))
        self._scratch = np.empty(sample_scratch_bytes(vocab), np.uint8)
        self._lock = threading.Lock()  # calls share the scratch

    def sequence(
        self, params: SamplingParams, prompt_ids: Sequence[int] = (), token_bytes: TokenBytes | None = None
    ) -> SequenceSampler:
        """What chooses the tokens of one request whose prompt is `prompt_ids`; DRY finds breakers by `token_bytes`.

        Raises `ParameterError` if logit_bias names a token that the vocabulary does not have.
        """
        return SequenceSampler(self, params, prompt_ids, token_bytes)

    def prepare(self, record: np.ndarray) -> None:
        """Fill in the fields of a SampleCall record that are the same for every request."""
        record[SampleCall.VOCAB] = self.vocab
        record[SampleCall.SCRATCH] = self._scratch.ctypes.data
        record[SampleCall.SCRATCH_BYTES] = self._scratch.nbytes

    def run(self, record_address: int) -> int:
        """Run the kernel on a SampleCall record; gives its SampleStatus. The GIL is released meanwhile."""
        with self._lock:
            return int(self._call(record_address))


class SequenceSampler:
    """Chooses the tokens of one request. Sampling changes nothing: only `observe` adds to the history.

    What a token depends on besides its row and index is the history and, with mirostat, mu; `copy` keeps both.
    `params` is complete: what was unset is neutral, and `params.seed` is the seed in use. Used by one thread.
    """

    def __init__(
        self,
        sampler: Sampler,
        params: SamplingParams,
        prompt_ids: Sequence[int] = (),
        token_bytes: TokenBytes | None = None,
    ) -> None:
        if params.seed is None:
            params = params.with_options(seed=secrets.randbits(_SEED_BITS))
        self.params = params = params.with_defaults({})
        self._sampler = sampler
        self._token_bytes = token_bytes
        self._seen: SeenTokens | None = None
        if params.repetition_penalty != 1.0:
            self._seen = SeenTokens(prompt_ids)
        elif params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
            self._seen = SeenTokens(())  # these do not look at the prompt
        self._dry: DryWindow | None = None
        if params.dry_multiplier > 0.0:
            breakers = [text.encode("utf-8", "replace") for text in params.dry_sequence_breakers]
            if breakers and token_bytes is None:
                raise ParameterError("dry_sequence_breakers need the tokenizer: pass its token_bytes")
            size = params.dry_penalty_last_n
            self._dry = DryWindow(size, breakers, token_bytes or (lambda _: b""), prompt_ids)
        self._mu = 2.0 * params.mirostat_tau
        self._drawn: tuple[int, float] | None = None
        """the last token sampled, and the mu after it"""
        self._bias_ids = np.array(list(params.logit_bias), np.int32)
        self._bias_values = np.array(list(params.logit_bias.values()), np.float64)
        if self._bias_ids.size and self._bias_ids.max() >= sampler.vocab:
            raise ParameterError(
                f"logit_bias names token {self._bias_ids.max()}, but the vocabulary ends at {sampler.vocab - 1}"
            )
        self._alternatives = np.zeros(min(params.top_logprobs, sampler.vocab), np.int32)
        self._reports = params.logprobs or params.top_logprobs > 0
        self._record = np.zeros(CALL_FIELDS, np.int64)
        self._reals = self._record.view(np.float64)
        self._record_address = self._record.ctypes.data
        self._fill_record()

    def _fill_record(self) -> None:
        params, record, reals = self.params, self._record, self._reals
        self._sampler.prepare(record)
        record[SampleCall.BIAS_IDS] = self._bias_ids.ctypes.data
        record[SampleCall.BIAS_VALUES] = self._bias_values.ctypes.data
        record[SampleCall.BIASES] = self._bias_ids.size
        record[SampleCall.LOGPROBS] = self._reports
        record[SampleCall.ALTERNATIVES] = self._alternatives.size
        record[SampleCall.ALTERNATIVE_IDS] = self._alternatives.ctypes.data
        record[SampleCall.TOP_K] = params.top_k or 0
        record[SampleCall.MIROSTAT] = params.mirostat_tau > 0.0
        record[SampleCall.DRY_ALLOWED] = params.dry_allowed_length
        record.view(np.uint64)[SampleCall.SEED] = self.seed
        reals[SampleCall.REPETITION] = params.repetition_penalty
        reals[SampleCall.PRESENCE] = params.presence_penalty
        reals[SampleCall.FREQUENCY] = params.frequency_penalty
        reals[SampleCall.DRY_MULTIPLIER] = params.dry_multiplier
        reals[SampleCall.DRY_BASE] = params.dry_base
        reals[SampleCall.TOP_N_SIGMA] = params.top_n_sigma
        reals[SampleCall.TEMPERATURE] = params.temperature
        reals[SampleCall.TYPICAL_P] = params.typical_p
        reals[SampleCall.TOP_P] = params.top_p
        reals[SampleCall.MIN_P] = params.min_p
        reals[SampleCall.XTC_PROBABILITY] = params.xtc_probability
        reals[SampleCall.XTC_THRESHOLD] = params.xtc_threshold
        self._fill_state()

    def _fill_state(self) -> None:
        """Fill in what changes with each token of the answer."""
        record = self._record
        if self._seen is not None:
            record[SampleCall.HISTORY] = self._seen.size
            record[SampleCall.HISTORY_IDS], record[SampleCall.HISTORY_COUNTS] = self._seen.addresses
        if self._dry is not None:
            tokens, distances, lengths = self._dry.addresses
            record[SampleCall.DRY_TOKENS] = tokens
            record[SampleCall.DRY_DISTANCES] = distances
            record[SampleCall.DRY_LENGTHS] = lengths
            record[SampleCall.DRY_WINDOW] = self._dry.window
            record[SampleCall.DRY_LIMIT] = self._dry.limit
        self._reals[SampleCall.MIROSTAT_MU] = self._mu

    @property
    def seed(self) -> int:
        """The seed in use: the one given, or the one that was drawn."""
        assert self.params.seed is not None
        return self.params.seed

    def sample(self, logits_row: np.ndarray, token_index: int, mask: np.ndarray | None = None) -> Sampled:
        """The token to follow, from float32 [vocab] raw logits, which are only read.

        `token_index` counts the tokens of the answer: the draw is a function of it and the seed alone. `mask`, int32
        [(vocab + 31) / 32], has bit i % 32 of word i / 32 set where token i is allowed.

        Raises `GenerationError` if the logits hold NaN or infinity or if bias and mask leave no token.
        """
        vocab, record = self._sampler.vocab, self._record
        record[SampleCall.LOGITS] = _address(logits_row, np.float32, vocab, "logits")
        record[SampleCall.COUNTER] = token_index
        record[SampleCall.MASK] = 0 if mask is None else _address(mask, np.int32, (vocab + 31) // 32, "mask")
        status = self._sampler.run(self._record_address)
        if status != SampleStatus.OK:
            raise _failure(status)
        token_id = int(record[SampleCall.TOKEN])
        if record[SampleCall.MIROSTAT] and self.params.temperature:
            error = float(self._reals[SampleCall.SURPRISE]) - self.params.mirostat_tau
            self._drawn = (token_id, self._mu - self.params.mirostat_eta * error)
        if not self._reports:
            return Sampled(token_id)
        maximum, log_total = float(self._reals[SampleCall.MAXIMUM]), math.log(self._reals[SampleCall.TOTAL])

        def logprob(token: int) -> float:
            return (float(logits_row[token]) - maximum) - log_total

        listed = self._alternatives[: record[SampleCall.LISTED]].tolist()
        return Sampled(token_id, logprob(token_id), tuple((token, logprob(token)) for token in listed))

    def observe(self, token_id: int) -> None:
        """Note that `token_id` is now part of the answer. Mirostat learns from it if it was the last one sampled."""
        if self._seen is not None:
            self._seen.observe(token_id)
        if self._dry is not None:
            self._dry.observe(token_id)
        if self._drawn is not None and self._drawn[0] == token_id:
            self._mu = self._drawn[1]
        self._drawn = None
        self._fill_state()

    def copy(self, sampler: Sampler | None = None) -> SequenceSampler:
        """An independent one with the same parameters, seed and history: for a fork of the conversation, or with another
        `sampler` for the rows of another model."""
        twin = SequenceSampler(sampler or self._sampler, self.params, (), self._token_bytes)
        twin._seen = self._seen.copy() if self._seen else None
        twin._dry = self._dry.copy() if self._dry else None
        twin._mu, twin._drawn = self._mu, self._drawn
        twin._fill_state()
        return twin


def _address(array: np.ndarray, dtype: Any, size: int, name: str) -> int:
    if array.dtype != dtype or array.shape != (size,) or not array.flags.c_contiguous:
        raise GenerationError(
            f"{name} must be {np.dtype(dtype)} [{size}] in one piece, not {array.dtype} {list(array.shape)}"
        )
    return _pointer(array)


def _pointer(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])  # `array.ctypes` builds an object on every use


def _failure(status: int) -> RuntimeFailure:
    if status == SampleStatus.INVALID_ROW:
        return GenerationError(
            "the model gave logits that are not finite numbers, so no token can be chosen",
            hint="check the model's files: edge-llm models verify",
        )
    if status == SampleStatus.NOTHING_ALLOWED:
        return GenerationError(
            "no token is left to choose", hint="let logit_bias or the grammar allow at least one token"
        )
    return GenerationError("the sampler refused its arguments", hint="a token id may lie outside the vocabulary")
