"""Speculation changes no token, whatever is drafted, and gives up where it does not pay."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_llm.kernels.warmup import KernelLibrary
from edge_llm.sampling.decoders import SampledDecoder
from edge_llm.sampling.params import SamplingParams
from edge_llm.sampling.sampler import Sampler
from edge_llm.sampling.speculation import MATCHED, MAX_DRAFT, PromptLookup, SpeculativeDecoder

VOCAB = 12


class Model:
    """Logits as a function of the last two tokens: a text with habits, which drafts can guess."""

    def __init__(self, seed: int, sharpness: float) -> None:
        self._table = sharpness * np.random.default_rng(seed).standard_normal((VOCAB, VOCAB, VOCAB)).astype(np.float32)

    def logits(self, ids: list[int]) -> np.ndarray:
        return self._table[ids[-2], ids[-1]]


def generate(model: Model, decoder: SampledDecoder | SpeculativeDecoder, prompt: list[int], count: int):
    """(the first `count` tokens, rows that were run for them)."""
    ids, rows = list(prompt), 0
    while len(ids) < len(prompt) + count:
        drafts = decoder.propose(len(prompt) + count - len(ids) - 1)
        logits = np.stack([model.logits([*ids, *drafts[:i]]) for i in range(len(drafts) + 1)])
        rows += len(logits)
        selection = decoder.select(logits)
        chosen = [token.token_id for token in selection.accepted]
        assert chosen[:-1] == list(drafts[: len(chosen) - 1])
        ids += chosen
    return ids[len(prompt) :], rows


@given(
    seed=st.integers(0, 2**32),
    sharpness=st.sampled_from([0.0, 1.0, 4.0, 20.0]),
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    penalty=st.sampled_from([1.0, 1.3]),
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=40),
)
@settings(max_examples=150)
def test_the_answer_is_the_one_without_speculation(
    kernels: KernelLibrary, seed: int, sharpness: float, temperature: float, penalty: float, prompt: list[int]
) -> None:
    sampler, model = Sampler(kernels, VOCAB), Model(seed, sharpness)
    params = SamplingParams(temperature=temperature, repetition_penalty=penalty, seed=seed)
    plain, _ = generate(model, SampledDecoder(sampler.sequence(params, prompt)), prompt, 80)
    speculated, _ = generate(
        model, SpeculativeDecoder(sampler.sequence(params, prompt), [PromptLookup(prompt)]), prompt, 80
    )
    assert speculated == plain


def test_a_repeating_text_takes_fewer_steps(kernels: KernelLibrary) -> None:
    prompt = list(range(VOCAB)) * 4
    table = np.zeros((VOCAB, VOCAB, VOCAB), np.float32)
    table[:, np.arange(VOCAB), (np.arange(VOCAB) + 1) % VOCAB] = 9.0
    model = Model(0, 0.0)
    model._table = table
    params = SamplingParams(temperature=0.0, seed=1)
    decoder, steps = SpeculativeDecoder(Sampler(kernels, VOCAB).sequence(params, prompt), [PromptLookup(prompt)]), 0
    ids = list(prompt)
    while len(ids) < len(prompt) + 110:
        drafts = decoder.propose(99)
        ids += [
            t.token_id
            for t in decoder.select(
                np.stack([model.logits([*ids, *drafts[:i]]) for i in range(len(drafts) + 1)])
            ).accepted
        ]
        steps += 1
    assert steps == 110 // (MAX_DRAFT + 1) + 1  # the first steps draft less
    assert ids[len(prompt) : len(prompt) + 12] == list(range(12))


def test_free_text_pays_little_for_drafts_that_fail(kernels: KernelLibrary) -> None:
    """Noise over few tokens: every few of them have occurred, and what followed says nothing."""
    choose = np.random.default_rng(3)
    prompt = choose.integers(0, VOCAB, 4000).tolist()
    sampler = Sampler(kernels, VOCAB).sequence(SamplingParams(temperature=1.0, seed=3), prompt)
    _, rows = generate(Model(0, 0.0), SpeculativeDecoder(sampler, [PromptLookup(prompt)]), prompt, 2000)
    assert rows - 2000 < 0.05 * 2000


def test_lookup_finds_the_last_occurrence_and_never_itself() -> None:
    lookup = PromptLookup([1, 2, 3, 4, 7, 8, 1, 2, 3, 4, 9, 5])
    assert lookup.draft(4) == ()
    for token_id in (1, 2, 3, 4):
        lookup.observe(token_id)
    assert lookup.draft(3) == (9, 5, 1)
    assert lookup.draft(1) == (9,)
    assert lookup.draft(0) == ()
    assert PromptLookup([1] * MATCHED).draft(5) == ()
    assert PromptLookup([1] * (MATCHED + 1)).draft(5) == (1,)
    assert PromptLookup([]).draft(5) == ()


class Expecting:
    """Says what follows by a table, and how often it was asked; `cost` as it claims."""

    def __init__(self, following: list[int], cost: float) -> None:
        self.cost, self.asked, self._following, self._last = cost, 0, following, 0

    def observe(self, token_id: int) -> None:
        self._last = token_id

    def draft(self, length: int) -> tuple[int, ...]:
        drafts, token = [], self._last
        for _ in range(length):
            drafts.append(token := self._following[token])
        self.asked += length
        return tuple(drafts)


def counting(kernels: KernelLibrary, *sources: Expecting) -> int:
    """Rows that 400 tokens take of a model that counts 0, 1, ..., 11, 0, ..."""
    table = np.zeros((VOCAB, VOCAB, VOCAB), np.float32)
    table[:, np.arange(VOCAB), (np.arange(VOCAB) + 1) % VOCAB] = 9.0
    model = Model(0, 0.0)
    model._table = table
    sampler = Sampler(kernels, VOCAB).sequence(SamplingParams(temperature=0.0, seed=1))
    tokens, rows = generate(model, SpeculativeDecoder(sampler, sources), [11, 0], 400)
    assert tokens == [(1 + i) % VOCAB for i in range(400)]
    return rows


UP = [(i + 1) % VOCAB for i in range(VOCAB)]


def test_the_first_source_that_expects_something_is_tried(kernels: KernelLibrary) -> None:
    right, wrong = Expecting(UP, 0.2), Expecting([0] * VOCAB, 0.0)
    assert counting(kernels, right, wrong) == 400
    assert wrong.asked == 0
    right = Expecting(UP, 0.2)
    assert (
        400 < counting(kernels, wrong, right) < 430
    )  # each is judged alone: who is wrong pauses, who is right does not
    assert right.asked > 300


def test_what_costs_more_must_be_right_more_often(kernels: KernelLibrary) -> None:
    """Right at three of four places, which pays for drafts that are cheap; and what costs as much as a step never pays."""
    mostly = [token if i % 4 else 0 for i, token in enumerate(UP)]
    cheap, dear, as_dear_as_a_step = Expecting(mostly, 0.0), Expecting(mostly, 0.6), Expecting(UP, 1.0)
    for source in (cheap, dear, as_dear_as_a_step):
        counting(kernels, source)
    assert cheap.asked > 250
    assert dear.asked < 100
    assert as_dear_as_a_step.asked < 20
