"""Embeddings and scored labels: over fakes against what they are by definition, then over a tiny model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_llm.config import EngineConfig
from edge_llm.engine.core import EngineCore
from edge_llm.engine.engine import Engine
from edge_llm.engine.reader import ChoiceReader, EmbeddingReader
from edge_llm.engine.request import MAX_CHOICES, Request
from edge_llm.errors import ContextLengthError, GenerationError, ParameterError
from edge_llm.export.reference_graph import write_reference
from edge_llm.kernels.warmup import KernelLibrary
from edge_llm.messages import Finished, FinishReason, Message, PromptProgress, TextDelta
from edge_llm.model.stock_session import StockSession
from edge_llm.sampling.grammar import Grammar
from edge_llm.sampling.params import SamplingParams
from tests.engine.fakes import END, START, VOCAB, byte_ids, hashed_hidden, hashed_logits, make_core, text_of, tokenizer

LABELS = ("yes", "no", "none", "nobody", "y", "hello world, in words that take more than one chunk")
NO_HIDDEN = np.empty((0, 4), np.float32)


def run(core: EngineCore, *requests: Request) -> list[list[Any]]:
    """The events of requests that are asked all at once."""
    events: list[list[Any]] = [[] for _ in requests]
    for request, mine in zip(requests, events, strict=True):
        core.enqueue(core.prepare(request, mine.append))
    while core.has_work:
        core.step()
        core.check_integrity()
    return events


def ended(events: list[Any]) -> Finished:
    assert isinstance(events[-1], Finished), events[-1]
    return events[-1]


def log_softmax(row: np.ndarray) -> np.ndarray:
    row = row.astype(np.float64)
    return row - row.max() - np.log(np.exp(row - row.max()).sum())


def by_definition(prompt: list[int], label: str, labels: Sequence[str], end_ids: Sequence[int] = (END, 0)) -> float:
    """The log-probability of a label, with each row computed for itself."""
    ids = {text: tokenizer().encode_raw(text) for text in labels}
    own, score = ids[label], 0.0
    for i, token in enumerate(own):
        score += log_softmax(hashed_logits([*prompt, *own[:i]]))[token]
    if any(other != own and other[: len(own)] == own for other in ids.values()):
        score += np.log(np.exp(log_softmax(hashed_logits([*prompt, *own]))[list(end_ids)]).sum())
    return float(score)


# --- embeddings ---------------------------------------------------------------------------------------------------------


def pooled(rows: np.ndarray, pooling: str) -> np.ndarray:
    vector = (rows if pooling == "mean" else rows[-1:]).astype(np.float64).mean(axis=0)
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("length", [1, 8, 9, 40])
def test_an_embedding_is_the_pooled_hidden_state(pooling: str, length: int) -> None:
    core = make_core(max_rows=8)
    ids = [*byte_ids("x" * (length - 1)), START]
    (events,) = run(core, Request(token_ids=tuple(ids), embedding=pooling))
    rows = np.array([hashed_hidden(ids[: i + 1]) for i in range(length)])
    np.testing.assert_allclose(ended(events).embedding, pooled(rows, pooling), rtol=1e-6)
    assert ended(events).reason is FinishReason.STOP
    assert all(isinstance(event, PromptProgress) for event in events[:-1])
    assert events[-2] == PromptProgress(length, length)
    assert (ended(events).usage.prompt_tokens, ended(events).usage.completion_tokens) == (length, 0)


def test_an_embedding_is_the_same_in_any_company_and_chunks() -> None:
    ids = tuple(byte_ids("some text of several chunks ") * 3)
    asked = [Request(token_ids=ids, embedding=pooling) for pooling in ("mean", "last")]
    others = [Request(token_ids=ids[:n], params=SamplingParams(max_tokens=9, seed=n)) for n in (5, 20)]
    alone = [ended(run(make_core(max_rows=64), request)[0]).embedding for request in asked]
    for max_rows, slots in ((5, 4), (64, 4), (7, 1)):
        together = run(make_core(max_rows=max_rows, slots=slots, mixed_chunk=3), others[0], *asked, others[1])
        assert [ended(events).embedding for events in together[1:3]] == alone


def test_an_embedding_keeps_no_slot_and_takes_no_rows_of_others() -> None:
    core = make_core(slots=3)
    ids = tuple(byte_ids("the same text " * 8))
    first = run(core, Request(token_ids=ids, params=SamplingParams(max_tokens=2)))
    again = run(core, Request(token_ids=ids, embedding="mean"), Request(token_ids=ids, embedding="mean"))
    assert ended(first[0]).usage.cached_tokens == 0
    assert [ended(events).usage.cached_tokens for events in again] == [0, 0]
    assert ended(again[0]).embedding == ended(again[1]).embedding
    assert core._slots.prefixes.idle_slots == 1


def test_an_embedding_may_fill_the_context_and_slide_past_it() -> None:
    core = make_core(context=100)
    assert len(ended(run(core, Request(token_ids=(5,) * 100, embedding="mean"))[0]).embedding) == 32
    with pytest.raises(ContextLengthError, match="101"):
        run(core, Request(token_ids=(5,) * 101, embedding="mean"))
    request = Request(token_ids=(5,) * 300, embedding="last", context_policy="slide")
    assert ended(run(core, request)[0]).forgotten_tokens > 0


def test_a_cancelled_embedding_is_none() -> None:
    core = make_core(max_rows=8)
    events: list[Any] = []
    sequence = core.prepare(Request(token_ids=(5,) * 50, embedding="mean"), events.append)
    core.enqueue(sequence)
    core.step()
    sequence.cancel()
    core.step()
    assert ended(events).reason is FinishReason.CANCELLED
    assert ended(events).embedding == ()


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0])
def test_hidden_states_that_are_no_numbers_fail_one_request(value: float) -> None:
    """B14."""
    core = make_core()
    hidden = core.session.hidden_states

    def poisoned(rows: int) -> np.ndarray:
        states = hidden(rows)
        states[:3] = value
        return states

    core.session.hidden_states = poisoned
    bad, good = run(core, *(Request(token_ids=(5,) * length, embedding="mean") for length in (3, 5)))
    assert isinstance(bad[-1], GenerationError)
    assert len(ended(good).embedding) == 32
    assert core.free_slots == core.cache.slots


def test_rows_that_are_read_again_count_once() -> None:
    rows = np.arange(1.0, 25.0, dtype=np.float32).reshape(6, 4)
    whole, pieces = EmbeddingReader("mean", 6), EmbeddingReader("mean", 6)
    whole.feed(0, rows, NO_HIDDEN)
    for start, stop in ((0, 3), (0, 2), (2, 5), (5, 6)):
        pieces.feed(start, rows[start:stop], NO_HIDDEN)
    for reader in (whole, pieces):
        assert reader.results() == {}
        assert reader.following() is None
    assert whole.results() == pieces.results()


# --- scored labels ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_rows", [5, 64])
@pytest.mark.parametrize("labels", [LABELS, LABELS[:2], LABELS[1:4], ("yes",)])
def test_labels_are_scored_by_definition(labels: tuple[str, ...], max_rows: int) -> None:
    core = make_core(max_rows=max_rows)
    prompt = byte_ids("is it? ")
    (events,) = run(core, Request(token_ids=tuple(prompt), choices=labels))
    choices = ended(events).choices
    assert {choice.label for choice in choices} == set(labels)
    expected = {label: by_definition(prompt, label, labels) for label in labels}
    for choice in choices:
        assert choice.logprob == pytest.approx(expected[choice.label], rel=1e-6)
    assert sum(choice.probability for choice in choices) == pytest.approx(1.0)
    assert choices[0].label == max(expected, key=expected.__getitem__)
    assert text_of(events) == choices[0].label
    assert ended(events).reason is FinishReason.STOP


def test_one_prefill_is_enough_for_labels_of_one_token() -> None:
    core = make_core()
    prompt = byte_ids("a question ")
    run(core, Request(token_ids=tuple(prompt), choices=("a", "b", "hello", " wor")))
    assert [(step.rows, step.logit_rows) for step in core.session.steps] == [(len(prompt), 1)]


def test_rows_are_computed_once_for_all_labels_that_begin_alike() -> None:
    core = make_core()
    prompt = byte_ids("q: ")
    run(core, Request(token_ids=tuple(prompt), choices=("abcde", "abcx", "z", "abc")))
    read = sum(step.rows for step in core.session.steps)
    # abc once, whose end closes the label abc; then d behind it for abcde; z and abcx need no row of their own
    assert read == len(prompt) + len("abc") + len("d")


def test_labels_find_the_prompt_of_the_one_before() -> None:
    """High volume: the instructions are read once."""
    core = make_core(slots=1)
    prompt = tuple(byte_ids("instructions " * 12))
    for last in b"abc":
        (events,) = run(core, Request(token_ids=(*prompt, last + 3), choices=("yes", "no")))
    assert ended(events).usage.cached_tokens == len(prompt)
    (after,) = run(core, Request(token_ids=(*prompt, 3 + ord("c"), 9), params=SamplingParams(max_tokens=1)))
    assert ended(after).usage.cached_tokens == len(prompt) + 1


def test_labels_leave_no_false_blocks_on_disk(tmp_path: Path) -> None:
    """What is stored while one label is read is not found under another one's name."""
    prompt = tuple(byte_ids("p" * 60))
    labels = ("a" * 30, "b" * 30)
    core = make_core(folder=tmp_path)
    run(core, Request(token_ids=prompt, choices=labels))
    core.close()
    for label in labels:
        ids = (*prompt, *byte_ids(label), *byte_ids("more"))
        fresh, plain = make_core(folder=tmp_path), make_core()
        request = Request(token_ids=ids, params=SamplingParams(max_tokens=6, temperature=0))
        answers = [ended(run(core, request)[0]) for core in (fresh, plain)]
        assert answers[0].token_ids == answers[1].token_ids
        fresh.close()


