"""The fused sampler against the slow truth: adversarial rows, all parameters, hostile records, guarded memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_llm.kernels.layout import CALL_FIELDS, SampleCall, SampleStatus, sample_scratch_bytes
from edge_llm.kernels.weights import log2
from edge_llm.sampling.dry import DryWindow
from edge_llm.sampling.params import SamplingParams
from edge_llm.sampling.sampler import Kernels
from tests.reference import sampling as truth

ROOT = Path(__file__).parents[2]
DRY_FIELDS = (SampleCall.DRY_TOKENS, SampleCall.DRY_DISTANCES, SampleCall.DRY_LENGTHS)
NEUTRAL = SamplingParams(seed=0).with_defaults({})
ADVERSARIAL = [
    0.0,
    -0.0,
    1.0,
    1.0000001,
    -1.0,
    5.0,
    -np.inf,
    1e-45,
    -1e-45,
    1.2e-38,
    3.4e38,
    -3.4e38,
    88.0,
    -104.0,
    2.5,
]


class Call:
    """A SampleCall record with all that it points to. `scratch` may be given, else it is filled with rubbish."""

    def __init__(
        self,
        logits: np.ndarray,
        params: SamplingParams = NEUTRAL,
        prompt: Sequence[int] = (),
        generated: Sequence[int] = (),
        allowed: np.ndarray | None = None,
        counter: int = 0,
        breakers: Collection[int] = (),
        mu: float = 0.0,
        scratch: np.ndarray | None = None,
    ) -> None:
        vocab = len(logits)
        self.logits = logits
        self.record = np.zeros(CALL_FIELDS, np.int64)
        self.reals = self.record.view(np.float64)
        history = sorted({*prompt, *generated}, reverse=True)
        penalised = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)
        self.history_ids = np.array(history if penalised else [], np.int32)
        self.history_counts = np.array([list(generated).count(i) for i in self.history_ids], np.int32)
        self.bias_ids = np.array(list(params.logit_bias), np.int32)
        self.bias_values = np.array(list(params.logit_bias.values()), np.float64)
        self.mask = np.zeros(0, np.int32) if allowed is None else truth.mask_words(allowed)
        self.alternatives = np.zeros(min(params.top_logprobs, vocab), np.int32)
        said = [*prompt, *generated]
        dry = DryWindow(params.dry_penalty_last_n, [b"!"], lambda token: b"!" if token in breakers else b"", said)
        self.dry_rows = dry.rows if params.dry_multiplier else np.zeros((3, 0), np.int32)
        rubbish = np.random.default_rng(1).integers(0, 256, sample_scratch_bytes(vocab), np.uint8)
        self.scratch = rubbish if scratch is None else scratch
        for field, array in (
            (SampleCall.LOGITS, logits),
            (SampleCall.HISTORY_IDS, self.history_ids),
            (SampleCall.HISTORY_COUNTS, self.history_counts),
            (SampleCall.BIAS_IDS, self.bias_ids),
            (SampleCall.BIAS_VALUES, self.bias_values),
            (SampleCall.ALTERNATIVE_IDS, self.alternatives),
            (SampleCall.SCRATCH, self.scratch),
            *zip(DRY_FIELDS, self.dry_rows, strict=True),
        ):
            self.record[field] = array.ctypes.data
        self.record[SampleCall.DRY_WINDOW] = self.dry_rows.shape[1]
        self.record[SampleCall.DRY_LIMIT] = dry.limit
        self.record[SampleCall.DRY_ALLOWED] = params.dry_allowed_length
        self.record[SampleCall.MIROSTAT] = params.mirostat_tau > 0
        self.record[SampleCall.MASK] = 0 if allowed is None else self.mask.ctypes.data
        self.record[SampleCall.VOCAB] = vocab
        self.record[SampleCall.HISTORY] = len(self.history_ids)
        self.record[SampleCall.BIASES] = len(self.bias_ids)
        self.record[SampleCall.SCRATCH_BYTES] = self.scratch.nbytes
        self.record[SampleCall.TOP_K] = params.top_k
        self.record[SampleCall.LOGPROBS] = params.logprobs
        self.record[SampleCall.ALTERNATIVES] = len(self.alternatives)
        self.record.view(np.uint64)[SampleCall.SEED] = params.seed
        self.record.view(np.uint64)[SampleCall.COUNTER] = counter
        self.reals[SampleCall.REPETITION] = params.repetition_penalty
        self.reals[SampleCall.PRESENCE] = params.presence_penalty
        self.reals[SampleCall.FREQUENCY] = params.frequency_penalty
        self.reals[SampleCall.DRY_MULTIPLIER] = params.dry_multiplier
        self.reals[SampleCall.DRY_BASE] = params.dry_base
        self.reals[SampleCall.TOP_N_SIGMA] = params.top_n_sigma
        self.reals[SampleCall.TEMPERATURE] = params.temperature
        self.reals[SampleCall.TYPICAL_P] = params.typical_p
        self.reals[SampleCall.TOP_P] = params.top_p
        self.reals[SampleCall.MIN_P] = params.min_p
        self.reals[SampleCall.XTC_PROBABILITY] = params.xtc_probability
        self.reals[SampleCall.XTC_THRESHOLD] = params.xtc_threshold
        self.reals[SampleCall.MIROSTAT_MU] = mu

    def status(self, kernels: Kernels | None = None) -> SampleStatus:
        """Run an entry, by default the compiled one."""
        address = (kernels or truth.compiled_kernels()).address("sample_row")
        entry = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(address)
        return SampleStatus(entry(self.record.ctypes.data))

    def body_status(self) -> SampleStatus:
        """Run the kernel's body over the arrays (interpreted, where numba is told not to compile)."""
        from edge_llm.kernels.sampling import sample
        from edge_llm.kernels.truncation import Scratch

        vocab = len(self.logits)
        floats = {name: np.full(vocab, np.nan, np.float32) for name in ("values", "weights", "band", "band_ids")}
        scratch = Scratch(
            floats["values"],
            floats["values"].view(np.int32),
            floats["weights"],
            floats["weights"].view(np.int32),
            floats["band"],
            floats["band"].view(np.int32),
            floats["band_ids"],
            floats["band_ids"].view(np.int32),
            *(np.full(size, -1, np.int32) for size in (vocab, -(-vocab // 64), -(-vocab // 64))),
        )
        result = sample(
            self.record,
            self.reals,
            self.logits,
            self.logits.view(np.int32),
            (self.history_ids, self.history_counts),
            (self.bias_ids, self.bias_values),
            self.mask,
            tuple(self.dry_rows),
            self.alternatives,
            scratch,
        )
        return SampleStatus(result)

    @property
    def token(self) -> int:
        return int(self.record[SampleCall.TOKEN])

    @property
    def top_logprobs(self) -> list[tuple[int, float]]:
        ids = self.alternatives[: self.record[SampleCall.LISTED]].tolist()
        maximum, total = self.reals[SampleCall.MAXIMUM], self.reals[SampleCall.TOTAL]
        return [(i, float(self.logits[i]) - maximum - np.log(total)) for i in ids]


def random_case(seed: int, size: int, kind: int) -> tuple[Any, ...]:
    """Arguments of `Call` and of the truth: a row, parameters, prompt, answer, allowed, counter, breakers, mu."""
    rng = np.random.default_rng(seed)
    rows = [
        lambda: rng.normal(0, 3, size),
        lambda: rng.choice(ADVERSARIAL, size),
        lambda: rng.choice(rng.normal(0, 1, 4), size),  # many ties
        lambda: np.full(size, rng.choice([0.0, -7.5, 1e38])),
        lambda: rng.normal(0, 1e-3, size),  # flat
        lambda: np.where(rng.random(size) < 0.7, -np.inf, rng.normal(0, 5, size)),
        lambda: -rng.exponential(1, size).cumsum(),  # a steady fall
    ]
    logits = rows[kind % len(rows)]().astype(np.float32)

    def one_of(*values: float) -> float:
        return float(rng.choice(values))

    biased = rng.integers(0, size, int(rng.choice([0, 0, 1, 5]))).tolist()
    params = SamplingParams(
        temperature=one_of(0, 1, 1, 0.2, 0.7, 5, 1e-3, 1e-300, rng.uniform(0.1, 2)),
        top_k=int(rng.choice([0, 0, 1, 2, 3, 40, size, size + 7, rng.integers(1, size + 1)])),
        top_p=one_of(1, 1, 0, 1e-9, 0.1, 0.5, 0.9, 0.999, rng.random()),
        min_p=one_of(0, 0, 1e-9, 0.05, 0.5, 1, rng.random()),
        repetition_penalty=one_of(1, 1, 1.1, 0.5, 10, 0.01),
        presence_penalty=one_of(0, 0, 0.5, 2, -2),
        frequency_penalty=one_of(0, 0, 0.3, -1),
        dry_multiplier=one_of(0, 0, 0.8, 5, 100),
        dry_base=one_of(1, 1.75, 10),
        dry_allowed_length=int(rng.choice([1, 2, 2, 4])),
        dry_penalty_last_n=int(rng.choice([1, 2, 10, 25, 1000])),
        top_n_sigma=one_of(0, 0, 1e-9, 0.5, 1, 3, 100),
        typical_p=one_of(1, 1, 1, 0, 1e-9, 0.2, 0.9, 0.999, rng.random()),
        xtc_probability=one_of(0, 0, 0.5, 1),
        xtc_threshold=one_of(0, 1e-9, 0.05, 0.1, 0.3, 0.5, 1),
        mirostat_tau=one_of(0, 0, 0, 0, 3, 20),
        logit_bias={token: one_of(-100, -99.5, -1e4, 1e4, 3, -0.5, 0) for token in biased},
        seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
        logprobs=bool(rng.integers(0, 2)),
        top_logprobs=int(rng.choice([0, 1, 5, 20])),
    )
    spoken = min(size, int(rng.choice([2, 5, size])))  # few different tokens repeat each other much
    prompt, generated = (rng.integers(0, spoken, int(rng.choice([0, 3, 30]))).tolist() for _ in range(2))
    breakers = rng.integers(0, spoken, int(rng.choice([0, 0, 1, 2]))).tolist()
    masks = [None, None, rng.random(size) < 0.5, rng.random(size) < 0.02, np.arange(size) == rng.integers(0, size)]
    allowed = masks[rng.integers(0, len(masks))]
    mu = one_of(-3, 0, 0.5, 2, 10, 1e9, rng.uniform(0, 20))
    return logits, params, prompt, generated, allowed, int(rng.integers(0, 2**40)), breakers, mu


def check(call: Call, status: SampleStatus, case: tuple[Any, ...]) -> None:
    """The kernel's outcome is the truth's."""
    logits, params = case[0], case[1]
    try:
        expected: int | SampleStatus
        expected, surprise = truth.sample_with_surprise(*case)
    except truth.InvalidRow:
        expected = SampleStatus.INVALID_ROW
    except truth.NothingAllowed:
        expected = SampleStatus.NOTHING_ALLOWED
    assert (call.token if status == SampleStatus.OK else status) == expected
    if status == SampleStatus.OK and params.mirostat_tau and params.temperature:
        assert call.reals[SampleCall.SURPRISE] == pytest.approx(surprise, rel=1e-14, abs=1e-14)
    if params.logprobs and status == SampleStatus.OK:
        listed, wanted = call.top_logprobs, truth.top_logprobs(logits, params.top_logprobs)
        assert [token for token, _ in listed] == [token for token, _ in wanted]
        np.testing.assert_allclose([p for _, p in listed], [p for _, p in wanted], rtol=1e-6, atol=1e-6)


@settings(max_examples=2000)
@given(st.integers(0, 2**32), st.one_of(st.integers(1, 70), st.integers(1, 400)), st.integers(0, 6))
def test_equals_the_reference(seed: int, size: int, kind: int) -> None:
    case = random_case(seed, size, kind)
    call = Call(*case)
    before = case[0].tobytes()
    check(call, call.status(), case)
    assert case[0].tobytes() == before


@pytest.mark.parametrize("size", [49_152, 49_155])
@pytest.mark.parametrize("kind", range(7))
def test_equals_the_reference_at_full_size(size: int, kind: int) -> None:
    for seed in range(3):
        case = random_case(100 * seed + kind, size, kind)
        call = Call(*case)
        check(call, call.status(), case)


@pytest.mark.parametrize("kind", range(7))
def test_equals_the_reference_with_a_huge_vocabulary(kind: int) -> None:
    case = random_case(1_000 + kind, 262_144 - kind % 2, kind)
    call = Call(*case)
    check(call, call.status(), case)


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
def test_a_flat_nucleus_is_not_cut_short(top_p: float) -> None:
    logits = np.zeros(49_152, np.float32)
    last = -1
    for counter in range(200):
        call = Call(logits, NEUTRAL.with_options(top_p=top_p), counter=counter)
        assert call.status() == SampleStatus.OK
        assert call.token < np.ceil(top_p * 49_152)
        last = max(last, call.token)
    assert last > 0.95 * top_p * 49_152


@pytest.mark.parametrize("where", [0, 1, 63, 64, 130])
@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7F800000])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_and_plus_infinity_are_refused(where: int, bits: int, temperature: float) -> None:
    logits = np.zeros(131, np.float32)
    logits.view(np.uint32)[where] = bits
    call = Call(logits, NEUTRAL.with_options(temperature=temperature, top_k=5))
    assert call.status() == SampleStatus.INVALID_ROW
    assert call.token == 0  # untouched


def test_nothing_but_minus_infinity_is_refused() -> None:
    assert Call(np.full(100, -np.inf, np.float32)).status() == SampleStatus.INVALID_ROW


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
def test_banning_or_masking_everything_leaves_nothing(temperature: float) -> None:
    logits = np.arange(70, dtype=np.float32)
    params = NEUTRAL.with_options(temperature=temperature)
    banned = params.with_options(logit_bias=dict.fromkeys(range(70), -100.0))
    assert Call(logits, banned).status() == SampleStatus.NOTHING_ALLOWED
    assert Call(logits, params, allowed=np.zeros(70, bool)).status() == SampleStatus.NOTHING_ALLOWED


def test_a_mask_of_one_token_gives_that_token() -> None:
    logits = np.random.default_rng(0).normal(0, 5, 131).astype(np.float32)
    for token in range(131):
        for temperature in (0.0, 5.0):
            call = Call(logits, NEUTRAL.with_options(temperature=temperature), allowed=np.arange(131) == token)
            assert call.status() == SampleStatus.OK
            assert call.token == token


def test_a_ban_holds_at_any_temperature() -> None:
    params = NEUTRAL.with_options(temperature=5.0, logit_bias={0: -100.0, 1: -100.0})
    drawn = set()
    for counter in range(500):
        call = Call(np.array([9.0, 9.0, 0.0, 0.0], np.float32), params, counter=counter)
        assert call.status() == SampleStatus.OK
        drawn.add(call.token)
    assert drawn == {2, 3}


def test_frequencies_follow_the_distribution() -> None:
    logits = np.log(np.array([0.5, 0.2, 0.15, 0.1, 0.05], np.float32))
    draws = 20_000
    call = Call(logits, NEUTRAL.with_options(seed=20_240_607))
    counts = np.zeros(5)
    for counter in range(draws):
        call.record[SampleCall.COUNTER] = counter
        assert call.status() == SampleStatus.OK
        counts[call.token] += 1
    expected = np.exp(logits) / np.exp(logits).sum() * draws
    assert ((counts - expected) ** 2 / expected).sum() < 18.5  # chi-square, 4 degrees of freedom: p = 0.001


@pytest.mark.parametrize("probability", [0.0, 0.3, 1.0])
def test_xtc_falls_as_often_as_asked_and_whatever_is_drawn(probability: float) -> None:
    logits = np.log(np.array([0.3, 0.3, 0.2, 0.15, 0.05], np.float32))
    params = NEUTRAL.with_options(seed=5, xtc_probability=probability, xtc_threshold=0.18)
    draws = 20_000
    call = Call(logits, params)
    counts = np.zeros(5)
    for counter in range(draws):
        call.record[SampleCall.COUNTER] = counter
        assert call.status() == SampleStatus.OK
        counts[call.token] += 1
    whole, rest = np.array([0.3, 0.3, 0.2, 0.15, 0.05]), np.array([0, 0, 0.5, 0.375, 0.125])
    expected = ((1 - probability) * whole + probability * rest) * draws
    np.testing.assert_array_equal(counts[expected == 0], 0)
    expected, counts = expected[expected > 0], counts[expected > 0]
    assert ((counts - expected) ** 2 / expected).sum() < 18.5  # chi-square, 4 degrees of freedom: p = 0.001


def test_the_deviation_is_that_of_the_finite_logits() -> None:
    logits = np.random.default_rng(8).normal(3, 2, 5000).astype(np.float32)
    logits[::7] = -np.inf
    finite = logits[np.isfinite(logits)].astype(np.float64)
    for sigmas in (0.5, 1.0, 2.5):
        assert truth.sigma_floor(logits, sigmas) == pytest.approx(finite.max() - sigmas * finite.std(), abs=1e-5)


def test_a_repeat_without_end_does_not_spoil_the_deviation() -> None:
    logits = np.random.default_rng(9).normal(0, 2, 5000).astype(np.float32)
    params = NEUTRAL.with_options(dry_multiplier=5.0, dry_base=10.0)
    penalised = truth.adjusted(logits, params, generated=[1, 2, 3] * 100)
    assert penalised[1] == pytest.approx(logits[1] - 128)
    assert truth.sigma_floor(penalised, 2.0) == pytest.approx(truth.sigma_floor(logits, 2.0), abs=1.5)


def test_typical_is_the_nearest_to_the_entropy() -> None:
    logits = np.random.default_rng(4).normal(0, 2, 3000).astype(np.float32)
    p = np.exp(logits.astype(np.float64))
    p /= p.sum()
    distance = abs(-np.log(p) - -(p * np.log(p)).sum())
    ranked = np.argsort(distance)
    for share in (0.1, 0.5, 0.95):
        expected = ranked[: 1 + np.searchsorted(p[ranked].cumsum(), share)]
        mass, _ = truth.kept(logits, NEUTRAL.with_options(typical_p=share))
        assert set(mass) == set(expected.tolist())


def test_log2_is_exact_to_the_last_bits() -> None:
    values = np.random.default_rng(6).uniform(0, 53, 2000)
    for value in (1.0, 2.0, 2.0**53, *(2**values)):
        assert log2(value) == pytest.approx(np.log2(value), rel=4e-16, abs=1e-16)


@pytest.mark.parametrize("temperature", [0.2, 1.0, 5.0])
def test_weights_are_the_softmax(temperature: float) -> None:
    values = np.random.default_rng(3).normal(0, 3, 5000).astype(np.float32)
    weights = np.array(truth.weights(values, temperature), np.float64)
    exact = np.exp((values.astype(np.float64) - values.max()) / temperature) * truth.UNIT
    assert weights.max() == truth.UNIT
    np.testing.assert_allclose(weights, exact, rtol=4e-6, atol=0.51)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (SampleCall.VOCAB, 0),
        (SampleCall.VOCAB, -1),
        (SampleCall.VOCAB, 2**20 + 1),
        (SampleCall.SCRATCH_BYTES, sample_scratch_bytes(100) - 1),
        (SampleCall.HISTORY, -1),
        (SampleCall.HISTORY, 101),
        (SampleCall.BIASES, -1),
        (SampleCall.BIASES, 101),
        (SampleCall.ALTERNATIVES, -1),
        (SampleCall.ALTERNATIVES, 101),
        (SampleCall.TOP_K, -1),
        (SampleCall.DRY_WINDOW, -1),
        (SampleCall.DRY_WINDOW, (1 << 17) + 1),
        (SampleCall.DRY_ALLOWED, 0),
        (SampleCall.DRY_MULTIPLIER, np.nan),
        (SampleCall.DRY_BASE, 0.99),
        (SampleCall.DRY_BASE, np.inf),
        (SampleCall.TOP_N_SIGMA, -0.1),
        (SampleCall.TOP_N_SIGMA, np.nan),
        (SampleCall.TYPICAL_P, 1.1),
        (SampleCall.TYPICAL_P, np.nan),
        (SampleCall.XTC_PROBABILITY, np.nan),
        (SampleCall.XTC_THRESHOLD, -0.1),
        (SampleCall.XTC_THRESHOLD, np.nan),
        (SampleCall.MIROSTAT_MU, np.nan),
        (SampleCall.MIROSTAT_MU, np.inf),
        (SampleCall.TEMPERATURE, -1.0),
        (SampleCall.TEMPERATURE, np.nan),
        (SampleCall.TEMPERATURE, np.inf),
        (SampleCall.TOP_P, 1.5),
        (SampleCall.TOP_P, np.nan),
        (SampleCall.MIN_P, -0.1),
        (SampleCall.MIN_P, np.nan),
        (SampleCall.REPETITION, 0.0),
        (SampleCall.REPETITION, np.nan),
        (SampleCall.PRESENCE, np.inf),
        (SampleCall.FREQUENCY, np.nan),
    ],
)
def test_a_record_out_of_range_is_refused(field: SampleCall, value: float) -> None:
    call = Call(np.zeros(100, np.float32))
    (call.reals if isinstance(value, float) else call.record)[field] = value
    assert call.status() == SampleStatus.BAD_CALL


