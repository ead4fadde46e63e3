"""Deltas joined equal the whole decode, whatever the tokens are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_llm.text.detokenizer import Detokenizer
from edge_llm.text.tokenizer import Tokenizer
from tests.text.tiny import tiny_sentencepiece, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
TOKENIZERS = {"byte level": TOKENIZER, "sentencepiece": tiny_sentencepiece()}
both_kinds = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)


def deltas(pieces: list[bytes]) -> list[str]:
    detokenizer = Detokenizer(pieces.__getitem__)
    return [*map(detokenizer.feed, range(len(pieces))), detokenizer.flush()]


@given(st.lists(st.binary(max_size=5)))
def test_any_bytes_in_any_tokens(pieces: list[bytes]) -> None:
    assert "".join(deltas(pieces)) == b"".join(pieces).decode("utf-8", "replace")


@given(st.text(), st.data())
def test_valid_text_never_shows_a_replacement(text: str, data: st.DataObject) -> None:
    whole = text.encode("utf-8", "replace")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert "".join(deltas(pieces)) == whole.decode()
    assert "\ufffd" in text or not any("\ufffd" in delta for delta in deltas(pieces))


@both_kinds
@given(st.lists(st.integers(-1, TOKENIZER.vocab_size + 1)))
def test_any_ids(tokenizer: Tokenizer, ids: list[int]) -> None:
    detokenizer = tokenizer.detokenizer()
    assert "".join(map(detokenizer.feed, ids)) + detokenizer.flush() == tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        ([b"\xf0\x9f", b"\x98\x80"], ["", "😀", ""]),
        ([b"\xf0\x9f\x98", b"\x80 and"], ["", "😀 and", ""]),
        ([b"a\xe6", b"\x97\xa5\xe6", b"\x9c", b"\xac."], ["a", "日", "", "本.", ""]),
    ],
    ids=["2+2", "3+1 and text", "two characters over four tokens"],
)
def test_b1_character_split_over_tokens(pieces: list[bytes], shown: list[str]) -> None:
    """B1: no delta holds U+FFFD; the joined deltas equal the whole decode."""
    assert deltas(pieces) == shown


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        ([b"\xe6\x97", b" next"], ["", "\ufffd next", ""]),
        ([b"\xff", b"a"], ["\ufffd", "a", ""]),
        ([b"\xc3", b"\x28"], ["", "\ufffd(", ""]),
        ([b"\xf0\x9f\x98"], ["", "\ufffd"]),
        ([b"\x80", b"\x80"], ["\ufffd", "\ufffd", ""]),
    ],
    ids=["pending, then a space", "invalid alone", "invalid pair", "cut at the end", "stray continuations"],
)
def test_b2_pending_or_invalid_bytes(pieces: list[bytes], shown: list[str]) -> None:
    """B2: an incomplete tail waits; invalid bytes become one replacement each; nothing raises."""
    assert deltas(pieces) == shown


@both_kinds
@pytest.mark.parametrize(
    "text", [" leading", "a   .", "    indented\n\n  - list\n", " ' s , ! ?", "x n't it 's", "\n\n\n", "  \n 日😀\t\t"]
)
def test_b4_white_space_and_punctuation_are_kept(tokenizer: Tokenizer, text: str) -> None:
    """B4: nothing is cleaned up, stripped or joined: the stream equals the whole decode equals the text."""
    ids = tokenizer.encode_content(text)
    detokenizer = tokenizer.detokenizer()
    assert "".join(map(detokenizer.feed, ids)) + detokenizer.flush() == tokenizer.decode(ids) == text


def test_b6_work_for_a_token_does_not_grow() -> None:
    """B6: each token's bytes are looked at once, and each token's text arrives at once."""
    looked_at = []

    def token_bytes(token_id: int) -> bytes:
        looked_at.append(token_id)
        return b"word "

    detokenizer = Detokenizer(token_bytes)
    shown = [detokenizer.feed(i) for i in range(8000)]
    assert shown == ["word "] * 8000
    assert looked_at == list(range(8000))


def test_special_tokens_give_nothing_and_markers_their_text() -> None:
    added = TOKENIZER.added_tokens
    half, rest = TOKENIZER.encode_content("日")[0], TOKENIZER.encode_content("日")[1:]
    ids = [added["<think>"], half, added["<|im_end|>"], *rest, added["<|im_start|>"]]
    detokenizer = TOKENIZER.detokenizer()
    assert [detokenizer.feed(i) for i in ids] == ["<think>", "", "", "", "日", ""][: len(ids)]
    everything = TOKENIZER.detokenizer(skip_special=False)
    assert "".join(map(everything.feed, ids)).endswith("<|im_start|>")