def test_scores_are_the_same_in_any_company() -> None:
    prompt = tuple(byte_ids("what is it? ") * 3)
    asked = Request(token_ids=prompt, choices=LABELS)
    alone = ended(run(make_core(), asked)[0]).choices
    others = [Request(token_ids=prompt[:n], params=SamplingParams(max_tokens=30, seed=n)) for n in (5, 20)]
    for max_rows in (6, 64):
        core = make_core(max_rows=max_rows, slots=4, mixed_chunk=2)
        together = run(core, others[0], asked, others[1], asked)
        assert ended(together[1]).choices == ended(together[3]).choices == alone


def test_a_ring_that_has_lost_what_a_label_stands_on_reads_the_prompt_again(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core()
    prompt = byte_ids("what is it? ")
    expected = ended(run(core, Request(token_ids=tuple(prompt), choices=LABELS))[0]).choices
    truncate = core.cache.truncate
    monkeypatch.setattr(core.cache, "truncate", lambda slot, rows: rows == 0 and truncate(slot, rows))
    assert ended(run(core, Request(token_ids=tuple(prompt), choices=LABELS, cache=False))[0]).choices == expected


def test_labels_follow_a_chat() -> None:
    core = make_core()
    request = Request.chat([Message.user("hello")], choices=("yes", "no"))
    prompt = core.intake.prompt(request)[0]
    choices = ended(run(core, request)[0]).choices
    assert choices[0].logprob == pytest.approx(max(by_definition(prompt, x, ("yes", "no")) for x in ("yes", "no")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embedding": "max"}, "mean or last"),
        ({"choices": ["a"]}, "tuple of texts"),
        ({"choices": ("a", "")}, "not empty"),
        ({"choices": ("a", "a")}, "'a' is given twice"),
        ({"choices": tuple(map(str, range(MAX_CHOICES + 1)))}, f"at most {MAX_CHOICES}"),
        ({"choices": ("a",), "embedding": "mean"}, "exclude"),
        ({"choices": ("a",), "response_format": Grammar.json_object()}, "choices and json_object exclude"),
        ({"embedding": "mean", "response_format": Grammar.json_object()}, "exclude"),
    ],
)
def test_what_contradicts_itself_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        Request(text="x", **options)


def test_labels_have_bounds_of_their_own() -> None:
    core = make_core(context=40)
    with pytest.raises(ParameterError, match="has 65 tokens"):
        run(core, Request(text="x", choices=("y" * 65,)))
    with pytest.raises(ContextLengthError, match="41 tokens"):
        run(core, Request(token_ids=(5,) * 38, choices=("a", "abc")))
    assert len(ended(run(core, Request(token_ids=(5,) * 37, choices=("a", "abc")))[0]).choices) == 2


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_no_numbers_fail_one_request(value: float) -> None:
    def model(ids: list[int]) -> np.ndarray:
        return np.full(VOCAB, value, np.float32) if 7 in ids else hashed_logits(ids)

    bad, good = run(make_core(model), *(Request(token_ids=(i,), choices=("yes", "no")) for i in (7, 8)))
    assert isinstance(bad[-1], GenerationError)
    assert len(ended(good).choices) == 2


@settings(max_examples=60)
@given(
    labels=st.lists(
        st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple), min_size=1, max_size=6, unique=True
    ),
    seed=st.integers(0, 99),
)
def test_probabilities_are_those_of_disjoint_answers(labels: list[tuple[int, ...]], seed: int) -> None:
    """Over a model of four tokens, of which the last ends an answer, however its rows are cut: no label counts answers
    of another, so together they are at most certain."""
    prompt, cut = [9, 9], random.Random(seed)

    def row(ids: Sequence[int]) -> np.ndarray:
        return np.random.Generator(np.random.PCG64([seed, *ids])).standard_normal(4).astype(np.float32)

    reader = ChoiceReader(prompt, [(str(tokens), tokens) for tokens in labels], [3])
    ids, done = prompt, 0
    while ids is not None:
        while done < len(ids):
            stop = cut.randint(done + 1, len(ids))
            wanted = reader.logit_rows(done, stop)
            rows = [row(ids[: i + 1]) for i in range(stop - wanted, stop)]
            reader.feed(done, np.empty((stop - done, 1)), np.array(rows, np.float32).reshape(wanted, 4))
            done = stop
        following = reader.following()
        if following is not None:
            done = cut.randint(0, next(i for i in range(len(following)) if following[: i + 1] != ids[: i + 1]))
        ids = following
    choices = reader.results()["choices"]
    assert len(choices) == len(labels)
    assert sum(np.exp(choice.logprob) for choice in choices) <= 1 + 1e-9
    assert sum(choice.probability for choice in choices) == pytest.approx(1.0)


