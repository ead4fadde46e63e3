"""Grammars as values: what cannot be one is said before anything compiles it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edge_llm.errors import ParameterError
from edge_llm.sampling.grammar import MAX_ENUM, MAX_GRAMMAR_BYTES, Grammar, GrammarKind, parse_schema


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ("", "empty"),
        (" \n", "empty"),
        ("{", "no JSON"),
        ("[1]", "no JSON object"),
        ("false", "no JSON object"),
        ('{"a": NaN}', "NaN"),
        ('{"a": 1, "a": 2}', "twice"),
        ('{"enum": ["\\ud83d"]}', "surrogate"),
        ('{"$ref": "https://example.org/schema"}', "nothing is fetched"),
        ('{"items": {"$ref": "file:///etc/passwd"}}', "nothing is fetched"),
        ("[" * 50_000, "no JSON"),
        (json.dumps(nested(40)), "levels deep"),
        (json.dumps({"enum": list(range(MAX_ENUM + 1))}), "values"),
        (json.dumps({"const": "x" * MAX_GRAMMAR_BYTES}), "bytes"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_schemas_are_refused(schema: str, said: str) -> None:
    """B42, trust.md 1.3."""
    with pytest.raises(ParameterError, match=said):
        Grammar.json_schema(schema)


def test_python_values_are_schemas_too() -> None:
    schema = {"enum": ["é", "😀"]}
    assert parse_schema(Grammar.json_schema(schema).text) == schema
    assert parse_schema("true") == {}
    recursive: dict[str, Any] = {}
    recursive["items"] = recursive
    for bad in ({"a": float("nan")}, {"a": {1, 2}}, recursive):
        with pytest.raises(ParameterError, match="no JSON"):
            Grammar.json_schema(bad)


def test_escaped_and_raw_characters_are_the_same() -> None:
    """B44."""
    raw = '{"properties": {"名前": {"enum": ["café", "😀"]}}}'
    escaped = json.dumps(json.loads(raw))
    assert escaped != raw
    assert parse_schema(escaped) == parse_schema(raw)


@pytest.mark.parametrize("make", [Grammar.regex, Grammar.lark])
def test_empty_or_endless_texts_are_refused(make: Any) -> None:
    with pytest.raises(ParameterError, match="empty"):
        make("")
    with pytest.raises(ParameterError, match="bytes"):
        make("a" * (MAX_GRAMMAR_BYTES + 1))


def test_kinds_are_checked() -> None:
    with pytest.raises(ParameterError, match="takes no text"):
        Grammar(GrammarKind.JSON_OBJECT, "{}")
    with pytest.raises(ParameterError, match="GrammarKind"):
        Grammar("regex", "a")  # type: ignore[arg-type]
    assert Grammar.json_object() == Grammar(GrammarKind.JSON_OBJECT)
