"""What llguidance says of grammars that are none, as one line with the place. The messages are its own, not copies."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_llm.errors import ParameterError
from edge_llm.sampling.grammar import Grammar, GrammarKind
from edge_llm.sampling.grammar_compiler import GrammarCompiler
from edge_llm.sampling.grammar_faults import HINTS, fault_in_one_line

TOKENS = [b"<end>", *(bytes([i]) for i in range(256))]


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(TOKENS, control_ids=[], end_ids=[0], encode=lambda text: [1 + i for i in text.encode()])
    yield made
    made.close()


@pytest.mark.parametrize(
    ("grammar", "told"),
    [
        (Grammar.regex("a("), "unclosed group, at character 2 of a("),
        (Grammar.regex("(?=a)b"), "look-around is not supported, at character 1 of (?=a)b"),
        (Grammar.regex("x" * 50 + "(" + "y" * 50), f"unclosed group, at character 51 of ...{'x' * 20}({'y' * 19}..."),
        (Grammar.regex(r"\1"), r"backreferences are not supported, at character 1 of \1"),
        (Grammar.regex(r"\bfoo"), "lookarounds not supported yet"),
        (Grammar.lark("start: foo"), 'line 1, column 8: unknown name: "foo"'),
        (Grammar.lark('start: "a" |\n  ((('), "line 2, column 3: expecting rule, token or statement"),
        (
            Grammar.lark("start: A\nA: /[/"),
            "line 2, column 4: a regex in it: unclosed character class, at character 1 of [",
        ),
        (Grammar.lark('start: "a'), "line 1, column 10: this begins no text, name or expression, or it has no end"),
        (Grammar.lark("%import common.FOO\nstart: FOO"), "line 1, column 1: Unknown common regex: common.FOO"),
        (Grammar.lark('foo: "a"'), "no start rule found"),
        (Grammar.json_schema({"type": "foo"}), "Invalid type: foo"),
        (Grammar.json_schema({"if": {}, "then": {}}), 'not supported: "if", "then"'),
        (
            Grammar.json_schema({"type": "string", "pattern": "(a"}),
            "a regex in it: unclosed group, at character 1 of (a",
        ),
        (Grammar.json_schema({"minimum": "x"}), "Expected a number for 'minimum', got \"x\""),
        (
            Grammar.json_schema({"type": "integer", "minimum": 5, "maximum": 3}),
            "it allows no text at all: minimum (5) is greater than maximum (3)",
        ),
    ],
)
def test_where_and_what(compiler: GrammarCompiler, grammar: Grammar, told: str) -> None:
    with pytest.raises(ParameterError) as caught:
        compiler.matcher(grammar)
    assert str(caught.value) == f"the {grammar.kind} cannot be used: {told}"
    assert caught.value.hint == HINTS[grammar.kind]


def test_hints_name_nothing_that_only_a_checkout_has() -> None:
    assert not [hint for hint in HINTS.values() if hint and ("docs/" in hint or ".md" in hint)]


def test_the_grammar_of_the_hint_is_one(compiler: GrammarCompiler) -> None:
    shown = (HINTS[GrammarKind.LARK] or "").removeprefix("as in: ").partition(" (")[0]
    compiler.matcher(Grammar.lark(shown.replace(" -- ", "\n")))


@given(st.sampled_from(list(GrammarKind)), st.text(max_size=800))
def test_any_message_is_one_line_of_ascii(kind: GrammarKind, text: str) -> None:
    told = fault_in_one_line(kind, text)
    assert re.fullmatch(r"[ -~]*", told)
    assert len(told) <= 305


def test_the_compilers_state_is_told_to_nobody() -> None:
    assert "secret" not in fault_in_one_line(GrammarKind.LARK, "too complex\n<state>\nTokens: secret\n</state>")


@pytest.mark.parametrize(
    "unit", ['invalid regex "', " (at ", "Unimplemented keys: [", "^ ", "regex parse error:\n    a\n    ^\n"]
)
def test_a_message_that_a_grammar_has_made_long_is_not_looked_at_again_and_again(unit: str) -> None:
    """Quadratic patterns would take minutes here, while every other answer waits."""
    told = fault_in_one_line(GrammarKind.JSON_SCHEMA, unit * (2_000_000 // len(unit)))
    assert len(told) < 400
    assert told.isascii()
    assert told.isprintable()
