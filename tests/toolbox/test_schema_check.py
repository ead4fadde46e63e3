"""The small checker says what jsonschema says, and refuses what it could not keep."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_llm.errors import ParameterError
from edge_llm.toolbox.schema_check import SchemaCheck

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
scalars = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.5, 1.0, 2.5]) | st.text("ab", max_size=3)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)


def schemas(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    counts = st.integers(0, 3)
    return st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(TYPES) | st.lists(st.sampled_from(TYPES), min_size=1, max_size=2, unique=True),
            "enum": st.lists(values, min_size=1, max_size=3),
            "const": values,
            "properties": st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
            "required": st.lists(st.sampled_from("abc"), max_size=2, unique=True),
            "additionalProperties": inner,
            "items": inner,
            "prefixItems": st.lists(inner, min_size=1, max_size=2),
            "minimum": st.integers(-2, 2),
            "exclusiveMaximum": st.integers(-2, 2),
            "multipleOf": st.sampled_from([1, 2, 0.5]),
            "minLength": counts,
            "maxLength": counts,
            "minItems": counts,
            "maxItems": counts,
            "minProperties": counts,
            "maxProperties": counts,
            "allOf": st.lists(inner, min_size=1, max_size=2),
            "anyOf": st.lists(inner, min_size=1, max_size=2),
            "oneOf": st.lists(inner, min_size=1, max_size=2),
            "not": inner,
            "description": st.just("x"),
        },
    )


some_schemas = schemas(st.booleans() | schemas(st.booleans() | st.just({"type": "string"})))


@settings(max_examples=200)
@given(some_schemas, values)
def test_it_agrees_with_jsonschema(schema: dict[str, Any], value: Any) -> None:
    expected = jsonschema.Draft202012Validator(schema).is_valid(value)
    assert (SchemaCheck(json.dumps(schema)).fault(value) is None) is expected


@pytest.mark.parametrize(
    ("schema", "value", "fault"),
    [
        ({"type": "object", "required": ["city"]}, {}, "city is missing"),
        ({"properties": {"a": {"type": "integer"}}}, {"a": "1"}, "a must be integer"),
        ({"properties": {"a": {"items": {"enum": [1]}}}}, {"a": [1, 2]}, r"a[1] is none of the allowed values"),
        ({"additionalProperties": False}, {"b": 1}, "b is not allowed"),
        ({"properties": {"a": {"maxLength": 1}}}, {"a": "日本"}, "a is too short or too long"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"minProperties": 1}}}, {}, "it is too short or too long"),
    ],
)
def test_faults_name_the_place(schema: dict[str, Any], value: Any, fault: str) -> None:
    assert SchemaCheck(json.dumps(schema)).fault(value) == fault


@pytest.mark.parametrize(
    "schema",
    [
        {"pattern": "a*"}, {"properties": {"a": {"uniqueItems": True}}}, {"patternProperties": {}}, {"if": {}}, {"type": "int"},
        {"$ref": "#/properties/a"}, {"$ref": "#/$defs/none"}, {"minimum": "1"}, {"multipleOf": 0}, {"required": "a"},
        {"enum": {}}, {"properties": []}, {"anyOf": {}}, {"items": [1]}, {"required": [1]}, {"minimum": True},
    ],
)  # fmt: skip
def test_what_it_cannot_keep_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(ParameterError):
        SchemaCheck(json.dumps(schema))


def test_hostile_schemas_end() -> None:
    twice = {"allOf": [{"$ref": "#"}, {"$ref": "#"}]}
    assert SchemaCheck(json.dumps(twice)).fault({}) in ("it takes too long to check", "it cannot be checked")
    doubling = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)} | {"d40": {}}
    fault = SchemaCheck(json.dumps({"$ref": "#/$defs/d0", "$defs": doubling})).fault({})
    assert fault == "it takes too long to check"


def test_recursive_schemas_follow_the_value() -> None:
    tree = {"properties": {"next": {"$ref": "#"}, "n": {"type": "integer"}}, "additionalProperties": False}
    check = SchemaCheck(json.dumps(tree))
    assert check.fault({"next": {"next": {"n": 1}}}) is None
    assert check.fault({"next": {"next": {"n": "1"}}}) == "next.next.n must be integer"