@pytest.mark.parametrize("token", [-1, 100, 2**31 - 1, -(2**31)])
def test_ids_outside_the_vocabulary_are_refused(token: int) -> None:
    logits = np.zeros(100, np.float32)
    biased = Call(logits, NEUTRAL.with_options(logit_bias={1: 1.0}))
    biased.bias_ids[0] = token
    seen = Call(logits, NEUTRAL.with_options(presence_penalty=1.0), generated=[1])
    seen.history_ids[0] = token
    assert biased.status() == seen.status() == SampleStatus.BAD_CALL
    if token >= 0:  # what is negative stands for a sequence breaker
        repeated = Call(logits, NEUTRAL.with_options(dry_multiplier=1.0), generated=[1, 2, 3, 1, 2])
        repeated.dry_rows[0, 2] = token
        assert repeated.status() == SampleStatus.BAD_CALL


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_that_is_no_number_is_refused(temperature: float) -> None:
    call = Call(
        np.zeros(100, np.float32), NEUTRAL.with_options(logit_bias={1: 1.0}, temperature=temperature, top_p=0.5)
    )
    call.bias_values[0] = np.nan
    assert call.status() == SampleStatus.BAD_CALL


@pytest.mark.skipif(sys.platform == "win32", reason="pages are guarded with mprotect")
@pytest.mark.parametrize("size", [1, 2, 31, 32, 33, 63, 64, 65, 127, 1000, 4097])
def test_nothing_beyond_the_buffers_is_touched(size: int) -> None:
    for kind in range(7):
        for seed in range(6):
            case = random_case(seed, size, kind)
            logits = guarded(case[0].nbytes).view(np.float32)
            logits[:] = case[0]
            call = Call(logits, *case[1:], scratch=guarded(sample_scratch_bytes(size)))
            for field, row in zip(DRY_FIELDS, call.dry_rows, strict=True):
                copy = guarded(row.nbytes).view(np.int32)
                copy[:] = row
                call.record[field] = copy.ctypes.data
            check(call, call.status(), case)


