"""Schemas, expressions and grammars made to cost time or memory (trust.md F23)."""

from __future__ import annotations

from typing import Any

from edge_llm.sampling.grammar import Grammar


def _deep(levels: int, leaf: Any, key: str) -> Any:
    for _ in range(levels):
        leaf = {key: [leaf, leaf]}
    return leaf


def _chain(count: int, width: int) -> dict[str, Any]:
    """Definitions that each refer to the next, several times: the expansion is width ** count long."""
    definitions: dict[str, Any] = {
        f"d{i}": {"type": "object", "properties": {f"p{j}": {"$ref": f"#/$defs/d{i + 1}"} for j in range(width)}}
        for i in range(count)
    }
    definitions[f"d{count}"] = {"type": "string"}
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


SCHEMAS: list[dict[str, Any]] = [
    {"$ref": "#"},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
    {"allOf": [{"$ref": "#"}]},
    {"oneOf": [{"$ref": "#"}, {"type": "string"}]},
    _chain(20, 8),
    _chain(200, 4),
    {"enum": [f"value {i}" for i in range(2000)]},
    {"enum": ["x" * 20_000, "x" * 20_001]},
    _deep(8, {"type": "string"}, "anyOf"),
    _deep(8, {"type": "string", "minLength": 3}, "allOf"),
    _deep(7, {"type": "integer", "minimum": 3}, "oneOf"),
    {"type": "string", "pattern": "(a+)+$"},
    {"type": "string", "pattern": "(a|a)*b"},
    {"type": "string", "pattern": "(.*a){30}"},
    {"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$"},
    {"type": "string", "pattern": "[a-z]{1,60000}"},
    {"type": "string", "pattern": "((a{1,500}){1,500}){1,500}"},
    {"type": "string", "pattern": "(.{1,300}b){1,300}"},
    {"type": "string", "pattern": "[^a]*a.{200}"},
    {"type": "string", "minLength": 100_000, "maxLength": 100_001},
    {"type": "string", "maxLength": 2**53},
    {"type": "string", "minLength": 2**31},
    {"type": "integer", "minimum": -(10**300), "maximum": 10**300},
    {"type": "integer", "multipleOf": 999_999_937},
    {"type": "number", "minimum": 1e-300, "maximum": 1e300},
    {"type": "array", "items": {"type": "string"}, "minItems": 100_000},
    {"type": "array", "items": {"type": "integer"}, "minItems": 5000, "maxItems": 10_000},
    {"type": "array", "prefixItems": [{"type": "string"}] * 2000},
    _object(**{f"p{i}": {"type": "string"} for i in range(1500)}),
    {**_object(**{f"p{i}": {} for i in range(300)}), "required": [f"p{i}" for i in range(300)]},
    {"patternProperties": {f"^{c}{{1,200}}$": {"type": "string"} for c in "abcdefgh"}},
    {"patternProperties": {"(a*)*b": {"$ref": "#"}}},
    {"propertyNames": {"pattern": "(x+x+)+y"}, "type": "object"},
    {"allOf": [{"type": "string", "pattern": f".*{c}.*"} for c in "abcdefghijklmnop"]},
    {"allOf": [{"type": "integer", "multipleOf": p} for p in (7, 11, 13, 17, 19, 23)]},
    {"not": {"type": "string"}},
    {"if": {"type": "string"}, "then": {"$ref": "#"}},
    {"dependentSchemas": {"a": {"$ref": "#"}}},
    {"type": "string", "format": "x" * 1000},
    {"const": {"a": "x" * 30_000}},
]

REGEXES = [
    "(a+)+b",
    "(a*)*",
    "((a{0,100}){0,100}){0,100}",
    "(.*){50}x",
    "[a-z]{1,50000}",
    "(\\w{1,50} ){1,500}",
    "(a?){3000}a{3000}",
    ".*" * 500 + "x",
    "(" * 2000 + "a" + ")" * 2000,
    "[" + "".join(f"\\u{{{i:x}}}" for i in range(0x4E00, 0x5600)) + "]{1,100}",
    "(?:(?:x{1,99}){1,99}|y){1,99}z",
    "\\p{L}{1,5000}",
    "(a|b|ab|ba|aab|abb)*c{1,1000}",
]

LARKS = [
    "start: start",
    "start: a\na: b\nb: a",
    "start: start start | A\nA: /a/",
    "start: (A? B?)* C\nA: /a+/\nB: /a*/\nC: /a{1,1000}/",
    "start: " + " ".join(f"r{i}" for i in range(500)) + "\n" + "\n".join(f'r{i}: "x"{{0,100}}' for i in range(500)),
    'start: r{1,100000}\nr: "x"',
    "start: A\nA: /(a|aa|aaa){1,300}b/",
    "start: A+\nA: /(.|\\n)*/",
    "start: " + "(" * 500 + '"a"' + ")" * 500,
    'start: %json {"type": "object", "properties": {"a": {"$ref": "#"}}}',
    "start: UNKNOWN",
    "%import common.NOTHING\nstart: NOTHING",
]

BOMBS = [
    *(Grammar.json_schema(schema) for schema in SCHEMAS),
    *map(Grammar.regex, REGEXES),
    *map(Grammar.lark, LARKS),
]
