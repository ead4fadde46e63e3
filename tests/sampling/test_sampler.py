"""What a request meets: order of the filters, penalties, seeds, history, failures; B10, B11, B12, B14, B15."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_llm.errors import GenerationError, ParameterError, UnsupportedModelError
from edge_llm.kernels.layout import MAX_VOCAB
from edge_llm.sampling.params import SamplingParams
from edge_llm.sampling.sampler import Sampler, SequenceSampler
from tests.reference import sampling as truth


def sampler_of(vocab: int) -> Sampler:
    return Sampler(truth.compiled_kernels(), vocab)


def request(vocab: int, prompt: Sequence[int] = (), **options: object) -> SequenceSampler:
    params = SamplingParams(**{"seed": 11, **options})  # type: ignore[arg-type]
    return sampler_of(vocab).sequence(params, prompt)


def row(*logits: float) -> np.ndarray:
    return np.array(logits, np.float32)


def drawn(logits: np.ndarray, draws: int = 300, **options: object) -> set[int]:
    """The tokens that ever come out."""
    sequence = request(len(logits), **options)
    return {sequence.sample(logits, index).token_id for index in range(draws)}


def test_temperature_zero_is_argmax_whatever_else_is_set() -> None:  # B10
    logits = np.random.default_rng(0).normal(0, 1, 500).astype(np.float32)
    options = {"temperature": 0, "top_p": 0.1, "top_k": 0, "min_p": 0.9, "typical_p": 0.1, "mirostat_tau": 5}
    options |= {"top_n_sigma": 3, "xtc_probability": 1, "xtc_threshold": 0}
    assert drawn(logits, 20, **options) == {int(logits.argmax())}
    assert drawn(row(1, 7, 7, -3), 20, temperature=0) == {1}  # the lowest id wins
    assert drawn(row(-0.0, 0.0), 20, temperature=0) == {0}


def test_top_k_zero_is_off() -> None:  # B10
    assert drawn(row(1, 1, 1, 1), top_k=0) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("options", "survivors"),
    [
        # At temperature 0.5: 0.867, 0.117, 0.016. With top-p before temperature (0.665, 0.245, 0.090), 1 would stay.
        ({"temperature": 0.5, "top_p": 0.8}, {0}),
        ({"temperature": 0.5, "top_p": 0.9}, {0, 1}),
        ({"temperature": 1.0, "top_p": 0.8}, {0, 1}),
        # Top-k renormalises before top-p: of the two that stay, 0 has 0.731.
        ({"temperature": 1.0, "top_k": 2, "top_p": 0.7}, {0}),
        ({"temperature": 1.0, "top_p": 0.7}, {0, 1}),
        # Min-p comes after temperature: exp(-1 / 0.5) = 0.135 of the most probable.
        ({"temperature": 0.5, "min_p": 0.14}, {0}),
        ({"temperature": 0.5, "min_p": 0.13}, {0, 1}),
        ({"temperature": 1.0, "min_p": 0.14}, {0, 1}),
        # Penalties come before all of these.
        ({"temperature": 1.0, "top_k": 1, "logit_bias": {2: 3.0}}, {2}),
        ({"temperature": 0.5, "top_p": 0.8, "logit_bias": {0: -100}}, {1}),
        # The deviation is 0.816 at any temperature.
        ({"temperature": 5.0, "top_n_sigma": 1.2}, {0}),
        ({"temperature": 5.0, "top_n_sigma": 1.3}, {0, 1}),
        ({"temperature": 5.0, "top_n_sigma": 2.5}, {0, 1, 2}),
        # 0.665, 0.245, 0.090 have entropy 0.832 and surprises 0.408, 1.408, 2.408: 0 is the most typical, then 1.
        ({"typical_p": 0.6}, {0}),
        ({"typical_p": 0.7}, {0, 1}),
        # At temperature 5: 0.403, 0.330, 0.270 have entropy 1.087 and surprises 0.908, 1.108, 1.308.
        ({"temperature": 5.0, "typical_p": 0.3}, {1}),
        # Typical leaves 1, so it is the most probable one for min-p.
        ({"temperature": 5.0, "typical_p": 0.3, "min_p": 1.0}, {1}),
        # After top-k, 0 and 1 have 0.731 and 0.269: entropy 0.582, surprises 0.313 and 1.313.
        ({"top_k": 2, "typical_p": 0.7}, {0}),
        # XTC: 0 and 1 reach 0.2, and the less probable one stays; of the two that top-k leaves, it is alone.
        ({"xtc_probability": 1.0, "xtc_threshold": 0.2}, {1, 2}),
        ({"xtc_probability": 1.0, "xtc_threshold": 0.2, "top_k": 2}, {1}),
        ({"xtc_probability": 1.0, "xtc_threshold": 0.25}, {0, 1, 2}),
        ({"xtc_probability": 1.0, "xtc_threshold": 0.25, "top_k": 2}, {1}),
        ({"xtc_probability": 1.0, "xtc_threshold": 0.05}, {2}),
        ({"xtc_probability": 1.0, "xtc_threshold": 0.05, "min_p": 0.2}, {1}),
        ({"xtc_probability": 0.5, "xtc_threshold": 0.05}, {0, 1, 2}),
    ],
)
def test_order_of_the_filters(options: dict[str, object], survivors: set[int]) -> None:  # B11
    assert drawn(row(3, 2, 1), 3000, **options) == survivors


def test_ties_at_the_cut_off_go_to_the_lowest_ids() -> None:
    logits = row(0, 5, 0, 5, 5, 0)
    assert drawn(logits, top_k=2) == {1, 3}
    assert drawn(logits, top_k=4, temperature=5.0) == {0, 1, 3, 4}
    assert drawn(row(1, 1, 1, 1), top_p=0.5) == {0, 1}
    assert drawn(row(1, 1, 1, 1), top_p=0.5001) == {0, 1, 2}


def test_a_set_that_reaches_top_p_exactly_is_enough() -> None:
    assert drawn(row(0, 0), top_p=0.5) == {0}
    assert drawn(row(0, 0, 0, 0), top_p=0.75) == {0, 1, 2}
    assert drawn(row(0, 1), top_p=0.0) == {1}


def test_repetition_makes_any_seen_token_less_likely() -> None:  # B12
    logits = row(-1.0, -1.0, -4.0)
    assert drawn(logits, 1, temperature=0, repetition_penalty=1.5, prompt=[0]) == {1}
    assert drawn(row(2.0, 1.9, -4.0), 1, temperature=0, repetition_penalty=1.5, prompt=[0]) == {1}


def test_repetition_counts_a_token_once() -> None:  # B12
    logits = row(2.0, 1.0)
    sequence = request(2, prompt=[0] * 50, temperature=0, repetition_penalty=1.5)
    for _ in range(50):
        sequence.observe(0)
    assert sequence.sample(logits, 50).token_id == 0  # 2 / 1.5 > 1, however often it was seen


def test_presence_and_frequency_count_generated_tokens_only() -> None:
    logits = row(1.0, 0.5)
    for options in ({"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"frequency_penalty": 0.3}):
        sequence = request(2, prompt=[0, 0, 0], temperature=0, **options)
        assert sequence.sample(logits, 0).token_id == 0
        sequence.observe(0)
        sequence.observe(0)
        assert sequence.sample(logits, 2).token_id == 1


def test_dry_lowers_what_would_go_on_with_a_repeat() -> None:
    logits = row(2.0, 1.9, 1.8, 1.7)
    options = {"dry_multiplier": 1.0, "dry_sequence_breakers": ()}
    repeating = request(4, prompt=[3, 1, 0, 2, 3, 1], temperature=0, **options)
    assert repeating.sample(logits, 0).token_id == 1  # 0 followed "3 1"; temperature 0 looks at penalised logits
    assert request(4, prompt=[3, 1, 0, 2, 2, 1], temperature=0, **options).sample(logits, 0).token_id == 0
    longer = request(4, prompt=[3, 1, 0, 2, 2, 1], temperature=0, dry_allowed_length=1, **options)
    assert longer.sample(logits, 0).token_id == 1
    repeating.observe(2)
    assert repeating.sample(logits, 1).token_id == 0


def test_dry_counts_prompt_and_answer_within_its_window() -> None:
    logits = row(2.0, 1.9, 1.8, 1.7)
    options = {"temperature": 0, "dry_multiplier": 1.0, "dry_sequence_breakers": (), "prompt": [3, 1, 0, 2]}
    for last_n, expected in ((6, 1), (5, 0)):
        sequence = request(4, dry_penalty_last_n=last_n, **options)
        sequence.observe(3)
        sequence.observe(1)
        assert sequence.sample(logits, 2).token_id == expected


def test_dry_stops_at_its_sequence_breakers() -> None:
    logits = row(2.0, 1.9, 1.8, 1.7)
    params = SamplingParams(seed=1, temperature=0, dry_multiplier=1.0)
    texts = [b"a", b"b", b"c", b"d"]
    prompt = [3, 1, 0, 2, 3, 1]
    sampler = sampler_of(4)
    assert sampler.sequence(params, prompt, texts.__getitem__).sample(logits, 0).token_id == 1
    texts[3] = b"x\n"  # only "1" is repeated since
    assert sampler.sequence(params, prompt, texts.__getitem__).sample(logits, 0).token_id == 0
    texts[3], texts[0] = b"d", b":"  # a breaker itself is not penalised
    assert sampler.sequence(params, prompt, texts.__getitem__).sample(logits, 0).token_id == 0
    with pytest.raises(ParameterError, match="token_bytes"):
        sampler.sequence(params, prompt)


def zipf(vocab: int) -> np.ndarray:
    return (-1.2 * np.log(np.arange(1, vocab + 1))).astype(np.float32)


def surprise_of(logits: np.ndarray, token_id: int) -> float:
    return float(-truth.logprobs(logits)[token_id] / math.log(2))


@pytest.mark.parametrize("tau", [3.0, 4.0, 5.0])
def test_mirostat_keeps_to_the_surprise_asked_for(tau: float) -> None:
    logits = zipf(2000)
    sequence = request(2000, mirostat_tau=tau)
    surprises = []
    for index in range(3000):
        token_id = sequence.sample(logits, index).token_id
        sequence.observe(token_id)
        surprises.append(surprise_of(logits, token_id))
    assert np.mean(surprises) == pytest.approx(tau, abs=0.1)


def test_mirostat_follows_its_formula_and_ignores_the_other_filters() -> None:
    rng = np.random.default_rng(0)
    sequence = request(300, mirostat_tau=2.0, mirostat_eta=0.5, top_k=1, top_p=0.1, typical_p=0.1, xtc_probability=1)
    mu = 4.0
    for index in range(100):
        logits = rng.normal(0, 2, 300).astype(np.float32)
        expected, surprise = truth.sample_with_surprise(logits, sequence.params, counter=index, mu=mu)
        assert sequence.sample(logits, index).token_id == expected
        assert surprise == pytest.approx(surprise_of(logits, expected), abs=1e-5)
        sequence.observe(expected)
        mu -= 0.5 * (surprise - 2.0)


def test_mirostat_learns_only_from_tokens_that_it_drew_and_that_count() -> None:
    logits = zipf(500)
    options = {"mirostat_tau": 3.0, "mirostat_eta": 1.0}
    sequence, other = request(500, **options), request(500, **options)
    first = sequence.sample(logits, 0)
    assert [sequence.sample(logits, 0) for _ in range(3)] == [first] * 3  # nothing is learnt by looking
    other.sample(logits, 0)
    other.observe(499 if first.token_id != 499 else 498)  # forced
    fresh = request(500, **options)
    rows = [(np.roll(logits, shift), index) for index, shift in enumerate(range(0, 400, 40), 1)]
    assert [other.sample(*at) for at in rows] == [fresh.sample(*at) for at in rows]
    twin = sequence.copy()
    sequence.observe(first.token_id)
    assert [sequence.sample(*at) for at in rows] != [fresh.sample(*at) for at in rows]
    twin.observe(first.token_id)
    assert [twin.sample(*at) for at in rows] == [sequence.sample(*at) for at in rows]


STATEFUL: dict[str, object] = {
    "mirostat_tau": 2.0,
    "dry_multiplier": 0.8,
    "dry_sequence_breakers": (),
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.2,
}


@pytest.mark.parametrize("options", [STATEFUL, {**STATEFUL, "mirostat_tau": 0.0, "xtc_probability": 0.5}])
def test_drafts_that_are_accepted_while_equal_change_no_token(options: dict[str, object]) -> None:
    """Speculation: rows are sampled and observed one after another up to the first that differs from its draft."""

    def row_after(ids: list[int]) -> np.ndarray:
        return np.random.default_rng([7, *ids[-2:]]).normal(0, 3, 40).astype(np.float32)

    prompt = [1, 2, 3]
    plain, ids = request(40, prompt, **options), list(prompt)
    for index in range(120):
        ids.append(plain.sample(row_after(ids), index).token_id)
        plain.observe(ids[-1])
    guesses = np.random.default_rng(1)
    speculating, said = request(40, prompt, **options), list(prompt)
    while len(said) < len(ids):
        drafts = [token if guesses.random() < 0.7 else 0 for token in ids[len(said) : len(said) + 4]]
        for draft in [*drafts, None]:
            token = speculating.sample(row_after(said), len(said) - len(prompt)).token_id
            speculating.observe(token)
            said.append(token)
            if token != draft:
                break
    assert said[: len(ids)] == ids


@pytest.mark.parametrize("fault", [math.nan, -math.nan, math.inf])
@pytest.mark.parametrize("options", [{"temperature": 0}, {"top_k": 3}, {"logprobs": True}, {"logit_bias": {4: -100}}])
def test_a_broken_row_fails_one_request_only(fault: float, options: dict[str, object]) -> None:  # B14
    sampler = sampler_of(100)
    one = sampler.sequence(SamplingParams(seed=1, **options))  # type: ignore[arg-type]
    other = sampler.sequence(SamplingParams(seed=1))
    good = np.zeros(100, np.float32)
    alone = [other.sample(good, index) for index in range(5)]
    broken = good.copy()
    broken[4] = fault
    for index in range(5):
        with pytest.raises(GenerationError, match="not finite"):
            one.sample(broken, index)
        assert other.sample(good, index) == alone[index]
    assert 0 <= one.sample(good, 0).token_id < 100


def test_a_row_of_minus_infinity_fails() -> None:  # B14
    with pytest.raises(GenerationError, match="not finite"):
        request(8).sample(np.full(8, -np.inf, np.float32), 0)


def test_nothing_left_is_an_error_with_a_hint() -> None:
    sequence = request(3, logit_bias={0: -100, 1: -100})
    assert sequence.sample(row(9, 9, 0), 0).token_id == 2
    with pytest.raises(GenerationError, match="no token is left") as caught:
        sequence.sample(row(9, 9, 0), 0, mask=np.array([0b011], np.int32))
    assert caught.value.hint


def test_each_request_draws_for_itself() -> None:  # B15
    logits = np.random.default_rng(5).normal(0, 1, 400).astype(np.float32)
    sampler = sampler_of(400)
    alone = sampler.sequence(SamplingParams(seed=77))
    expected = [alone.sample(logits, index) for index in range(50)]
    group = [sampler.sequence(SamplingParams(seed=seed)) for seed in (77, 1, 2, 3, 4, 5, 6, 77)]
    together = [[sequence.sample(logits, index) for sequence in group] for index in range(50)]
    assert [step[0] for step in together] == [step[-1] for step in together] == expected
    assert [step[1] for step in together] != expected
    backwards = [alone.sample(logits, index) for index in reversed(range(50))]
    assert backwards[::-1] == expected  # a draw depends on its index, not on what was drawn before


def test_the_reported_seed_is_the_one_in_use() -> None:  # B15
    logits = np.zeros(1000, np.float32)
    one, other = request(1000, seed=None), request(1000, seed=None)
    assert one.seed != other.seed
    again = request(1000, seed=one.seed)
    assert [again.sample(logits, index) for index in range(20)] == [one.sample(logits, index) for index in range(20)]
    assert 0 <= one.seed < 2**53
    assert request(3, seed=2**64 - 1).seed == 2**64 - 1


def test_sampling_changes_nothing_and_copies_part() -> None:
    logits = row(1.0, 0.9, 0.8)
    sequence = request(3, temperature=0, presence_penalty=2.0)
    assert [sequence.sample(logits, 0).token_id for _ in range(3)] == [0, 0, 0]
    sequence.observe(0)
    twin = sequence.copy()
    assert twin.seed == sequence.seed
    twin.observe(1)
    assert twin.sample(logits, 1).token_id == 2
    assert sequence.sample(logits, 1).token_id == 1


@settings(max_examples=100)
@given(st.integers(0, 2**32), st.lists(st.integers(0, 199), max_size=300), st.lists(st.integers(0, 199), max_size=20))
def test_history_equals_the_reference(seed: int, generated: list[int], prompt: list[int]) -> None:
    logits = np.random.default_rng(seed).normal(0, 2, 200).astype(np.float32)
    options = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": -0.1, "seed": seed, "top_k": 50}
    sequence = request(200, prompt=prompt, **options)
    for token in generated:
        sequence.observe(token)
    expected = truth.sample(logits, sequence.params, prompt, generated, counter=len(generated))
    assert sequence.sample(logits, len(generated)).token_id == expected
    assert sequence.copy().sample(logits, len(generated)).token_id == expected


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = np.random.default_rng(2).normal(0, 4, 3000).astype(np.float32)
    logits[:10] = -np.inf
    exact = truth.logprobs(logits)
    sequence = request(3000, temperature=2.0, top_logprobs=20, logit_bias={int(logits.argmax()): -100})
    result = sequence.sample(logits, 0)
    assert result.logprob == pytest.approx(exact[result.token_id], abs=2e-6)
    assert [token for token, _ in result.alternatives] == [token for token, _ in truth.top_logprobs(logits, 20)]
    assert [p for _, p in result.alternatives] == pytest.approx(
        [exact[token] for token, _ in result.alternatives], abs=2e-6
    )


def test_logprobs_are_given_only_when_asked_for() -> None:
    logits = row(1, 2, -math.inf)
    plain = request(3).sample(logits, 0)
    assert (plain.logprob, plain.alternatives) == (None, ())
    chosen_only = request(3, logprobs=True).sample(logits, 0)
    assert chosen_only.logprob is not None
    assert chosen_only.alternatives == ()
    listed = request(3, logprobs=True, top_logprobs=20).sample(logits, 0).alternatives
    assert [token for token, _ in listed] == [1, 0]  # what cannot come is not listed


def test_threads_may_share_a_sampler() -> None:  # B32
    sampler = sampler_of(2000)
    rows = [np.random.default_rng(seed).normal(0, 2, 2000).astype(np.float32) for seed in range(4)]
    params = SamplingParams(seed=3, top_p=0.9, repetition_penalty=1.2)
    expected = [[sampler.sequence(params).sample(row, index) for index in range(200)] for row in rows]
    results: list[list[object]] = [[] for _ in rows]

    def work(number: int) -> None:
        sequence = sampler.sequence(params)
        results[number].extend(sequence.sample(rows[number], index) for index in range(200))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == expected


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ParameterError, match=r"token 9, but the vocabulary ends at 8"):
        request(9, logit_bias={9: 1.0})
    with pytest.raises(UnsupportedModelError, match="at most"):
        sampler_of(MAX_VOCAB + 1)
    sequence = request(64)
    for logits in (
        np.zeros(63, np.float32),
        np.zeros(64),
        np.zeros((1, 64), np.float32),
        np.zeros(128, np.float32)[::2],
    ):
        with pytest.raises(GenerationError, match="logits must be"):
            sequence.sample(logits, 0)
    with pytest.raises(GenerationError, match="mask must be"):
        sequence.sample(np.zeros(64, np.float32), 0, mask=np.zeros(1, np.int32))
    penalised = request(64, presence_penalty=1.0)
    penalised.observe(64)
    with pytest.raises(GenerationError, match="refused"):
        penalised.sample(np.zeros(64, np.float32), 1)
