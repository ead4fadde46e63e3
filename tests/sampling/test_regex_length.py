"""Lower bounds of what an expression matches; syntax of others' dialects is no error."""

from __future__ import annotations

import pytest

from edge_llm.errors import ParameterError
from edge_llm.sampling.grammar import MAX_LEAST_LENGTH, Grammar
from edge_llm.sampling.regex_length import shortest_match


@pytest.mark.parametrize(
    ("pattern", "length"),
    [
        *(("(a{1000}){1000}", 1_000_000), ("a|bcd", 1), ("(?:ab|c)+", 1), ("x{3}{4}", 12), ("a{2}?", 2), ("a{1,9}b?", 1)),
        *(("[]a]{3}", 3), (r"[^\]]{4,}x?", 4), ("[[:alpha:]]{3}", 3), ("[a[bc]]{2}", 2), (r"\d{3}-\d{4}", 8), ("^a$", 1)),
        *((r"\p{L}{2}", 2), ("(?i)abc", 3), ("(?i:abc)", 3), ("(?<n>ab)", 2), ("(?P<n>ab)*", 0), ("(a|(b|c)d)e", 2)),
        *((r"\x41b", 2), (r"\\", 1), (r"\ba", 1), ("(?x) a b", 0), ("(?=a)b", 0), ("(((", 0), (")", 0), ("[a", 1)),
    ],
)  # fmt: skip
def test_lower_bounds(pattern: str, length: int) -> None:
    assert shortest_match(pattern) == length


def test_time_does_not_grow_with_the_square() -> None:
    bombs = {"[" * 60_000: 1, "(" * 60_000: 0, r"\p{" * 20_000: 20_000, "(?<a" * 15_000: 0, "[[a" * 20_000: 1}
    assert [shortest_match(bomb) for bomb in bombs] == list(bombs.values())  # hours, if it did


@pytest.mark.parametrize("pattern", ["\\", "a\\", "(a|b\\", "(?=a)\\", "a\\\\\\", "[a\\"])
def test_a_lone_backslash_is_refused(pattern: str) -> None:
    with pytest.raises(ParameterError, match=r"^the regex is not sound: it ends after a backslash$"):
        Grammar.regex(pattern)
    with pytest.raises(ParameterError, match=r"^the schema's pattern is not sound: it ends after a backslash$"):
        Grammar.json_schema({"items": [{"type": "string", "pattern": pattern}]})


def test_what_no_answer_is_long_enough_for_is_refused_before_it_is_compiled() -> None:
    with pytest.raises(ParameterError, match="too many states: no answer shorter than 1000000 characters"):
        Grammar.regex("(a{1000}){1000}")
    assert Grammar.regex(f"a{{{MAX_LEAST_LENGTH}}}").text