# --- a tiny model -------------------------------------------------------------------------------------------------------

TEXT = "The quick brown fox jumps over the lazy dog. " * 4


@pytest.fixture(scope="module")
def reference(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> StockSession:
    return StockSession(write_reference(tiny_folder, tmp_path_factory.mktemp("reference"), window=512), threads=1)


def answer(engine: Engine, request: Request) -> Finished:
    handle = engine.submit(request)
    list(handle)
    assert handle.finished is not None
    return handle.finished


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings_are_those_of_the_reference(
    tiny_folder: Path, reference: StockSession, kernels: KernelLibrary, pooling: str
) -> None:
    vectors = []
    for chunk, threads in ((64, 2), (16, 1)):
        with Engine.load(tiny_folder, EngineConfig(context=512, slots=2, max_chunk=chunk, threads=threads)) as engine:
            request = Request.completion(TEXT, embedding=pooling)
            ids = engine.tokenize(request)
            others = [engine.submit(Request.completion(TEXT[:n], embedding="mean")) for n in (30, 90)]
            vectors.append(answer(engine, request).embedding)
            assert all(other.text() == "" for other in others)
    assert len(ids) > 2 * 64
    assert vectors[0] == vectors[1]
    expected = pooled(reference.hidden_states(np.array(ids)), pooling)
    assert float(np.dot(vectors[0], expected)) > 0.999
    assert float(np.linalg.norm(vectors[0])) == pytest.approx(1.0, abs=1e-6)


def test_scores_are_those_of_the_reference(tiny_folder: Path, reference: StockSession, kernels: KernelLibrary) -> None:
    labels = ("a cat", "a dog", "nothing at all")
    with Engine.load(tiny_folder, EngineConfig(context=512, slots=4, max_chunk=32)) as engine:
        choices = answer(engine, Request.completion(TEXT, choices=labels)).choices
        prompt = engine.tokenize(Request.completion(TEXT))
        for choice in choices:
            ids = engine.tokenize(Request.completion(choice.label))
            rows = reference.logits(np.array([*prompt, *ids]))[len(prompt) - 1 : -1]
            exact = sum(log_softmax(row)[token] for row, token in zip(rows, ids, strict=True))
            assert choice.logprob == pytest.approx(exact, abs=0.05 * len(ids))


def test_scores_are_the_log_probabilities_that_sampling_tells(tiny_folder: Path, kernels: KernelLibrary) -> None:
    with Engine.load(tiny_folder, EngineConfig(context=512, slots=4, max_chunk=32)) as engine:
        params = SamplingParams(max_tokens=1, temperature=0, logprobs=True, top_logprobs=20, ignore_eos=True)
        events = list(engine.complete(TEXT, params))
        (info,) = [info for event in events if isinstance(event, TextDelta) for info in event.tokens]
        told = {engine.detokenize([one.token_id]): one for one in info.alternatives}
        labels = tuple(x for x, one in told.items() if engine.tokenize(Request.completion(x)) == [one.token_id])
        scored = {choice.label: choice for choice in answer(engine, Request.completion(TEXT, choices=labels)).choices}
    alone = [label for label in labels if not any(other.startswith(label) for other in labels if other != label)]
    assert len(alone) > 3
    for label in alone:
        assert scored[label].logprob == pytest.approx(told[label].logprob, abs=1e-4)
