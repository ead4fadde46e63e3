"""DryWindow: breakers are found in the text, the window slides, and memory stays bounded."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_llm.sampling.dry import DryWindow

TEXTS = [b"a", b"b", b"ab", b"\n", b"x\ny", b"Us", b"er", b":", b"User:", b""]


def window(*token_ids: int, size: int = 100, breakers: tuple[bytes, ...] = (b"\n",)) -> DryWindow:
    return DryWindow(size, breakers, TEXTS.__getitem__, token_ids)


def tokens(dry: DryWindow) -> list[int]:
    return dry.rows[0].tolist()


def test_a_token_that_holds_a_breaker_is_nothing_to_repeat() -> None:
    dry = window(0, 3, 1, 4, 0)
    assert tokens(dry) == [0, -1, 1, -1, 0]
    assert dry.rows[1].tolist() == [0, 0, 0, 0, 4]
    assert dry.limit == 1
    dry.observe(3)
    assert dry.limit == 0


def test_a_breaker_is_found_however_the_text_is_cut() -> None:
    breakers = (b"User:",)
    assert window(0, 8, 1, breakers=breakers).limit == 1
    assert tokens(window(0, 8, 1, breakers=breakers)) == [0, -1, 1]
    split = window(0, 5, 6, 9, 7, 1, 1, breakers=breakers)
    assert split.limit == 2
    assert tokens(split) == [0, 5, 6, 9, 7, 1, 1]  # no token of it holds the whole
    assert window(0, 5, 6, 0, 7, 1, breakers=breakers).limit == 6


def test_a_breaker_that_ended_before_a_token_does_not_end_in_it() -> None:
    assert window(3, 0, 1, breakers=(b"\n", b"long breaker")).limit == 2


def test_without_breakers_nothing_is_asked_of_the_tokenizer() -> None:
    def no_text(_: int) -> bytes:
        raise AssertionError

    dry = DryWindow(10, (), no_text, [1, 2, 1])
    assert (dry.limit, tokens(dry)) == (3, [1, 2, 1])


@settings(max_examples=200)
@given(st.lists(st.integers(0, 9), max_size=300), st.integers(0, 300), st.sampled_from([1, 2, 7, 64, 65, 1000]))
def test_rows_are_those_of_the_last_tokens(text: list[int], prompt: int, size: int) -> None:
    dry = window(*text[:prompt], size=size)
    for token_id in text[prompt:]:
        dry.observe(token_id)
    shown = [-1 if b"\n" in TEXTS[token_id] else token_id for token_id in text][-size:]
    distances = [
        next((back for back in range(1, i + 1) if shown[i - back] == token_id != -1), 0)
        for i, token_id in enumerate(shown)
    ]
    rows = dry.rows
    assert rows[0].tolist() == shown
    far = np.arange(len(shown))
    assert [d if d <= i else 0 for i, d in zip(far, rows[1], strict=True)] == distances
    since = next((back for back, token_id in enumerate(reversed(text)) if token_id in {3, 4}), None)
    if since is not None and (since < size or prompt <= size):
        assert dry.limit == since
    else:
        assert dry.limit >= len(shown)


def test_memory_is_bounded_by_the_window() -> None:
    dry = window(size=100)
    for _ in range(10_000):
        dry.observe(0)
    assert dry.rows.base is not None
    assert dry.rows.base.size <= 3 * (2 * 100 + 64)
    assert dry.rows[1].tolist() == [1] * 100


def test_a_copy_goes_its_own_way() -> None:
    dry = window(0, 1)
    twin = dry.copy()
    twin.observe(0)
    dry.observe(3)
    assert (tokens(dry), tokens(twin)) == ([0, 1, -1], [0, 1, 0])
    assert (dry.limit, twin.limit) == (0, 3)
    assert twin.rows[1].tolist() == [0, 0, 2]
