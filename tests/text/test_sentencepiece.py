"""SentencePiece's encoding against its slow truth and the `tokenizers` library; llama.cpp's ids stand in test_tokenizer.py."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import models

from edge_llm.errors import ModelFormatError
from edge_llm.text.sentencepiece import BYTE_PIECES, SentencePieceEncoder
from tests.reference.sentencepiece import pieces_of


def encoder(
    ranks: Mapping[str, int],
    *,
    whole: Mapping[str, int] | None = None,
    gone: frozenset[str] = frozenset(),
    space_prefix: bool = False,
) -> SentencePieceEncoder:
    """Pieces with their ranks, and after them the bytes."""
    ids = {piece: i for i, piece in enumerate((*ranks, *BYTE_PIECES))}
    worst = [10**6] * len(BYTE_PIECES)
    return SentencePieceEncoder(ids, [*ranks.values(), *worst], whole=whole or {}, gone=gone, space_prefix=space_prefix)


def texts_of(ranks: Mapping[str, int], ids: list[int]) -> list[str]:
    return [[*ranks, *BYTE_PIECES][i] for i in ids]


def in_pieces(text: str, ranks: Mapping[str, int]) -> list[str]:
    """The slow truth; a character that is no piece is written in bytes."""
    parts = pieces_of(text.replace(" ", "▁"), ranks)
    return [p for part in parts for p in ([part] if part in ranks else [BYTE_PIECES[b] for b in part.encode()])]


alphabet = "ab▁é"
vocabularies = st.dictionaries(st.text(alphabet, min_size=1, max_size=4), st.integers(0, 6), max_size=14)


@given(vocabularies, st.text("ab é😀", max_size=24))
def test_any_vocabulary_equals_the_slow_truth(ranks: dict[str, int], text: str) -> None:
    """Equal ranks, pieces that nothing leads to and pieces across spaces among them."""
    assert texts_of(ranks, encoder(ranks)(text)) == in_pieces(text, ranks)


@given(st.lists(st.text(alphabet, min_size=1, max_size=4), max_size=14, unique=True), st.text("ab é", max_size=24))
def test_ids_are_those_of_the_library_where_ranks_differ(pieces: list[str], text: str) -> None:
    """The library follows pairs, one rank each: every pair that makes a piece, in the order of the pieces."""
    pieces = list(dict.fromkeys([*pieces, *alphabet]))
    ranks = {piece: i for i, piece in enumerate(pieces)}
    pairs = [(p[:at], p[at:]) for p in pieces for at in range(1, len(p)) if p[:at] in ranks and p[at:] in ranks]
    library = Library(models.BPE(vocab=ranks, merges=pairs))
    assert encoder(ranks)(text) == library.encode(text.replace(" ", "▁")).ids


RANKS = {"▁a": 0, "ab": 1, "bb": 1, "▁ab": 2, "a": 9, "b": 9, "▁": 9}


def test_the_best_pair_joins_first_and_of_equals_the_leftmost() -> None:
    assert texts_of(RANKS, encoder(RANKS)("a ab")) == ["a", "▁ab"]
    assert texts_of(RANKS, encoder(RANKS)("abb bb")) == ["ab", "b", "▁", "bb"]
    assert texts_of(RANKS, encoder(RANKS)("c é")) == ["<0x63>", "▁", "<0xC3>", "<0xA9>"]


def test_whole_texts_come_first_and_the_longest_of_them() -> None:
    whole = {"\n": 900, "\n\n\n": 901, "  ": 902, "ab": 903}
    encode = encoder(RANKS, whole=whole)
    assert encode("\n" * 7) == [901, 901, 900]
    assert texts_of(RANKS, encode("a")) == ["a"]
    assert encode("ab   ab") == [903, 902, *encode(" "), 903]
    assert encode("\n\nab ") == [900, 900, 903, *encode(" ")]


def test_a_space_that_nobody_wrote_stands_at_each_beginning() -> None:
    """As llama.cpp has it: also after a text that is kept whole."""
    encode = encoder(RANKS, whole={"\n": 900}, space_prefix=True)
    assert texts_of(RANKS, encode("ab")) == ["▁ab"]
    assert texts_of(RANKS, encode("ab", begins=False)) == ["ab"]
    assert encode("a\na") == [*encode("a"), 900, *encode("a")]
    assert encode("a\na", begins=False) == [*encode("a", begins=False), 900, *encode("a")]
    assert encode("") == []
    assert encode("\n") == [900]


def test_what_is_gone_never_comes_out() -> None:
    """Nor does a piece for a byte, unless a character has none of its own."""
    ids = encoder(RANKS, gone=frozenset(["ab", "a"]))("ab a<0x61>")
    assert texts_of(RANKS, ids) == ["<0x61>", "b", "▁a", *(BYTE_PIECES[ord(c)] for c in "<0x61>")]


def test_a_vocabulary_without_bytes_is_refused() -> None:
    with pytest.raises(ModelFormatError, match="bytes"):
        SentencePieceEncoder({"a": 0}, [0], whole={}, gone=(), space_prefix=False)


def test_long_words_are_not_kept() -> None:
    """Nobody's text fills the memory."""
    encode = encoder(RANKS)
    assert len(encode("ab" * 5000)) == 5000
    assert encode._kept.cache_info().currsize == 0
    encode("ab ab a")
    assert encode._kept.cache_info().currsize == 3
