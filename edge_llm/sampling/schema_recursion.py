"""Recursive schemas made finite: a small model that may nest for ever does.

Each definition on a cycle of references is copied once a level, and what would nest deeper than that is `false`.
"""

from __future__ import annotations

import re
from typing import Any

MAX_NESTING = 6
"""levels that definitions may nest in themselves: a full binary tree of them fits into a usual answer"""

_TARGET = re.compile(r"#|#/(\$defs|definitions)/[^/]+")
_TABLES = ("$defs", "definitions")
_DATA = frozenset({"const", "enum", "default", "examples"})
"""keywords whose values are no schemas"""


def bound_recursion(schema: dict[str, Any], levels: int = MAX_NESTING) -> dict[str, Any]:
    """An equal schema, but for values that nest recursive definitions deeper than `levels`, which it does not allow.

    References other than to the root and to members of $defs and definitions stay as they are.
    """
    links = {pointer: _references(_target(schema, pointer)) for pointer in _pointers(schema)}
    recursive = sorted(pointer for pointer in links if pointer in _reachable(links, pointer))
    if not recursive:
        return schema
    names = {pointer: f"recursion-{number}" for number, pointer in enumerate(recursive)}

    def rewritten(node: Any, level: int) -> Any:
        if isinstance(node, list):
            return [rewritten(item, level) for item in node]
        if not isinstance(node, dict):
            return node
        pointer = node.get("$ref")
        if isinstance(pointer, str) and pointer in names:
            if level == levels:
                return False
            node = {**node, "$ref": f"#/$defs/{names[pointer]}-{level + 1}"}
        return {key: value if key in _DATA else rewritten(value, level) for key, value in node.items()}

    copies = {
        f"{names[pointer]}-{level}": rewritten(_target(schema, pointer), level)
        for pointer in recursive
        for level in range(1, levels + 1)
    }
    others: dict[str, dict[str, Any]] = {
        table: {name: rewritten(body, 0) for name, body in schema[table].items() if f"#/{table}/{name}" not in names}
        for table in _TABLES
        if isinstance(schema.get(table), dict)
    }
    root = {"$ref": f"#/$defs/{names['#']}-1"} if "#" in names else rewritten(_target(schema, "#"), 0)
    return {**root, **others, "$defs": {**others.get("$defs", {}), **copies}}


def _pointers(schema: dict[str, Any]) -> list[str]:
    tables = {table: schema.get(table) for table in _TABLES}
    return ["#", *(f"#/{table}/{name}" for table, held in tables.items() if isinstance(held, dict) for name in held)]


def _target(schema: dict[str, Any], pointer: str) -> Any:
    """What a pointer names; the root without its definitions."""
    if pointer == "#":
        return {key: value for key, value in schema.items() if key not in _TABLES}
    _, table, name = pointer.split("/", 2)
    return schema[table][name]


def _references(node: Any) -> set[str]:
    found: set[str] = set()
    left = [node]
    while left:
        item = left.pop()
        if isinstance(item, dict):
            pointer = item.get("$ref")
            if isinstance(pointer, str) and _TARGET.fullmatch(pointer):
                found.add(pointer)
            left.extend(value for key, value in item.items() if key not in _DATA)
        elif isinstance(item, list):
            left.extend(item)
    return found


def _reachable(links: dict[str, set[str]], start: str) -> set[str]:
    """What `start` refers to, directly or not."""
    seen: set[str] = set()
    left = list(links[start])
    while left:
        pointer = left.pop()
        if pointer in links and pointer not in seen:
            seen.add(pointer)
            left.extend(links[pointer])
    return seen
