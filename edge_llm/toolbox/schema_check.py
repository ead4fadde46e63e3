"""Whether arguments fit a tool's JSON Schema: the part of the language that tools use, and nothing read past.

What is not supported is refused by name when the tool is registered, so that no limit of a schema is silently ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from edge_llm.errors import ParameterError, quoted
from edge_llm.sampling.grammar import parse_schema

MAX_STEPS = 100_000
"""schemas that one value is held against: references and unions may multiply"""

_TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "integer": lambda value: (
        (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and value.is_integer())
    ),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
}
_NOTES = frozenset(
    ("$comment", "$id", "$schema", "default", "deprecated", "description", "examples", "format", "title")
)
"""keywords that tell, and forbid nothing"""
_SINGLE = ("additionalProperties", "items", "not")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_TABLES = ("properties", "$defs", "definitions")
_VALUES = frozenset(("const", "enum", "required", "type", "$ref"))
_BOUNDS = frozenset(
    ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "minItems")
) | {"maxItems", "minProperties", "maxProperties"}
_KNOWN = _NOTES | _VALUES | _BOUNDS | set(_SINGLE) | set(_LISTS) | set(_TABLES)
_SIZES = ((str, "Length"), (list, "Items"), (dict, "Properties"))


class SchemaCheck:
    """Holds values against one schema. Raises `ParameterError` for a schema that it cannot keep in full."""

    def __init__(self, schema: str) -> None:
        self._root = parse_schema(schema)
        self._targets = {"#": self._root} | {
            f"#/{table}/{name}": body
            for table in ("$defs", "definitions")
            if isinstance(self._root.get(table), dict)
            for name, body in self._root[table].items()
        }
        self._steps = 0
        for node in _subschemas(self._root):
            self._check(node)

    def fault(self, value: Any) -> str | None:
        """What is wrong with a value, in words that a model can use; None if it fits."""
        self._steps = 0
        try:
            return self._fault(self._root, value, "")
        except RecursionError:
            return "it cannot be checked"

    def _check(self, node: Any) -> None:
        if isinstance(node, bool):
            return
        if not isinstance(node, dict):
            raise ParameterError("a schema is an object, true or false")
        unknown = sorted(node.keys() - _KNOWN)
        if unknown:
            raise ParameterError(
                f"a tool's schema may not use {quoted(unknown[0])}",
                hint=f"it may use {', '.join(sorted(_KNOWN - _NOTES))}, and notes such as description",
            )
        types = node.get("type", [])
        for name in types if isinstance(types, list) else [types]:
            if name not in _TYPES:
                raise ParameterError(f"a schema knows no type {quoted(str(name))}")
        if "$ref" in node and node["$ref"] not in self._targets:
            raise ParameterError(f"a tool's schema may not refer to {quoted(str(node['$ref']))}")
        for name in _BOUNDS & node.keys():
            if (
                not _TYPES["number"](node[name])
                or not math.isfinite(node[name])
                or (name == "multipleOf" and node[name] <= 0)
            ):
                raise ParameterError(f"{name} of a schema must be a number")
        required = node.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise ParameterError("required of a schema must be a list of names")
        if not isinstance(node.get("enum", []), list):
            raise ParameterError("enum of a schema must be a list")

    def _fault(self, schema: Any, value: Any, place: str) -> str | None:
        self._steps += 1
        if self._steps > MAX_STEPS:
            return "it takes too long to check"
        if isinstance(schema, bool):
            return None if schema else f"{place or 'it'} is not allowed"
        faults = self._faults(schema, value, place)
        return next((fault for fault in faults if fault is not None), None)

    def _faults(self, schema: Mapping[str, Any], value: Any, place: str) -> Iterator[str | None]:
        said = place or "it"
        types = schema.get("type")
        if types is not None:
            names = types if isinstance(types, list) else [types]
            yield None if any(_TYPES[name](value) for name in names) else f"{said} must be {' or '.join(names)}"
        if "const" in schema:
            yield None if _same(value, schema["const"]) else f"{said} has another value than the only one allowed"
        if "enum" in schema:
            yield None if any(_same(value, one) for one in schema["enum"]) else f"{said} is none of the allowed values"
        yield _bound_fault(schema, value, said)
        if isinstance(value, dict):
            yield from self._object_faults(schema, value, place)
        if isinstance(value, list):
            first = schema.get("prefixItems", [])
            for i, item in enumerate(value):
                yield self._fault(first[i] if i < len(first) else schema.get("items", True), item, f"{said}[{i}]")
        if "$ref" in schema:
            yield self._fault(self._targets[schema["$ref"]], value, place)
        for part in schema.get("allOf", []):
            yield self._fault(part, value, place)
        for union in ("anyOf", "oneOf"):
            if union in schema:
                count = sum(self._fault(part, value, place) is None for part in schema[union])
                fits = count == 1 if union == "oneOf" else count > 0
                yield None if fits else f"{said} has none of the forms it may have"
        if "not" in schema:
            yield f"{said} has a form it may not have" if self._fault(schema["not"], value, place) is None else None

    def _object_faults(self, schema: Mapping[str, Any], value: dict[str, Any], place: str) -> Iterator[str | None]:
        properties = schema.get("properties", {})
        for name in schema.get("required", []):
            yield None if name in value else f"{place}.{name} is missing" if place else f"{name} is missing"
        for name, item in value.items():
            inner = f"{place}.{name}" if place else name
            if name in properties:
                yield self._fault(properties[name], item, inner)
            else:
                yield self._fault(schema.get("additionalProperties", True), item, inner)


def _subschemas(root: Any) -> Iterator[Any]:
    left = [root]
    while left:
        node = left.pop()
        yield node
        if isinstance(node, dict):
            left += [node[name] for name in _SINGLE if name in node]
            left += [part for name in _LISTS for part in _parts(node.get(name, []), list)]
            left += [part for name in _TABLES for part in _parts(node.get(name, {}), dict).values()]


def _parts(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise ParameterError("a keyword of a schema has a value of another kind")
    return value


def _bound_fault(schema: Mapping[str, Any], value: Any, said: str) -> str | None:
    if _TYPES["number"](value):
        low, high = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
        above, below = schema.get("exclusiveMinimum", -math.inf), schema.get("exclusiveMaximum", math.inf)
        if not (low <= value <= high and above < value < below):
            return f"{said} is out of its range"
        step = schema.get("multipleOf")
        return f"{said} is no multiple of {step}" if step is not None and not _is_multiple(value, step) else None
    name = next((name for kind, name in _SIZES if isinstance(value, kind)), None)
    if name is not None and not schema.get(f"min{name}", 0) <= len(value) <= schema.get(f"max{name}", math.inf):
        return f"{said} is too short or too long"
    return None


def _is_multiple(value: float, step: float) -> bool:
    if isinstance(value, int) and isinstance(step, int):
        return value % step == 0
    try:
        count = value / step
    except OverflowError:
        return False
    return math.isfinite(count) and abs(count - round(count)) < 1e-9


def _same(left: Any, right: Any) -> bool:
    """Equal as JSON: 1 is 1.0, and neither is true."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    return bool(left == right)
