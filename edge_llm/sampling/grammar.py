"""Grammar: what an answer must look like; a value, checked before anything compiles it.

Schemas, expressions and grammars come from outside: their size, depth and references are bounded here, and what is left is
compiled under limits of time and memory (`grammar_compiler`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from edge_llm.errors import ParameterError, quoted
from edge_llm.sampling.regex_length import shortest_match

MAX_GRAMMAR_BYTES = 64 << 10
MAX_DEPTH = 32
"""levels of nesting of a schema"""
MAX_ENUM = 2048
"""values of all enumerations of a schema together"""
MAX_LEAST_LENGTH = 10_000
"""characters of the shortest answer that a regex allows"""

JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as Python writes it: a small model that may choose white space can choose it for ever"""


class GrammarKind(StrEnum):
    JSON_OBJECT = "json_object"
    """any JSON object; `text` is empty"""
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    """a regular expression that the whole answer matches: Rust's syntax, no look-around, no back-references"""
    LARK = "lark"
    """a context-free grammar in llguidance's dialect of Lark"""


@dataclass(frozen=True, slots=True)
class Grammar:
    """The whole answer must be in this language. Raises `ParameterError` for text that cannot be one."""

    kind: GrammarKind
    text: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.kind, GrammarKind) or not isinstance(self.text, str):
            raise ParameterError("a grammar takes a GrammarKind and a text")
        try:
            size = len(self.text.encode())
        except UnicodeEncodeError:
            raise ParameterError(f"the {self.kind} holds half a surrogate pair") from None
        if size > MAX_GRAMMAR_BYTES:
            raise ParameterError(f"the {self.kind} has {size} bytes, at most {MAX_GRAMMAR_BYTES} are taken")
        if self.kind is GrammarKind.JSON_OBJECT:
            if self.text:
                raise ParameterError("json_object takes no text", hint="give a json_schema")
        elif not self.text.strip():
            raise ParameterError(f"the {self.kind} is empty")
        if self.kind is GrammarKind.JSON_SCHEMA:
            parse_schema(self.text)
        if self.kind is GrammarKind.REGEX:
            _check_length(self.text)

    @classmethod
    def json_object(cls) -> Self:
        return cls(GrammarKind.JSON_OBJECT)

    @classmethod
    def json_schema(cls, schema: str | dict[str, Any]) -> Self:
        """A JSON Schema, as text or as what `json.loads` gives."""
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ParameterError(f"the schema is no JSON: {error}") from None
        return cls(GrammarKind.JSON_SCHEMA, text)

    @classmethod
    def regex(cls, pattern: str) -> Self:
        return cls(GrammarKind.REGEX, pattern)

    @classmethod
    def lark(cls, text: str) -> Self:
        return cls(GrammarKind.LARK, text)


def _check_length(pattern: str, what: str = "the regex") -> None:
    """An answer that must be longer than any is only work: for the compiler, then for each step."""
    try:
        length = shortest_match(pattern)
    except ValueError as error:
        raise ParameterError(f"{what} is not sound: {error}") from None
    if length > MAX_LEAST_LENGTH:
        raise ParameterError(
            f"{what} has too many states: no answer shorter than {length} characters matches it, "
            f"at most {MAX_LEAST_LENGTH} are taken"
        )


def parse_schema(text: str) -> dict[str, Any]:
    """The schema in `text` (`true` is {}). Escaped and raw characters are the same. Raises `ParameterError`."""
    try:
        schema = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_object)
        json.dumps(schema, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ParameterError("the schema holds half a surrogate pair") from None
    except (ValueError, RecursionError) as error:
        raise ParameterError(f"the schema is no JSON: {quoted(str(error))}") from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise ParameterError("the schema is no JSON object")
    _check(schema)
    return schema


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("a key stands twice in an object")
    return result


def _check(schema: dict[str, Any]) -> None:
    """Depth, enumerations, references and patterns, without recursion."""
    values = 0
    left: list[tuple[Any, int]] = [(schema, 1)]
    while left:
        node, depth = left.pop()
        if depth > MAX_DEPTH:
            raise ParameterError(f"the schema is nested more than {MAX_DEPTH} levels deep")
        if isinstance(node, dict):
            reference = node.get("$ref")
            if isinstance(reference, str) and not reference.startswith("#"):
                raise ParameterError(
                    f"the schema refers to {quoted(reference)}, and nothing is fetched",
                    hint="put the definition under $defs and refer to it by #/$defs/...",
                )
            if isinstance(node.get("pattern"), str):
                _check_length(node["pattern"], "the schema's pattern")
            if isinstance(node.get("enum"), list):
                values += len(node["enum"])
        if values > MAX_ENUM:
            raise ParameterError(f"the schema's enumerations have more than {MAX_ENUM} values")
        if isinstance(node, dict | list):
            left.extend((child, depth + 1) for child in (node.values() if isinstance(node, dict) else node))