_mappings: list[mmap.mmap] = []  # a guarded page is never unmapped: an array may outlive the test


def guarded(size: int) -> np.ndarray:
    """uint8 [size] (a multiple of 4), between pages that nobody may touch; the second follows at once."""
    page = mmap.PAGESIZE
    inner = -(-size // page) * page
    mapping = mmap.mmap(-1, inner + 2 * page)
    _mappings.append(mapping)
    whole = np.frombuffer(mapping, np.uint8)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for start in (0, page + inner):
        assert protect(whole.ctypes.data + start, page, 0) == 0
    return whole[page + inner - size : page + inner]


def test_interpreted_body_equals_the_reference() -> None:
    """Without a compiler NumPy checks every index."""
    code = "from tests.kernels.test_sampling import interpret; interpret()"
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["84", "cases"]


def interpret() -> None:
    """Run by the test above in a process of its own."""
    cases = 0
    for kind in range(7):
        for seed, size in enumerate((1, 2, 33, 63, 64, 65, 129, 200, 64, 100, 17, 130)):
            case = random_case(1000 + seed, size, kind)
            call = Call(*case)
            with np.errstate(over="ignore"):  # huge logits at low temperatures: minus infinity is meant
                status = call.body_status()
            check(call, status, case)
            cases += 1
    print(cases, "cases")  # noqa: T201 - read by the parent
