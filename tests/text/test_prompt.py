"""Text that remembers its origins behaves as plain text, and keeps origins in step with characters."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_llm.text.prompt import CONTENT, SCAFFOLD, PromptText, RenderedPrompt, concat, join, origins_of

some_text = st.text("ab<|> \n\tİß", max_size=12)
pieces = st.lists(st.tuples(some_text, st.sampled_from([CONTENT, SCAFFOLD, "\2"])), max_size=4)


def built(parts: list[tuple[str, str]]) -> PromptText:
    return concat([PromptText.of(text, origin) for text, origin in parts])


def marked(text: str) -> PromptText:
    """Each character's origin is the character itself, so that every operation can be checked by looking."""
    return PromptText(text, text)


def assert_same(result: Any, expected: Any) -> None:
    """Equal as text; and what kept its record kept it in step."""
    assert result == expected
    for text in result if isinstance(result, list) else [result]:
        if isinstance(text, PromptText):
            assert text.origins == str.__str__(text)


@given(some_text, st.sampled_from(["a", "<|", " ", "ab", "\n", "b<"]), st.integers(-1, 3))
def test_operations_equal_those_of_str(text: str, other: str, count: int) -> None:
    value = marked(text)
    assert_same(value.strip(), text.strip())
    assert_same(value.strip(other), text.strip(other))
    assert_same(value.lstrip(other), text.lstrip(other))
    assert_same(value.rstrip(), text.rstrip())
    assert_same(value.split(), text.split())
    assert_same(value.split(None, count), text.split(None, count))
    assert_same(value.split(other, count), text.split(other, count))
    assert_same(value.rsplit(None, count), text.rsplit(None, count))
    assert_same(value.rsplit(other, count), text.rsplit(other, count))
    assert_same(value.removeprefix(other), text.removeprefix(other))
    assert_same(value.removesuffix(other), text.removesuffix(other))
    assert_same(value.replace(other, marked("zz"), count), text.replace(other, "zz", count))
    assert_same(value.replace("", other), text.replace("", other))
    assert_same(value + marked(other), text + other)
    assert_same(marked(other) + value, other + text)
    assert_same(value * count, text * count)
    assert_same(count * value, count * text)
    assert_same(value[count:], text[count:])
    assert_same(value[::-1], text[::-1])
    assert_same(join(marked(other), [value, value]), other.join([text, text]))


@given(some_text)
def test_changes_of_case_keep_the_record_where_lengths_allow(text: str) -> None:
    value = PromptText.of(text, SCAFFOLD)
    for name in ("upper", "lower", "title", "capitalize"):
        changed = getattr(value, name)()
        assert changed == getattr(text, name)()
        if len(changed) == len(text):
            assert origins_of(changed) == SCAFFOLD * len(text)
        else:
            assert type(changed) is str


@given(pieces, some_text)
def test_plain_text_counts_as_content(parts: list[tuple[str, str]], plain: str) -> None:
    value = built(parts)
    assert (value + plain).origins == value.origins + CONTENT * len(plain)
    assert (plain + value).origins == CONTENT * len(plain) + value.origins
    assert str(value) is value
    assert hash(value) == hash(str.__str__(value))
    assert {value: 1}[str.__str__(value)] == 1


@given(pieces)
def test_runs_cover_the_prompt(parts: list[tuple[str, str]]) -> None:
    value = built(parts)
    prompt = RenderedPrompt(str.__str__(value), value.origins)
    runs = list(prompt.runs())
    assert "".join(origin * (end - start) for start, end, origin in runs) == value.origins
    assert all(a[2] != b[2] for a, b in pairwise(runs))


def test_a_prompt_needs_an_origin_for_each_character() -> None:
    with pytest.raises(ValueError, match="origin"):
        RenderedPrompt("ab", SCAFFOLD)
