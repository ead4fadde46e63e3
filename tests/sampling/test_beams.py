"""BeamDecoder over made-up logits; tests/engine/test_beams.py and test_against_transformers.py judge whole searches."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_llm.errors import GenerationError
from edge_llm.messages import FinishReason
from edge_llm.sampling.beams import BeamDecoder, Ends, Hypothesis

END = 0


def row_after(ids: tuple[int, ...], vocab: int, seed: int) -> np.ndarray:
    random = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, vocab, *ids])))
    return random.integers(-3, 4, vocab).astype(np.float32)  # so that many are equal


def log_softmax(row: np.ndarray) -> np.ndarray:
    values = row.astype(np.float64)
    return values - np.log(np.exp(values).sum())


def searched(decoder: BeamDecoder, vocab: int, seed: int) -> list[Hypothesis]:
    """Run a search to its end, along the branches that the decoder tells."""
    beams: list[tuple[int, ...]] = [()]
    for _ in range(50):
        selection = decoder.select(np.stack([row_after(ids, vocab, seed) for ids in beams]))
        if selection.finish is not None:
            assert selection.finish is FinishReason.STOP
            assert selection.forced == decoder.ranked()[0].token_ids
            return decoder.ranked()
        assert len(beams) <= len(selection.branches) <= decoder.width
        beams = [(*beams[branch], token) for branch, token in selection.branches]
        assert len(set(beams)) == len(beams)
    raise AssertionError("the search does not end")


@settings(max_examples=60)
@given(
    vocab=st.integers(3, 5), length=st.integers(1, 4), seed=st.integers(0, 10**6), penalty=st.sampled_from([0.0, 1.0])
)
def test_enough_beams_find_the_best_of_all_answers(vocab: int, length: int, seed: int, penalty: float) -> None:
    """As many as there are answers."""
    scores = {}
    for answer in _answers(vocab, length):
        rows = (log_softmax(row_after(answer[:i], vocab, seed)) for i in range(len(answer)))
        scores[answer] = (
            sum(float(row[token]) for row, token in zip(rows, answer, strict=True)) / len(answer) ** penalty
        )
    ends = Ends(frozenset([END]))
    found = searched(
        BeamDecoder(len(scores), max_tokens=length, ends=ends, length_penalty=penalty, early_stopping=False),
        vocab,
        seed,
    )
    assert {one.token_ids: one.score(penalty) for one in found} == pytest.approx(scores)
    assert found[0].score(penalty) == max(one.score(penalty) for one in found)


def _answers(vocab: int, length: int) -> list[tuple[int, ...]]:
    """All that end, or are as long as they may be."""
    words = range(1, vocab)
    ended = [(*ids, END) for n in range(length) for ids in product(words, repeat=n)]
    return ended + list(product(words, repeat=length))


@settings(max_examples=60)
@given(width=st.integers(2, 6), vocab=st.integers(7, 40), seed=st.integers(0, 10**6))
def test_of_equal_continuations_the_first_ones_are_taken(width: int, vocab: int, seed: int) -> None:
    decoder = BeamDecoder(width, max_tokens=9, ends=Ends(frozenset()), length_penalty=1.0, early_stopping=False)
    first = row_after((), vocab, seed)
    order = sorted(range(vocab), key=lambda token: (-first[token], token))
    assert decoder.select(first[None]).branches == tuple((0, token) for token in order[:width])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_no_number_is_refused(bad: float) -> None:
    decoder = BeamDecoder(2, max_tokens=9, ends=Ends(frozenset()), length_penalty=1.0, early_stopping=False)
    row = np.zeros((1, 9), np.float32)
    row[0, 4] = bad
    with pytest.raises(GenerationError, match="not finite"):
        decoder.select(row)


def test_many_ends_leave_as_many_beams_as_before() -> None:
    """Nearly all the most probable tokens end: more of the others are looked at. But only the most probable end counts."""
    ends = Ends(frozenset({0, *range(2, 30)}))
    decoder = BeamDecoder(2, max_tokens=9, ends=ends, length_penalty=1.0, early_stopping=False)
    row = -np.arange(40, dtype=np.float32)
    assert decoder.select(row[None]).branches == ((0, 1), (0, 30))
    assert [one.token_ids for one in decoder.ranked()] == [(0,)]


def test_a_search_whose_beams_would_become_fewer_ends() -> None:
    ends = Ends(frozenset(), (b"x",), lambda _: b"x", lambda ids: len(ids) == 2 and tuple(ids) not in {(1, 0), (2, 0)})
    decoder = BeamDecoder(3, max_tokens=9, ends=ends, length_penalty=-1.0, early_stopping=False)
    rows = np.zeros((3, 3), np.float32)
    assert len(decoder.select(rows[:1]).branches) == 3
    last = decoder.select(rows)
    assert (last.finish, last.branches) == (FinishReason.STOP, ())
    assert last.forced == (0, 0)
