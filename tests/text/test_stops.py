"""Stop strings over chunks: the same end however the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_llm.text.stops import StopMatcher
from tests.text.tiny import tiny_tokenizer

letters = st.text("ab", max_size=30)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=6), max_size=4)


def run(stops: list[str], chunks: list[str]) -> tuple[list[str], str | None]:
    """What is shown chunk by chunk, with what flush gives at the end, and the stop met."""
    matcher = StopMatcher(stops)
    shown, matched = [], None
    for chunk in chunks:
        result = matcher.feed(chunk)
        shown.append(result.text)
        matched = matched or result.matched
    return [*shown, matcher.flush()], matched


def by_definition(stops: list[str], text: str) -> tuple[str, str | None]:
    """The first place where a stop is complete; of those that end there the longest."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(stop_lists, st.lists(letters))
def test_any_chunks_end_where_the_whole_text_ends(stops: list[str], chunks: list[str]) -> None:
    shown, matched = run(stops, chunks)
    assert ("".join(shown), matched) == by_definition(stops, "".join(chunks))


@given(stop_lists, letters)
def test_only_what_may_become_a_stop_is_held_back(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops)
    result = matcher.feed(text)
    held = matcher.flush()
    possible = [n for n in range(len(text) + 1) if any(stop.startswith(text[len(text) - n :]) for stop in stops)]
    if result.matched is None:
        assert len(held) == max([n for n in possible if n > 0], default=0)


def test_b7_stop_over_several_tokens() -> None:
    """B7: the answer stops just before "O P Q" and no part of it leaks, streaming or not."""
    text = "A B C D E F G H I J K L M N O P Q R S"
    tokens = [text[:2], *(text[i : i + 2] for i in range(2, len(text), 2))]
    for chunks in (tokens, list(text), [text]):
        shown, matched = run(["O P Q"], chunks)
        assert "".join(shown) == "A B C D E F G H I J K L M N "
        assert matched == "O P Q"
    shown, _ = run(["O P Q"], [*tokens[:15]])
    assert shown[-2:] == ["", "O "]


@pytest.mark.parametrize(
    ("stops", "text", "shown", "matched"),
    [
        (["world", "lo wor"], "hello world", "hel", "lo wor"),
        (["ab", "abc"], "xabc", "x", "ab"),
        (["b", "ab"], "xab", "x", "ab"),
        (["bc", "abcdX"], "abcdX", "a", "bc"),
        (["\n\n"], "a\n\n\nb", "a", "\n\n"),
        (["é", "😀"], "caf😀é", "caf", "😀"),
        ([], "anything", "anything", None),
    ],
)
def test_several_stops(stops: list[str], text: str, shown: str, matched: str | None) -> None:
    """The stop that is complete first ends the answer; of two complete at once, the longer."""
    parts, found = run(stops, [text])
    assert ("".join(parts), found) == (shown, matched)


def test_nothing_follows_a_stop() -> None:
    matcher = StopMatcher(["."])
    assert matcher.feed("One. Two. ").text == "One"
    assert matcher.feed("Three.").text == ""
    assert matcher.feed("Four.").matched is None
    assert matcher.flush() == ""


def test_work_is_linear_in_the_text() -> None:
    """Each character costs at most two steps, for stops that are nearly in the text at every place."""
    steps = 0

    class Counting(dict):
        def __contains__(self, key: object) -> bool:
            nonlocal steps
            steps += 1
            return super().__contains__(key)

    matcher = StopMatcher(["a" * 255 + "b", "a" * 128 + "c"])
    pending, seen = [matcher._root], set()
    while pending:
        state = pending.pop()
        if id(state) not in seen:
            seen.add(id(state))
            pending += state.next.values()
            state.next = Counting(state.next)
    length = 20_000
    assert matcher.feed("a" * length).matched is None
    assert steps <= 3 * length


def test_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher([""])


def test_b9_stop_that_is_the_text_of_a_token() -> None:
    """B9: such a stop is met by the token's id, whose text is never shown; as text it is met as any other."""
    tokenizer = tiny_tokenizer()
    end = tokenizer.added_tokens["<|im_end|>"]
    detokenizer = tokenizer.detokenizer()
    matcher = StopMatcher(["<|im_end|>", "END"])
    shown = [matcher.feed(detokenizer.feed(i)).text for i in [*tokenizer.encode_content("hello"), end]]
    assert "".join(shown) + matcher.flush() == "hello"
    assert run(["<|im_end|>"], ["a <|im", "_end|> b"]) == (["a ", "", ""], "<|im_end|>")
