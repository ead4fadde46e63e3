"""Which added tokens are text as any other, and how those that are not are found."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_llm.errors import ModelFormatError
from edge_llm.text.added_tokens import MAX_CONTENT_CHARACTERS, AddedToken, TextFinder, added_tokens


@pytest.mark.parametrize("text", ["\n", "\n\n\n", "  ", " " * 31, "\t", " \n", "<b>", "</h1>", "<table>", "<bbox>"])
def test_white_space_and_tags_of_web_pages_are_content(text: str) -> None:
    assert AddedToken(1, text, special=False).is_content
    assert not AddedToken(1, text, special=True).is_content


@pytest.mark.parametrize(
    "text",
    [
        "<think>", "</think>", "<tool_call>", "<start_of_image>", "[multimodal]", "<unused0>", "<|im_end|>", "▁▁", " x",
        "<B>", "<b >", "<h7>", "<b", "b>", "<b></b>", "<b>\n", "<>", "</>", "<system>", "<user>", "",
    ],
)  # fmt: skip
def test_what_may_steer_is_not(text: str) -> None:
    assert not AddedToken(1, text, special=False).is_content


def entry(token_id: int, text: str) -> dict[str, Any]:
    return {"id": token_id, "content": text, "special": False}


def test_there_is_a_bound_to_what_each_place_of_a_text_is_compared_with() -> None:
    count = MAX_CONTENT_CHARACTERS // 128
    entries = [entry(i, " " * i + "\t" * (128 - i)) for i in range(count)]
    assert len(added_tokens({"added_tokens": entries})) == count
    with pytest.raises(ModelFormatError, match="white space"):
        added_tokens({"added_tokens": [*entries, entry(count, "\n")]})


@given(
    st.lists(st.text("ab", min_size=1, max_size=3)), st.text("abc", max_size=20), st.integers(0, 5), st.integers(0, 5)
)
def test_finding_is_what_a_pattern_does(texts: list[str], text: str, skipped: int, cut: int) -> None:
    pattern = re.compile("|".join(sorted(texts, key=len, reverse=True)) or "(?!)")
    start, end = skipped, len(text) - cut
    found = [match.span() for match in pattern.finditer(text, start, end)]
    assert list(TextFinder(texts).spans(text, start, end)) == found
