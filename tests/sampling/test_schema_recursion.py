"""Recursive schemas become finite and otherwise allow what they did."""

from __future__ import annotations

from typing import Any

import pytest
from jsonschema import Draft202012Validator

from edge_llm.sampling.schema_recursion import MAX_NESTING, bound_recursion

LIST = {
    "$defs": {
        "item": {
            "type": "object",
            "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/item"}]}},
            "required": ["next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/item",
}
TREE = {
    "type": "object",
    "properties": {"next": {"$ref": "#"}, "size": {"$ref": "#/definitions/size"}},
    "additionalProperties": False,
    "definitions": {"size": {"type": "integer"}},
}
MUTUAL = {
    "definitions": {
        "a": {"type": "object", "properties": {"next": {"$ref": "#/definitions/b"}}, "additionalProperties": False},
        "b": {"type": "object", "properties": {"next": {"$ref": "#/definitions/a"}}, "additionalProperties": False},
    },
    "$defs": {"entry": {"$ref": "#/definitions/a"}},
    "$ref": "#/$defs/entry",
}


def chain(length: int, end: Any) -> Any:
    value = end
    for _ in range(length):
        value = {"next": value}
    return value


@pytest.mark.parametrize(
    ("schema", "value"),
    [(LIST, lambda n: chain(n, None)), (TREE, lambda n: chain(n - 1, {})), (MUTUAL, lambda n: chain(n - 1, {}))],
    ids=["list", "root", "mutual"],
)
def test_values_up_to_the_limit_stay_and_deeper_ones_go(schema: dict[str, Any], value: Any) -> None:
    bounded = Draft202012Validator(bound_recursion(schema))
    for length in range(1, 3 * MAX_NESTING):
        assert Draft202012Validator(schema).is_valid(value(length))
        assert bounded.is_valid(value(length)) == (length <= MAX_NESTING), length
    assert not bounded.is_valid({"other": 1})


def test_definitions_beside_the_cycle_work() -> None:
    bounded = Draft202012Validator(bound_recursion(TREE))
    assert bounded.is_valid({"next": {"size": 3}})
    assert not bounded.is_valid({"next": {"size": "three"}})


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"$defs": {"a": {"type": "string"}}, "items": {"$ref": "#/$defs/a"}},
        {"const": {"$ref": "#"}},
        {"$ref": "#/$defs/missing"},
        {"$defs": 3},
    ],
    ids=str,
)
def test_what_is_not_recursive_stays_as_it_is(schema: dict[str, Any]) -> None:
    assert bound_recursion(schema) is schema
